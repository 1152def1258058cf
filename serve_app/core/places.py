"""`Places` decides which of the replicas that share a GPU has it; the others sleep. Pure; the lease board runs it (``membership.py``).

Replicas report their claims, and the answer grants the GPUs or asks for room. Who has waited longest goes first, within the highest
priority. A holder makes room

- at once if it has no request, for any that asks, or if a model of higher priority asks. `autoscaling/turns.py`, which takes turns by
  starts, lets a holder wait for requests for `IDLE_S` first;
- else, for one of its own priority, after its *stay* of two changes of places. One of lower priority waits until it has no request.

So models with short answers at a dense load change places after nearly each answer, and spend most of their time on it.

A grant ends only when its replica says that it holds nothing, or is gone. So at most one replica holds a GPU at any time. A holder that is
silent for ``expiry_s`` counts as gone; if it lives after all, the engine that wakes beside it finds no memory and ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core.sleep import Claim, Order

STAY_CHANGES = 2.0
MIN_STAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Applicant:
    """A replica that shares GPUs. ``gpus`` are ids that name each GPU of the cluster once, empty if it needs none."""

    replica_id: str
    gpus: tuple[str, ...] = ()
    priority: int = 0
    expiry_s: float = 0.0
    """Seconds after a claim at which the replica counts as gone; 0: the board's own. A board outlives a change of the configuration."""


@dataclass(slots=True)
class _Known:
    """One replica, as it reported itself."""

    applicant: Applicant
    claim: Claim
    heard_at: float
    asked_at: float | None = None
    """Since when it has wanted GPUs that it does not hold."""
    granted: bool = False
    """Whether it holds its GPUs, or may take them."""
    serves_at: float | None = None
    """Since when its engine has been up."""


class Places:
    """The claims of all replicas that share GPUs. Times are seconds of one clock.

    A new instance grants nothing to anyone who does not hold GPUs already, for ``expiry_s``: before that it may not know of all holders.
    """

    def __init__(self, expiry_s: float, *, now: float) -> None:
        """Begin without claims. ``expiry_s``: seconds of silence of a replica whose `Applicant` names none, and of one that is gone."""
        self._expiry_s, self._began = expiry_s, now
        self._grants_from = now + expiry_s
        self._known: dict[str, _Known] = {}
        self._gone: dict[str, float] = {}
        """Until when claims of replicas that said goodbye are late."""

    def report(self, applicant: Applicant, claim: Claim, *, now: float) -> None:
        """Take in the claim of a replica. It must come again before it expires. A claim that a later one has overtaken is ignored."""
        known = self._known.get(applicant.replica_id)
        if self._gone.get(applicant.replica_id, now) > now or (known is not None and claim.number < known.claim.number):
            return
        self._grants_from = max(self._grants_from, self._began + applicant.expiry_s)
        if known is None:
            known = self._known[applicant.replica_id] = _Known(applicant, claim, now)
        if claim.holds:
            known.granted = True
        elif known.claim.holds or not claim.wants:  # one that wants its GPUs again stands at the end of the line
            known.granted = False
        known.asked_at = None if claim.holds or not claim.wants else now if known.asked_at is None else known.asked_at
        known.serves_at = None if not claim.serves else now if known.serves_at is None else known.serves_at
        known.claim, known.heard_at = claim, now
        self.settle(now)

    def forget(self, replica_id: str, *, now: float) -> None:
        """Take in that the replica is gone. Its claims that are still on their way come to nothing."""
        self._gone = {each: until for each, until in self._gone.items() if until > now}
        self._gone[replica_id] = now + self._expiry_s
        if self._known.pop(replica_id, None) is not None:
            self.settle(now)

    def settle(self, now: float) -> None:
        """Forget the replicas that are silent, and grant GPUs that are free."""
        for replica_id in [
            i for i, known in self._known.items() if now - known.heard_at > (known.applicant.expiry_s or self._expiry_s)
        ]:
            del self._known[replica_id]
        if now < self._grants_from:
            return
        for asker in self._askers():
            if not any(self._meet(asker, holder) for holder in self._holders()):
                asker.granted = True

    def order(self, replica_id: str, *, now: float) -> Order:
        """Return the answer to the replica's latest claim."""
        if (known := self._known.get(replica_id)) is None or not known.granted:
            return Order(may_hold=False)
        return Order(may_hold=True, make_room=any(self._yields(known, asker, now) for asker in self._askers()))

    def holders(self) -> dict[str, tuple[str, ...]]:
        """Return the replicas that hold GPUs or may take them, with the GPUs of each."""
        return {known.applicant.replica_id: known.applicant.gpus for known in self._holders()}

    def validate(self) -> None:
        """Assert that no two replicas were granted one GPU, unless both said that they hold it: then the board came too late."""
        taken = set[str]()
        for known in self._holders():
            assert known.claim.holds or taken.isdisjoint(known.applicant.gpus)
            taken |= set(known.applicant.gpus)

    def _holders(self) -> list[_Known]:
        return [known for known in self._known.values() if known.granted]

    def _askers(self) -> Iterable[_Known]:
        """Return the replicas that wait for GPUs, in the order in which they get them."""
        asking = [known for known in self._known.values() if known.asked_at is not None and not known.granted]
        return sorted(asking, key=lambda k: (-k.applicant.priority, k.asked_at, k.applicant.replica_id))

    def _yields(self, holder: _Known, asker: _Known, now: float) -> bool:
        if not self._meet(holder, asker) or not holder.claim.holds:
            return False
        if not holder.claim.busy or asker.applicant.priority > holder.applicant.priority:
            return True
        stay_s = max(MIN_STAY_S, STAY_CHANGES * holder.claim.change_s)
        has_stayed = holder.serves_at is not None and now - holder.serves_at >= stay_s
        return has_stayed and asker.applicant.priority == holder.applicant.priority

    @staticmethod
    def _meet(one: _Known, other: _Known) -> bool:
        return not set(one.applicant.gpus).isdisjoint(other.applicant.gpus)
