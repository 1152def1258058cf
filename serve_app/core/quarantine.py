"""`Quarantine` refuses requests that are like one which seems to end engines, and says where suspects are tried.

Pure. Only ``FleetState`` and ``Failover`` call this module. docs/adr/0010-try-suspects-one-at-a-time.md has the rules. Two requests are
alike when their fingerprints are equal. A fingerprint covers all that the engine computes from, without the parts that only tell two
requests apart.
"""

from collections.abc import Iterable

from serve_app.core.instructions import FailRequest
from serve_app.core.request import RequestState, Trial
from serve_app.errors import RequestQuarantined

MAX_OWN = 100
"""Fingerprints that one ingress found and reports to the others. A lease with 100 of them has 8 KiB."""
MAX_BLOCKED = 10_000
"""Fingerprints that one ingress refuses, those of other ingresses included: as many as 100 ingresses report."""


class Quarantine:
    """Blocked fingerprints, each until a time, and the running trials of this ingress."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._own: dict[str, float] = {}
        """Fingerprint -> end of its block, the oldest first. ``_blocked`` has these fingerprints, too, and those of other ingresses."""
        self._blocked: dict[str, float] = {}
        self._trials: dict[str, dict[str, str]] = {}
        """Fingerprint -> request id -> replica id, of the attempts on trial."""

    def __len__(self) -> int:
        return len(self._blocked)

    def block(self, fingerprint: str, *, now: float) -> None:
        """Refuse requests with this fingerprint from now on, and report it to the other ingresses."""
        for blocks, limit in ((self._own, MAX_OWN), (self._blocked, MAX_BLOCKED)):
            blocks.pop(fingerprint, None)
            blocks[fingerprint] = now + self._block_s
            _forget_oldest(blocks, limit)

    def learn(self, reported: Iterable[tuple[str, float]], *, now: float) -> None:
        """Refuse the fingerprints that other ingresses reported, for their seconds; one that is blocked already keeps its end."""
        for fingerprint, left_s in reported:
            if left_s > 0:
                self._blocked.setdefault(fingerprint, now + min(left_s, self._block_s))
        _forget_oldest(self._blocked, MAX_BLOCKED)

    def own(self, *, now: float) -> list[tuple[str, float]]:
        """Return the fingerprints that this ingress found, with the seconds for which they are still blocked."""
        return [(fingerprint, until - now) for fingerprint, until in self._own.items() if until > now]

    def expire(self, *, now: float) -> None:
        """Forget fingerprints whose block has ended."""
        for blocks in (self._own, self._blocked):
            for fingerprint in [f for f, until in blocks.items() if until <= now]:
                del blocks[fingerprint]

    def refusal(self, fingerprint: str, *, now: float) -> RequestQuarantined | None:
        """Return the error of a request with this fingerprint, None if it may run."""
        if (until := self._blocked.get(fingerprint)) is None or until <= now:
            return None
        return RequestQuarantined(blocked_s=until - now)

    def refused(self, requests: Iterable[RequestState], *, now: float) -> list[FailRequest]:
        """Return the ends of those among the requests that must not run."""
        if not self._blocked:
            return []
        errors = ((request.request_id, self.refusal(request.fingerprint, now=now)) for request in requests)
        return [FailRequest(request_id, error) for request_id, error in errors if error is not None]

    def begin_trial(self, request: RequestState) -> None:
        """Note that the attempt of a suspect has been placed on a replica."""
        assert request.replica_id is not None
        request.trial = Trial.IN_LINE
        self._trials.setdefault(request.fingerprint, {})[request.request_id] = request.replica_id

    def trial_began(self, request: RequestState | None) -> None:
        """Note that the replica is about to give the attempt to its engine. None: the attempt was aborted meanwhile."""
        if request is not None and request.trial is Trial.IN_LINE:
            request.trial = Trial.BEGUN

    def pass_trial(self, request: RequestState) -> None:
        """Clear the request, which has had a new token: it is no longer a suspect."""
        self.end_trial(request)
        request.suspect_of = None

    def end_trial(self, request: RequestState) -> None:
        """End the trial of the request's attempt, if it is on trial."""
        if request.trial is Trial.NONE:
            return
        request.trial = Trial.NONE
        alike = self._trials[request.fingerprint]
        del alike[request.request_id]
        if not alike:
            del self._trials[request.fingerprint]

    def must_go_to(self, request: RequestState) -> str | None:
        """Return the replica that tries a request like this suspect, if any: the choices of an n>1 must not end a replica each."""
        if request.suspect_of is None or (alike := self._trials.get(request.fingerprint)) is None:
            return None
        return next(iter(alike.values()))

    def validate(self, requests: Iterable[RequestState]) -> None:
        """Assert the invariants."""
        tried = {r.request_id: r.replica_id for r in requests if r.trial is not Trial.NONE}
        assert tried == {i: replica_id for alike in self._trials.values() for i, replica_id in alike.items()}
        assert all(self._trials.values())
        assert self._own.keys() <= self._blocked.keys()


def _forget_oldest(blocks: dict[str, float], limit: int) -> None:
    while len(blocks) > limit:
        del blocks[next(iter(blocks))]
