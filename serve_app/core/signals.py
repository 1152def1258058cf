"""What the autoscaler knows: counters of ingresses and replicas, and what they say of one interval. Pure.

Members count from their own start and report the counts, so that a report that is lost is made up for by the next; a member that
starts again starts from zero under a new id. `Meter` turns the reports into the increments since it was read last.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

STALE_S = 6.0
"""After so long without a report a member counts as silent: three reports of every second or two may be late."""


@dataclass(slots=True)
class Tally:
    """What one ingress has seen of one model since its start; ``FleetState`` counts. Tokens and requests."""

    requests: int = 0
    """Engine requests that arrived, refused ones included: demand does not shrink because it is turned away."""
    prompt_tokens: int = 0
    """Of those requests."""
    rejected: int = 0
    """Requests refused because the queue was full or no replica came in time."""
    prefilled_tokens: int = 0
    """Prompt tokens of requests whose first output has come."""
    output_tokens: int = 0
    finished: int = 0
    """Requests whose answer ended, by itself or because its client left in its midst."""
    finished_tokens: int = 0
    """Output tokens of those."""
    first_tokens: int = 0
    late_first_tokens: int = 0
    """First tokens that came later after the arrival than the SLO allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One model in one interval: increments, summed over all members, and the state at its end."""

    interval_s: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    rejected: float = 0.0
    prefilled_tokens: float = 0.0
    output_tokens: float = 0.0
    finished: float = 0.0
    finished_tokens: float = 0.0
    first_tokens: float = 0.0
    late_first_tokens: float = 0.0
    steps: float = 0.0
    """Engine steps of all replicas."""
    busy_s: float = 0.0
    """Seconds that replicas spent in them; at most num_replicas x interval_s."""
    waiting: float = 0.0
    """Requests without a replica at the ingresses."""
    queued: float = 0.0
    """Requests in the engines' waiting queues."""
    running: float = 0.0
    """Requests in the engines' running batches."""
    kv_usage: float = 0.0
    """Used share of the KV cache, the mean over replicas, 0..1."""
    max_num_seqs: float | None = None
    """Requests that one replica runs at once at most; None when none has said so."""
    cold_start_s: tuple[float, ...] = ()
    """What the start of each replica that is there took, from Serve's order to its first readiness."""
    silent: tuple[str, ...] = ()
    """Members that should report and do not."""
    is_partial: bool = False
    """Whether members that drain and report no more still do a part of the work: tokens and steps do not belong together."""


INCREMENTS = tuple(f.name for f in fields(Tally))
REPLICA_INCREMENTS = ("steps", "busy_s")


class Meter:
    """The increments of cumulative counters since they were last taken.

    A member that is seen for the first time, or again after a silence, adds nothing: what it counted meanwhile is not of one second.
    """

    def __init__(self) -> None:
        self._taken: dict[str, dict[str, float]] = {}
        self._heard: dict[str, tuple[float, float]] = {}
        """Member -> its newest report's own time stamp, and when that was first seen here: clocks of hosts may differ."""

    def take(self, reports: Mapping[str, tuple[float, Mapping[str, float]]], *, now: float) -> dict[str, float]:
        """Return the sum of the increments of each counter.

        Args:
            reports: Member -> time stamp of its report, in seconds of its own clock, and its counters. Members that are gone
                are left out: they are forgotten.
            now: Seconds of one clock, never less than before.
        """
        total: dict[str, float] = {}
        for member, (stamp, counters) in reports.items():
            before, known = self._taken.get(member), self._heard.get(member)
            is_late = known is not None and stamp > known[0] and now - known[1] > STALE_S
            if before is not None and not is_late:
                for name, value in counters.items():
                    # A counter that fell belongs to a process that started again under the old name.
                    total[name] = total.get(name, 0.0) + max(0.0, value - before.get(name, 0.0))
            if known is None or stamp > known[0]:
                self._heard[member] = stamp, now
        self._taken = {member: dict(counters) for member, (_, counters) in reports.items()}
        self._heard = {member: heard for member, heard in self._heard.items() if member in reports}
        return total

    def silent(self, members: Iterable[str], *, now: float) -> tuple[str, ...]:
        """Return those of ``members`` that have reported nothing, or nothing new for `STALE_S`, sorted."""
        return tuple(sorted(m for m in members if m not in self._heard or now - self._heard[m][1] > STALE_S))
