"""`Refusals` makes the errors of requests that find no place. Pure; only ``FleetState`` calls it."""

from collections.abc import Collection

from serve_app.core.cold_starts import ColdStarts
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.request import RequestState
from serve_app.core.routing import ReplicaState
from serve_app.errors import NoFreePlace, NoReplica, QueueFull, ReplicaLost


class Refusals:
    """Makes the errors of refused requests, and estimates when they may find a place."""

    def __init__(self, settings: FleetSettings, replicas: Collection[ReplicaState]) -> None:
        self.cold_starts = ColdStarts()
        self._settings = settings
        self._replicas = replicas

    def retry_after_s(self) -> float:
        """Return in how many seconds a refused request may find a place. If all replicas drain, a new one has to start first."""
        cold_start_s = self.cold_starts.retry_after_s()
        if cold_start_s is None or any(not r.draining for r in self._replicas):
            return self._settings.retry_after_s
        return cold_start_s

    def queue_full(self, waiting: int) -> QueueFull:
        return QueueFull(waiting=waiting, limit=self._settings.max_waiting_requests, retry_after_s=self.retry_after_s())

    def of_background(self, waiting: int) -> NoFreePlace | None:
        """Return why a batch's request has no place while ``waiting`` requests wait; None if a place is free that no chat needs.

        A model without a replica takes one request of a batch into its queue, which makes the model start. Where engines yield, a batch's
        requests may wait in their queues, because the next chat goes before them; elsewhere the chat would wait behind them.
        """
        yields = self._settings.engines_yield
        free = not self._replicas or any(
            r.has_room() and not (r.queued_chats if yields else r.load.waiting) for r in self._replicas
        )
        return None if free and not waiting else NoFreePlace(waiting=waiting, retry_after_s=1.0)

    def of_long_wait(self, request: RequestState, now: float) -> NoReplica | ReplicaLost | None:
        """Return the error of a request that has waited for too long; None while it may wait."""
        if (waited_s := now - request.waiting_since) <= self._settings.no_replica_s:
            return None
        if request.weights is not None and self._replicas and not any(r.can_run(request) for r in self._replicas):
            reason = f"for {waited_s:.1f} s there was no replica with the weights that began its answer and room for its tokens"
            return ReplicaLost(request=request.request_id, reason=reason)
        return NoReplica(
            model=self._settings.model,
            waited_s=waited_s,
            retry_after_s=self.retry_after_s(),
            num_linked=len(self._replicas),
            num_draining=sum(r.draining for r in self._replicas),
            held=sum(len(r.held) for r in self._replicas),
            credit=sum(r.credit for r in self._replicas),
        )
