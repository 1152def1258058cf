"""`Refusals` makes the errors of requests that find no place. Pure; only ``FleetState`` calls it."""

from collections.abc import Collection

from serve_app.core.cold_starts import ColdStarts
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.queue_rate import QueueRate, jitter
from serve_app.core.request import RequestState
from serve_app.core.routing import ReplicaState
from serve_app.errors import CannotStartInTime, NoFreePlace, NoReplica, QueueFull, ReplicaLost

_USED_SHARE = 0.9
"""Share of a request's time that its wait may take by estimate. With all of it, one in 20 admitted requests came too late."""
_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1.0, 600.0


class Refusals:
    """Makes the errors of refused requests, and estimates when they may find a place."""

    def __init__(self, settings: FleetSettings, replicas: Collection[ReplicaState]) -> None:
        self.cold_starts = ColdStarts()
        self.rate = QueueRate()
        self._settings = settings
        self._replicas = replicas

    def retry_after_s(self) -> float:
        """Return in how many seconds a refused request may find a place. If all replicas drain, a new one has to start first."""
        cold_start_s = self.cold_starts.retry_after_s()
        if cold_start_s is None or any(not r.draining for r in self._replicas):
            return self._settings.retry_after_s
        return cold_start_s

    def of_arrival(self, request: RequestState, waiting: int, now: float) -> QueueFull | CannotStartInTime | None:
        """Return why a new request may not wait behind ``waiting`` others; None if it may.

        A request with a deadline is refused if it would probably start too late. While the queue's rate is not known, it may wait.
        """
        if waiting >= (limit := self._settings.max_waiting_requests):
            return QueueFull(waiting=waiting, limit=limit, retry_after_s=self._retry_after_s(request, waiting, now))
        if request.start_by is None or not waiting:
            return None
        left_s, expected_s = request.start_by - now, self._expected_wait_s(waiting, now)
        if left_s > 0 and (expected_s is None or expected_s <= _USED_SHARE * left_s):
            return None
        return self._too_late(request, waiting, now)

    def _too_late(self, request: RequestState, waiting: int, now: float) -> CannotStartInTime:
        expected_s = self._expected_wait_s(waiting, now) or 0.0
        retry_after_s = self._retry_after_s(request, waiting, now)
        return CannotStartInTime(waiting, now - request.arrived_at, expected_s, retry_after_s)

    def _expected_wait_s(self, waiting: int, now: float) -> float | None:
        """Return after how many seconds a request behind ``waiting`` others starts; None if that is not known."""
        if all(r.draining for r in self._replicas) or (rate := self.rate.per_second(now)) is None:
            return None
        return (waiting + 1) / rate

    def _retry_after_s(self, request: RequestState, waiting: int, now: float) -> float:
        """Return when all that wait now have probably started, from `jitter` a little earlier or later for each request."""
        if (expected_s := self._expected_wait_s(waiting, now)) is None:
            return self.retry_after_s()
        return min(max(expected_s * jitter(request.request_id), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)

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

    def of_long_wait(self, request: RequestState, waiting: int, now: float) -> NoReplica | ReplicaLost | CannotStartInTime | None:
        """Return the error of a request that has waited for too long; None while it may wait. ``waiting`` requests wait in all."""
        if request.attempt < 0 and request.start_by is not None and now >= request.start_by:
            return self._too_late(request, waiting - 1, now)
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
