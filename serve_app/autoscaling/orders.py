"""`Orders` tracks the replicas on their way: those that were asked for and do not serve yet, since when, and when they should. Pure.

A start that has lasted longer than all measured ones is a right-censored sample: it will take longer than its age. So `Orders` learns
from it before it ends (`Orders.cold_start_s`), and a queue that grows meanwhile does not order replicas again.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serve_app.core.cold_starts import p90

DEFAULT_COLD_START_S = 60.0
"""Until one was measured."""
MAX_COLD_START_S = 900.0
"""An order that is older may never be carried out: no node may have room. No plan reaches further ahead."""

RECENT = 16
"""Orders of which is remembered how long they took."""
LONGER = 1.25
"""Orders are noticed at observations, so that they seem to take a second or two longer than starts that replicas measure."""


@dataclass(slots=True)
class Orders:
    """The orders of one model that are open. Times in seconds of the observations' clock."""

    _ordered_at: deque[float] = field(default_factory=deque)
    """One entry per replica, the oldest first."""
    _lasted_s: deque[float] = field(default_factory=deque)
    """How long the last orders took. One that took longer than `MAX_COLD_START_S` waited for room, and teaches nothing of starts."""
    _target: int | None = None
    """What was wanted at the last look; None before the first one."""
    _measured_s: float = DEFAULT_COLD_START_S
    """The 90th percentile of measured starts when any was known last."""

    def observe(self, *, running: int, target: int, at: float) -> None:
        """Note what is on its way now. What Serve no longer wants it takes from the newest; what serves was ordered first."""
        before = min(target, running) if self._target is None else self._target  # what runs at the first look was not ordered now
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
        """Return for how long each replica has been on its way, the longest first."""
        return [at - ordered_at for ordered_at in self._ordered_at]

    def cold_start_s(self, measured_s: Sequence[float], at: float) -> float:
        """Return what nine of ten starts do not exceed, `MAX_COLD_START_S` at most.

        The measured ones say so, unless the last orders took `LONGER` times as long or more: new nodes and pulls of images may be
        slower than all replicas that there are.

        Args:
            measured_s: What each replica that serves took to start.
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
        """Return when a replica that is ordered now should serve: not sooner than those take that are late."""
        oldest_s = max(self.ages_s(at), default=0.0)
        late_s = 2 * oldest_s - self._measured_s if oldest_s > self._measured_s else 0.0
        return min(MAX_COLD_START_S, max(cold_start_s, late_s))


def queue_at_s(
    queue_s: float, demand: float, *, running_work: float, per_replica: float, ready_in_s: Iterable[float], until_s: float
) -> float:
    """Return the seconds of work that wait ``until_s`` from now, each second of them counted once.

    Args:
        queue_s: Seconds of work that wait now.
        demand: Seconds of work that come each second.
        running_work: Seconds of work that the replicas that serve do each second at most.
        per_replica: What each further replica adds to that.
        ready_in_s: When those that are on their way serve, ascending.
        until_s: How far to look ahead.
    """
    now_s = 0.0
    for ready_s in [*(ready for ready in ready_in_s if ready < until_s), until_s]:
        queue_s = max(0.0, queue_s + (demand - running_work) * (ready_s - now_s))
        now_s, running_work = ready_s, running_work + per_replica
    return queue_s
