"""`EngineWatch` is the supervisor's watch over its engine: it looks at the engine's processes and does what ``core/health.py`` decides."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from serve_app.core.health import (
    Eject,
    EngineJudge,
    Event,
    HealthLimits,
    Looked,
    ProbeAnswered,
    ProcessUse,
    QuestionAnswered,
    SendProbe,
    Stepped,
)
from serve_app.errors import EngineHung
from serve_app.replica import pipe
from serve_app.replica.process_group import group_use

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""A look costs the supervisor 0.3 ms on a machine with 126 processes."""
MAX_GAP_S = 4 * LOOK_EVERY_S
"""At most this much of the time between two looks counts; in the rest the supervisor itself was not awake."""


def answers_probe(message: pipe.FromEngine) -> bool | None:
    """Return whether the message ends a probe; None if it does not belong to one."""
    match message:
        case pipe.StepOutputs(slot=pipe.PROBE_SLOT):
            return bool(message.finished)
        case pipe.Answered(slot=pipe.PROBE_SLOT):
            return True
    return None


class EngineWatch:
    """Watches one engine core process from the moment it is ready. ``on_hung`` is called at most once.

    ``elsewhere`` returns the engine's processes on other nodes, under ids that no process of this node has.
    """

    def __init__(
        self,
        limits: HealthLimits,
        *,
        send: Callable[[pipe.ToEngine], None],
        on_hung: Callable[[EngineHung], None],
        elsewhere: Callable[[], Mapping[int, ProcessUse]] | None = None,
    ) -> None:
        self._elsewhere = elsewhere or dict
        self._judge = EngineJudge(limits)
        self._send = send
        self._on_hung = on_hung
        self._blind = False
        self.paused = False
        """Whether the engine is not judged, because it falls asleep or wakes up."""

    async def run(self, leader: int) -> None:
        """Look at the processes of the group that ``leader`` leads, again and again, until cancelled.

        Each look also sends a ping: the engine core kills a supervisor whose event loop has come to a halt (``supervisor_watch.py``).
        """
        while True:
            self._look(leader)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, leader: int) -> None:
        probe = False
        try:
            looked = [Looked({**group_use(leader), **self._elsewhere()})]
            self._blind = False
        except OSError as exc:  # a lack of descriptors is not the engine's fault, and the ping below must be sent
            looked = []
            if not self._blind:
                logger.warning("no look at the engine's processes: %s; the engine is not judged while this lasts", exc)
            self._blind = True
        if self.paused:
            self._take(QuestionAnswered())
            looked = []
        for instruction in (i for event in looked for i in self._judge.handle(event, now=time.monotonic())):
            match instruction:
                case SendProbe():
                    probe = True
                case Eject(error):
                    self._on_hung(error)
        self._send(pipe.Ping(probe))

    def heard(self, message: pipe.FromEngine) -> bool:
        """Take note of a message of the engine; return whether it was for this watch only."""
        if (answered := answers_probe(message)) is not None:
            if answered:
                self._take(ProbeAnswered())
            return True
        match message:
            case pipe.StepOutputs():
                self._take(Stepped(message.load.step))
            case pipe.Answered():
                self._take(QuestionAnswered())
        return False

    def _take(self, event: Event) -> None:
        self._judge.handle(event, now=time.monotonic())
