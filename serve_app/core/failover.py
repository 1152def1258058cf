"""`Failover` decides which requests of a lost replica continue elsewhere, and removes from a later attempt what was already sent.

Pure. Only `Attempts` and `FleetState` call this module: they know which replica holds a request, this module which request may continue and
from where.
"""

from collections.abc import Iterable, Set

from serve_app.core.events import LinkEnd
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.gaps import Gaps
from serve_app.core.instructions import FailRequest
from serve_app.core.quarantine import Quarantine
from serve_app.core.request import EngineOutput, RequestState, Resume, Trial
from serve_app.core.routing import ReplicaState
from serve_app.errors import ReplicaLost, RequestQuarantined, ResumeDiverged, ServingError

_BLAMED = (LinkEnd.ENGINE_DIED, LinkEnd.MISUNDERSTOOD, LinkEnd.BROKE_OFF)
"""Ends of a link that a request may have caused. A drain or a silent network only moves requests and must not make suspects of them."""


class Failover:
    """Judges the requests of a lost replica and the outputs of later attempts."""

    def __init__(self, settings: FleetSettings, quarantine: Quarantine) -> None:
        self.resumptions = 0
        """How often a request that lost its replica was queued again, since this process started."""
        self.gaps = Gaps()
        self._settings = settings
        self._quarantine = quarantine

    def take_back(
        self, replica: ReplicaState, end: LinkEnd, unsent: Set[str], *, now: float
    ) -> tuple[list[RequestState], list[FailRequest]]:
        """Return the requests of a lost replica that continue, in the order of their starts, and the ends of the others.

        Attempts in ``unsent`` never left the ingress: whatever ended the link, their requests are not suspected of it.
        """
        continuing: list[RequestState] = []
        failed: list[FailRequest] = []
        for request in replica.held.values():
            may_be_cause = end in _BLAMED and request.trial is not Trial.IN_LINE and request.attempt_id not in unsent
            self._quarantine.end_trial(request)
            replica.settle(request)
            request.replica_id, request.outstanding_tokens = None, 0
            if (error := self._end_of(request, replica.replica_id, end, now, may_be_cause=may_be_cause)) is not None:
                failed.append(FailRequest(request.request_id, error))
                continue
            self.resumptions += 1
            self.note_loss(request, now=now)
            continuing.append(request)
        return continuing, failed

    def note_loss(self, request: RequestState, *, now: float) -> None:
        """Note that the request has lost or left its replica: no new token comes until its next attempt has one."""
        request.waiting_since = now
        request.lost_at = now if request.lost_at is None else request.lost_at

    def _end_of(
        self, request: RequestState, replica_id: str, end: LinkEnd, now: float, *, may_be_cause: bool
    ) -> ServingError | None:
        """Return why the request ends with its replica; None if it continues elsewhere."""
        if may_be_cause:
            if request.suspect_of is not None:  # at its trial: a suspect is given to an engine in no other way
                self._quarantine.block(request.fingerprint, now=now)
                return RequestQuarantined(blocked_s=self._settings.quarantine_s)
            self._blame(request, replica_id, end)
        reason = self._why_not_again(request, now)
        return None if reason is None else ReplicaLost(request=request.request_id, reason=f"{end.value}; {reason}")

    def _blame(self, request: RequestState, replica_id: str, end: LinkEnd) -> None:
        """Suspect the request: the engine may have been computing it when the engine was lost."""
        request.suspect_of = replica_id
        if end is LinkEnd.BROKE_OFF:
            request.broken_off |= {replica_id}
        else:
            request.deaths += 1

    def linked_again(self, replica_id: str, requests: Iterable[RequestState]) -> None:
        """Clear suspects: the replica is alive, so its connection broke off for another reason than its death."""
        for request in requests:
            if replica_id in request.broken_off:
                request.broken_off -= {replica_id}
                request.suspect_of = None if request.suspect_of == replica_id else request.suspect_of

    def _why_not_again(self, request: RequestState, now: float) -> str | None:
        if request.resume is Resume.NEVER and request.emitted_ids:
            return "an answer like this one cannot be continued elsewhere"
        if (deaths := request.deaths + len(request.broken_off)) >= self._settings.max_deaths:
            return f"{deaths} replicas died, or seemed to, while they held the request"
        return self._standstill(request, now)

    def of_standstill(self, request: RequestState, now: float) -> ReplicaLost | None:
        """Return the error of a waiting request that has stood still for too long; None while it may be tried again."""
        reason = self._standstill(request, now)
        return None if reason is None else ReplicaLost(request=request.request_id, reason=reason)

    def _standstill(self, request: RequestState, now: float) -> str | None:
        limit_s = self._settings.max_standstill_s
        if request.lost_at is None or now - request.lost_at <= limit_s:
            return None
        return f"no replica could continue it for {now - request.lost_at:.1f} s, limit {limit_s:g} s"

    def begin(self, request: RequestState) -> tuple[int, ...]:
        """Set how many emitted ids the next attempt has to repeat; return the emitted ids that it continues from."""
        continues = request.resume in (Resume.CONTINUE, Resume.NEVER)
        request.to_swallow = 0 if continues else len(request.emitted_ids)
        return tuple(request.emitted_ids) if continues else ()

    def swallow(self, request: RequestState, output: EngineOutput, *, now: float) -> int:
        """Remove from an output of a later attempt the tokens that were sent already; return how many were removed.

        Raises:
            ResumeDiverged: The attempt does not repeat the tokens that were sent.
        """
        if request.emitted_ids:
            # The first attempt's events came with its first token; a second QUEUED event would give vLLM a negative queue time.
            output.events = output.prefill_stats = None
        ids = output.new_token_ids
        if not ids:
            return 0  # an end without a token is the engine's own failure, which the front end reports
        if not request.to_swallow:
            self._continued(request, now)
            return 0
        position = request.first_difference(ids, ended=output.finish_reason is not None)
        if position is not None:
            raise ResumeDiverged(position=position)
        count = min(request.to_swallow, len(ids))
        request.to_swallow -= count
        output.new_token_ids = ids[count:]
        if output.new_token_ids:
            self._continued(request, now)
        return count

    def _continued(self, request: RequestState, now: float) -> None:
        if request.lost_at is not None:
            way = request.resume if request.emitted_ids else Resume.RESTART
            self.gaps.add(way.value, now - request.lost_at)
            request.lost_at = None

    def validate(self, requests: Iterable[RequestState]) -> None:
        """Assert the invariants of the fields that this module keeps in requests."""
        for request in requests:
            assert 0 <= request.to_swallow <= len(request.emitted_ids)
            assert 0 <= request.deaths + len(request.broken_off) < self._settings.max_deaths
            assert request.lost_at is None or request.lost_at <= request.waiting_since
