"""What becomes of requests whose replica goes, and of attempts that repeat what was sent already.

Pure. Only ``FleetState`` calls this module: it knows who holds what and who waits, this module knows who may go on and from where.
"""

from collections.abc import Iterable

from serve_app.core.events import LinkLost
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import FailRequest
from serve_app.core.request import EngineOutput, RequestState, Resume
from serve_app.errors import ReplicaLost, ResumeDiverged


class Failover:
    """Judges the requests of a lost replica and the outputs of later attempts."""

    def __init__(self, settings: FleetSettings) -> None:
        self.resumptions = 0
        """How often a request that lost its replica was queued again, since the start."""
        self._settings = settings

    def take_back(
        self, held: Iterable[RequestState], lost: LinkLost, *, now: float
    ) -> tuple[list[RequestState], list[FailRequest]]:
        """Return which requests of a lost replica go on, in the order of ``held``, and the ends of the others."""
        going_on: list[RequestState] = []
        failed: list[FailRequest] = []
        for request in held:
            request.replica_id, request.outstanding_tokens = None, 0
            if self._may_resume(request):
                self.resumptions += 1
                request.losses += 1
                request.waiting_since = now
                going_on.append(request)
            else:
                error = ReplicaLost(request=request.request_id, cause=f"replica {lost.replica_id}: {lost.cause}")
                failed.append(FailRequest(request.request_id, error))
        return going_on, failed

    def _may_resume(self, request: RequestState) -> bool:
        if request.losses + 1 >= self._settings.max_attempts:
            return False
        return not (request.resume is Resume.NEVER and request.emitted_ids)

    def begin(self, request: RequestState) -> tuple[int, ...]:
        """Set how much the next attempt has to repeat; return the emitted ids that it continues from."""
        continues = request.resume in (Resume.CONTINUE, Resume.NEVER)
        request.to_swallow = 0 if continues else len(request.emitted_ids)
        return tuple(request.emitted_ids) if continues else ()

    def swallow(self, request: RequestState, output: EngineOutput) -> int:
        """Take from an output of a later attempt what was sent already; return the number of its tokens that this removed.

        Raises:
            ResumeDiverged: The attempt does not repeat what was sent.
        """
        if request.emitted_ids:
            # The first attempt's came with its first token; a second QUEUED event would give vLLM a negative queue time.
            output.events = output.prefill_stats = None
        ids = output.new_token_ids
        if not request.to_swallow or not ids:
            return 0  # an end without a token is the engine's own failure, which the front end reports
        position = request.first_difference(ids, ended=output.finish_reason is not None)
        if position is not None:
            raise ResumeDiverged(position=position)
        count = min(request.to_swallow, len(ids))
        request.to_swallow -= count
        output.new_token_ids = ids[count:]
        return count

    def validate(self, requests: Iterable[RequestState]) -> None:
        """Assert the invariants of what this module keeps in requests."""
        for request in requests:
            assert 0 <= request.to_swallow <= len(request.emitted_ids)
            assert 0 <= request.losses < self._settings.max_attempts
