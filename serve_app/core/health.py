"""`EngineJudge` decides for a replica's supervisor whether the engine still works. Pure.

The judge counts two silences, in seconds in which the supervisor itself was awake. ``silent_s`` ends with each step of the engine
and with each answer to a question, such as the probe. ``quiet_s`` ends with those, too, and whenever the engine's processes have used
CPU time: a long prompt on a CPU engine is silent, but not quiet. docs/adr/0009-judge-an-engine-by-its-progress.md has the reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.errors import EngineHung, EngineSilent, EngineStopped, StepTooLong

COMPUTED_S = 0.1
"""CPU seconds of all processes of an engine that end a quiet time. Within 8 s this is 1.25 % of a core: an engine core that hangs uses
0.1 % for its other threads, an engine that computes with a twentieth of a core four times the 1.25 %."""


class ObservedTime:
    """Measures the seconds in which the caller was awake. A caller that was stopped or starved must not blame another for that time."""

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._seen_at: float | None = None

    def passed(self, now: float) -> float:
        """Return the seconds since the last call, ``max_gap_s`` at most; 0 at the first."""
        passed_s = 0.0 if self._seen_at is None else min(now - self._seen_at, self._max_gap_s)
        self._seen_at = now
        return passed_s


class PeerSilence:
    """Decides when a peer that reports at short intervals has hung, from the seconds in which the caller itself was awake."""

    def __init__(self, limit_s: float, max_gap_s: float) -> None:
        self.limit_s = limit_s
        self.silent_s = 0.0
        self._awake = ObservedTime(max_gap_s)

    def heard(self) -> None:
        """Take note of a sign of life."""
        self.silent_s = 0.0

    def is_over(self, now: float) -> bool:
        """Return whether the peer has been silent for ``limit_s``. Call this at short intervals."""
        self.silent_s += self._awake.passed(now)
        return self.silent_s >= self.limit_s


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Limits in seconds, as `HealthSettings` explains them; of the time between two looks at most ``max_gap_s`` counts."""

    probe_after_s: float
    eject_after_s: float
    max_step_s: float
    max_gap_s: float


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process of an engine: the CPU seconds since its start, and whether it is stopped, as by SIGSTOP."""

    cpu_s: float
    stopped: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """The engine reported how many steps it has made."""

    step: int


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The engine ran the probe, or answered it without running it."""


@dataclass(frozen=True, slots=True)
class QuestionAnswered:
    """The engine's own loop has answered a question other than the probe, between two steps."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The supervisor looked at the engine's ``processes``, by process id; those of other nodes have ids above all of this node."""

    processes: Mapping[int, ProcessUse]


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Ask the engine for one token."""


@dataclass(frozen=True, slots=True)
class Eject:
    """Kill the engine. The judge gives this instruction once, and then no other."""

    error: EngineHung


Event = Stepped | ProbeAnswered | QuestionAnswered | Looked
Instruction = SendProbe | Eject


@dataclass(slots=True)
class _Stop:
    """A stopped process: its CPU time, and for how long it has had no more. Stopped and continued in turns, it gains CPU time."""

    cpu_s: float
    stopped_s: float = 0.0


@dataclass(eq=False)
class EngineJudge:
    """Judges one engine from the moment it is ready."""

    limits: HealthLimits
    silent_s: float = field(default=0.0, init=False)
    quiet_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._awake = ObservedTime(self.limits.max_gap_s)
        self._step = 0
        self._probing = False
        self._counted_cpu_s = 0.0
        self._stops: dict[int, _Stop] = {}
        self._ejected = False

    def handle(self, event: Event, *, now: float) -> list[Instruction]:
        """Take in an event; only `Looked` leads to instructions."""
        match event:
            case Stepped(step):
                if step != self._step:
                    self._step = step
                    self._progress()
            case ProbeAnswered():
                self._probing = False
                self._progress()
            case QuestionAnswered():
                self._progress()
            case Looked(processes):
                return self._look(processes, self._awake.passed(now))
        return []

    def _progress(self) -> None:
        self.silent_s = self.quiet_s = 0.0

    def _look(self, processes: Mapping[int, ProcessUse], passed_s: float) -> list[Instruction]:
        self.silent_s += passed_s
        self.quiet_s += passed_s
        self._count_cpu(sum(use.cpu_s for use in processes.values()))
        self._count_stops(processes, passed_s)
        if self._ejected:
            return []
        if (error := self._verdict()) is not None:
            self._ejected = True
            return [Eject(error)]
        if self.silent_s >= self.limits.probe_after_s and not self._probing:
            self._probing = True
            return [SendProbe()]
        return []

    def _count_cpu(self, cpu_s: float) -> None:
        if cpu_s >= self._counted_cpu_s + COMPUTED_S:
            self.quiet_s = 0.0
            self._counted_cpu_s = cpu_s
        self._counted_cpu_s = min(self._counted_cpu_s, cpu_s)  # a process that has ended takes its CPU time with it

    def _count_stops(self, processes: Mapping[int, ProcessUse], passed_s: float) -> None:
        before, self._stops = self._stops, {}
        for pid, use in processes.items():
            if use.stopped:
                was = before.get(pid)
                stands_still = was is not None and was.cpu_s == use.cpu_s
                self._stops[pid] = _Stop(use.cpu_s, was.stopped_s + passed_s if was and stands_still else 0.0)

    def _verdict(self) -> EngineHung | None:
        limits = self.limits
        stopped_s = max((stop.stopped_s for stop in self._stops.values()), default=0.0)
        if stopped_s >= limits.eject_after_s:
            return EngineStopped(round(stopped_s, 1))
        if self.silent_s >= limits.max_step_s:
            return StepTooLong(round(self.silent_s, 1))
        if self.quiet_s >= limits.eject_after_s:
            return (EngineStopped if self._stops else EngineSilent)(round(self.quiet_s, 1))
        return None

    def validate(self) -> None:
        """Assert the invariants between any two events."""
        assert 0 <= self.quiet_s <= self.silent_s
        assert all(stop.stopped_s >= 0 for stop in self._stops.values())
