"""`Refusals` makes the errors of requests that find no place. Pure; only ``FleetState`` calls it."""

import heapq
from collections.abc import Collection, Iterator, Mapping

from serve_app.core.cold_starts import ColdStarts
from serve_app.core.fair_order import FairOrder
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.queue_rate import jitter
from serve_app.core.request import RequestState
from serve_app.core.routing import ReplicaState
from serve_app.core.waiting_line import WaitingLine
from serve_app.errors import CannotStartInTime, NoFreePlace, NoReplica, QueueFull, ReplicaLost

MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1.0, 600.0


class Refusals:
    """Makes the errors of refused requests, and estimates when they may find a place."""

    def __init__(self, settings: FleetSettings, replicas: Collection[ReplicaState], order: FairOrder) -> None:
        self.cold_starts = ColdStarts()
        self._settings = settings
        self._replicas = replicas
        self._order = order
        self._deadlines: list[tuple[float, int, str]] = []
        """A heap of deadlines with numbers and ids of requests, some of which have begun or ended."""

    def retry_after_s(self) -> float:
        """Return in how many seconds a refused request may find a place. If all replicas end, a new one has to start first."""
        cold_start_s = self.cold_starts.retry_after_s()
        if cold_start_s is None or any(not r.draining or r.sleeping for r in self._replicas):
            return self._settings.retry_after_s
        return cold_start_s

    def of_full_line(self, line: WaitingLine, came: RequestState, now: float) -> tuple[RequestState, QueueFull] | None:
        """Return the request that a line is too long for, and its error; None if all may wait.

        This is the last one, but for requests that had an attempt, and for later engine requests of the HTTP requests of the same tenant.
        """
        if len(line) <= (limit := self._settings.max_waiting_requests):
            return None
        last = next(r for r in reversed(line) if r is came or (r.attempt < 0 and (r.is_first or r.tenant != came.tenant)))
        return last, QueueFull(waiting=len(line) - 1, limit=limit, retry_after_s=self._retry_after_s(last, now))

    def of_arrival(self, request: RequestState, now: float) -> CannotStartInTime | None:
        """Return why a request is refused that would probably start too late. While it is not known when it starts, it may wait.

        ``start_by`` is the tenant's limit. The model's is ``expected_by``. With fewer than ``max_replicas`` the p90 of measured starts is
        added, because a replica that starts would take the request by then; before the first measured start nothing is refused.
        """
        start_s: float | None = 0.0
        if (limit := request.start_by) is None:
            limit = request.expected_by
            if len(self._replicas) < self._settings.max_replicas:
                start_s = self.cold_starts.p90_s()
        if limit is None or start_s is None:
            return None
        limit += start_s
        left_s, longest_s = limit - now, None if self._is_ending() else self._order.longest_wait_s(request, now)
        if left_s <= 0 or (longest_s is not None and longest_s * self._order.wait_margin(request) > left_s):
            return self.too_late(request, now, start_s)
        request.expected_wait_s = longest_s
        if request.start_by is not None:
            heapq.heappush(self._deadlines, (request.start_by, request.number, request.request_id))
        return None

    def overdue(self, requests: Mapping[str, RequestState], now: float) -> Iterator[RequestState]:
        """Yield each of the ``requests`` whose deadline has passed without a first token, once."""
        if len(self._deadlines) > 2 * len(requests) + 1000:  # most of these have ended
            self._deadlines = [each for each in self._deadlines if each[-1] in requests]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, request_id = heapq.heappop(self._deadlines)
            if (request := requests.get(request_id)) is not None and request.number == number and not request.emitted_ids:
                yield request

    def too_late(self, request: RequestState, now: float, start_s: float = 0.0) -> CannotStartInTime:
        """Return the error of a request that starts too late for its limit. ``start_s``: seconds that were added to it."""
        expected_s = (None if self._is_ending() else self._order.longest_wait_s(request, now)) or 0.0
        waiting = self._order.num_ahead(request)
        waited_s, retry_after_s = now - request.arrived_at, self._retry_after_s(request, now)
        if request.start_by is not None:
            return CannotStartInTime(waiting, waited_s, expected_s, "first_token_s", request.first_token_s, retry_after_s)
        assert request.expected_by is not None  # else nothing limits its wait
        limit_s = request.expected_by - request.arrived_at
        return CannotStartInTime(waiting, waited_s, expected_s, "refuse_after_s", limit_s, retry_after_s, start_s)

    def _is_ending(self) -> bool:
        """Return whether no replica takes requests, so that rates say nothing."""
        return all(r.draining for r in self._replicas)

    def _expected_wait_s(self, request: RequestState, now: float) -> float | None:
        """Return after how many seconds the request probably starts; None if that is not known."""
        return None if self._is_ending() else self._order.expected_wait_s(request, now)

    def _retry_after_s(self, request: RequestState, now: float) -> float:
        """Return when the request would probably have started, from `jitter` a little earlier or later for each request."""
        if (expected_s := self._expected_wait_s(request, now)) is None:
            return self.retry_after_s()
        return min(max(expected_s * jitter(request.request_id), MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)

    def of_background(self, waiting: int) -> NoFreePlace | None:
        """Return why a batch's request has no place while ``waiting`` requests wait; None if a place is free that no chat needs.

        A model without a replica, or whose engine sleeps, takes one request of a batch into its queue, which makes it start or wake. Where
        engines yield, a batch's requests may wait in their queues, because the next chat goes before them; elsewhere the chat would wait
        behind them.
        """
        yields = self._settings.engines_yield
        free = all(r.sleeping for r in self._replicas) or any(
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
            num_draining=sum(r.draining and not r.sleeping for r in self._replicas),
            num_sleeping=sum(r.sleeping for r in self._replicas),
            held=sum(len(r.held) for r in self._replicas),
            credit=sum(r.credit for r in self._replicas),
        )
