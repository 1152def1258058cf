"""`Orders` tracks the replicas on their way: those that were asked for and do not serve yet, since when, and when they should. Pure.

A start that has lasted longer than all measured ones is a right-censored sample: it will take longer than its age. So `Orders` learns
from it before it ends (`Orders.cold_start_s`), and a queue that grows meanwhile does not order replicas again.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serve_app.core.cold_starts import p90

DEFAULT_COLD_START_S = 60.0
"""The assumed cold start before one was measured."""
MAX_COLD_START_S = 900.0
"""An older order may never be carried out, because no node has room. No plan looks further ahead."""

RECENT = 16
"""The number of latest orders whose durations are remembered."""
LONGER = 1.25
"""Factor by which orders must have taken longer than measured starts to count. Orders are noticed at observations, so that they seem to
take a second or two longer than the starts that replicas measure."""


@dataclass(slots=True)
class Orders:
    """The open orders of one model. Times in seconds of the observations' clock."""

    _ordered_at: deque[float] = field(default_factory=deque)
    """One entry per replica, the oldest first."""
    _lasted_s: deque[float] = field(default_factory=deque)
    """How long the last orders took. An order that took longer than `MAX_COLD_START_S` waited for room, and says nothing about starts."""
    _target: int | None = None
    """The target at the last observation; None before the first."""
    _measured_s: float = DEFAULT_COLD_START_S
    """The latest known 90th percentile of measured starts."""

    def observe(self, *, running: int, target: int, at: float) -> None:
        """Note which replicas are on their way now. Serve cancels the newest orders first; replicas that serve were ordered first."""
        before = min(target, running) if self._target is None else self._target  # replicas running at the first look are no order
        for _ in range(min(len(self._ordered_at), before - target)):
            self._ordered_at.pop()
        self._ordered_at.extend([at] * (target - before))
        missing = max(0, target - running)
        while len(self._ordered_at) > missing:
            if (lasted_s := at - self._ordered_at.popleft()) <= MAX_COLD_START_S:
                self._lasted_s.append(lasted_s)
            if len(self._lasted_s) > RECENT:
                self._lasted_s.popleft()
        self._ordered_at.extend([at] * (missing - len(self._ordered_at)))
        self._target = target

    def ages_s(self, at: float) -> list[float]:
        """Return how long each replica has been on its way, the longest first."""
        return [at - ordered_at for ordered_at in self._ordered_at]

    def cold_start_s(self, measured_s: Sequence[float], at: float) -> float:
        """Return the 90th percentile of starts, `MAX_COLD_START_S` at most.

        It comes from the measured starts, unless the last orders took more than `LONGER` times as long: new nodes and pulls of images may
        be slower than the starts of all present replicas.

        Args:
            measured_s: The measured start of each replica that serves.
            at: Now. Starts in progress that are older than nine of ten measured ones count with their age, up to `MAX_COLD_START_S`.
        """
        self._measured_s = p90(measured_s) or self._measured_s
        late = [age for age in self.ages_s(at) if self._measured_s < age <= MAX_COLD_START_S]
        recent_s = p90([*self._lasted_s, *late]) or 0.0
        return min(MAX_COLD_START_S, recent_s if recent_s > LONGER * self._measured_s else self._measured_s)

    def ready_in_s(self, cold_start_s: float, at: float) -> list[float]:
        """Return in how many seconds each replica on its way should serve, the soonest first.

        A start that is d seconds over the measured p90 is expected in another d seconds.
        """
        return sorted(max(cold_start_s - age, age - self._measured_s) for age in self.ages_s(at))

    def horizon_s(self, cold_start_s: float, at: float) -> float:
        """Return in how many seconds a replica that is ordered now should serve: no sooner than late ones are expected to take."""
        oldest_s = max(self.ages_s(at), default=0.0)
        late_s = 2 * oldest_s - self._measured_s if oldest_s > self._measured_s else 0.0
        return min(MAX_COLD_START_S, max(cold_start_s, late_s))


def queue_at_s(
    queue_s: float, demand: float, *, running_work: float, per_replica: float, ready_in_s: Iterable[float], until_s: float
) -> float:
    """Return the seconds of work that will wait ``until_s`` from now.

    Args:
        queue_s: Seconds of work that wait now.
        demand: Seconds of work that arrive each second.
        running_work: Seconds of work that the serving replicas can do each second.
        per_replica: The addition of each further replica to ``running_work``.
        ready_in_s: In how many seconds the replicas on their way serve, ascending.
        until_s: How far to look ahead.
    """
    now_s = 0.0
    for ready_s in [*(ready for ready in ready_in_s if ready < until_s), until_s]:
        queue_s = max(0.0, queue_s + (demand - running_work) * (ready_s - now_s))
        now_s, running_work = ready_s, running_work + per_replica
    return queue_s
