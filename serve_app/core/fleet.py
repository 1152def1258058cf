"""`FleetState` is the fleet of one model as one ingress sees it: which replica holds which request, which requests wait, which start where.

Pure: events in, instructions out, time is a number. The state has one door, ``handle``, and one ``validate``. The adapter is
``ingress/fleet/fleet_client.py``. Each request ends exactly once: by a delivered output with a finish reason, by a ``FailRequest``, or by
the front end's own abort. Cost: one dict lookup and one list extend per token; waiting requests cost nothing until something changes.
"""

from collections import Counter
from collections.abc import Sequence, Set

import msgspec

from serve_app.core.drain import Drains
from serve_app.core.events import (
    AttemptUnsendable,
    BlocksReported,
    Event,
    HeartbeatArrived,
    LinkEnd,
    LinkLost,
    LinkOpened,
    OutputsArrived,
    RequestArrived,
    RequestsAborted,
    StartMeasured,
    StepCostsMeasured,
    Ticked,
    TrialBegan,
    WaitsReported,
)
from serve_app.core.failover import Failover
from serve_app.core.fair_order import FairOrder
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import (
    AbortAttempts,
    CloseLink,
    DeliverOutputs,
    FailRequest,
    Instruction,
    PassTrial,
    StartAttempt,
)
from serve_app.core.quarantine import Quarantine
from serve_app.core.refusals import Refusals
from serve_app.core.request import EngineOutput, RequestState, Trial
from serve_app.core.routing import Choice, LeastOutstandingTokens, ReplicaState, RoutingPolicy, mark_longest
from serve_app.core.tally import Tally
from serve_app.core.trail import ENGINES_OWN_ENDS, MOVED
from serve_app.core.waiting_line import WaitingLine
from serve_app.errors import CannotStartInTime, RequestQuarantined, ResumeDiverged, ServingError


class FleetState:
    """Unfinished requests, replicas with open links, and the queue between them."""

    def __init__(self, settings: FleetSettings, routing: RoutingPolicy | None = None) -> None:
        self.settings = settings
        self.replicas: dict[str, ReplicaState] = {}
        self.requests: dict[str, RequestState] = {}
        self.waiting = WaitingLine()
        self.order = FairOrder()
        self.outcomes: Counter[str] = Counter()
        """Requests that ended, by how, since the start: feeds the metrics."""
        self.routed: Counter[str] = Counter()
        """Attempts that started, by the reason for their replica."""
        self.expected_hit_tokens = 0
        """Prompt tokens of these attempts that were expected in their replicas' prefix caches."""
        self.tally = Tally()
        self.quarantine = Quarantine(settings.quarantine_s)
        self.failover = Failover(settings, self.quarantine)
        self.drains = Drains()
        self._routing = routing or LeastOutstandingTokens()
        self.refusals = Refusals(settings, self.replicas.values(), self.order)
        self._attempts: dict[str, RequestState] = {}
        self._kinds: list[ReplicaState] = []  # a replica of each kind

    def handle(self, event: Event, *, now: float) -> list[Instruction]:
        """Take one event in and return what to do about it, in order."""
        match event:
            case OutputsArrived():
                return self._on_outputs_arrived(event, now=now)
            case RequestArrived():
                return self._on_request_arrived(event, now=now)
            case RequestsAborted():
                return self._on_requests_aborted(event, now=now)
            case HeartbeatArrived():
                return self._on_heartbeat_arrived(event, now=now)
            case LinkOpened():
                return self._on_link_opened(event, now=now)
            case LinkLost():
                return self._forget_replica(event.replica_id, event.end, event.unsent, now=now) + self._dispatch(now)
            case AttemptUnsendable():
                return self._on_attempt_unsendable(event, now=now)
            case TrialBegan():
                self.quarantine.trial_began(self._attempts.get(event.attempt_id))
            case BlocksReported():
                self.quarantine.learn(event.blocks, now=now)
                return self._end_blocked(now) + self._dispatch(now)
            case StartMeasured():
                self.refusals.cold_starts.add(event.replica_id, event.start_s)
            case StepCostsMeasured():
                self.order.learn(event.costs)
            case WaitsReported():
                self.order.learn_waits(event.waits)
            case Ticked():
                self.quarantine.expire(now=now)
                return self._eject_silent(now) + self._end_long_waits(now) + self._move_off_draining(now)
        return []

    def validate(self) -> None:
        """Assert the invariants; for tests and for readers."""
        held = {r.attempt_id: r for replica in self.replicas.values() for r in replica.held.values()}
        assert held == self._attempts
        assert all(self.requests[i] is r and r.replica_id is None for i, r in self.waiting.items())
        assert {r.request_id for r in held.values()}.isdisjoint(self.waiting)
        assert sum(r.attempt < 0 for r in self.waiting.values()) <= self.settings.max_waiting_requests
        assert {r.request_id for r in held.values()} | set(self.waiting) == set(self.requests)
        for replica in self.replicas.values():
            replica.validate()
        assert not mark_longest(self.replicas.values())
        self.failover.validate(self.requests.values())
        self.drains.validate(self.replicas)
        self._routing.validate(self.replicas)
        self.quarantine.validate(self.requests.values())
        self.order.validate(self.requests)
        assert self.waiting.next_start(self._kinds, self.replicas, self._routing, self.quarantine) is None

    def _on_request_arrived(self, event: RequestArrived, *, now: float) -> list[Instruction]:
        if event.request_id in self.requests:
            raise ValueError(f"request id {event.request_id!r} is in use")
        if (refusal := self.quarantine.refusal(event.fingerprint, now=now)) is not None:
            self.outcomes["blocked"] += 1
            return [FailRequest(event.request_id, refusal)]
        if event.background and (no_place := self.refusals.of_background(len(self.waiting))) is not None:
            self.outcomes["held_back"] += 1
            return [FailRequest(event.request_id, no_place)]
        self.tally.arrival(event)
        request = self.requests[event.request_id] = event.state(now)
        self.order.place(request, event.tenant, event.weight, event.priority, now)
        if (too_late := self.refusals.of_arrival(request, now)) is not None:
            return [self._reject(request, too_late, now)]
        self.waiting.add(request)
        started = self._dispatch(now)
        if request.replica_id is not None or (full := self.refusals.of_full_line(self.waiting, request, now)) is None:
            return started
        return started + self._give_up(*full, now)

    def _on_requests_aborted(self, event: RequestsAborted, *, now: float) -> list[Instruction]:
        by_replica: dict[str, list[str]] = {}
        for request_id in event.request_ids:
            if (request := self.requests.get(request_id)) is None:
                continue
            self.outcomes[event.outcome] += 1
            request.trail.end = event.outcome
            if request.emitted_ids and event.outcome != "failed":
                self.tally.answer(request)
            if request.replica_id is None:
                self.waiting.remove(request)
            else:
                by_replica.setdefault(request.replica_id, []).append(request.attempt_id)
                self._release(request)
            self._forget(request, now)
        aborts: list[Instruction] = [AbortAttempts(r, tuple(ids)) for r, ids in by_replica.items()]
        return aborts + self._dispatch(now)

    def _on_link_opened(self, event: LinkOpened, *, now: float) -> list[Instruction]:
        replica_id, is_new = event.replica_id, event.replica_id not in self.replicas
        failed = self._forget_replica(replica_id, LinkEnd.ENDED_HERE, now=now)
        self.failover.linked_again(replica_id, self.requests.values())
        replica = self.replicas[replica_id] = ReplicaState.linked(event, now=now)
        self._routing.changed(replica_id)
        self._replicas_changed()
        taken_back = self._take_back_queued(replica, now) if is_new and not event.draining else []
        self.order.forget_rates()
        return failed + taken_back + self._dispatch(now)

    def _replicas_changed(self) -> None:
        for replica_id in mark_longest(self.replicas.values()):
            self._routing.changed(replica_id)
        self._kinds = list({replica.kind: replica for replica in self.replicas.values()}.values())

    def _take_back_queued(self, new: ReplicaState, now: float) -> list[Instruction]:
        """Take back requests that only wait in engines' queues, so that a new replica gets its part of them."""
        aborts, back = list[Instruction](), list[RequestState]()
        for replica in self.replicas.values():
            leaving = [] if replica.draining else self._routing.leaving(replica.queued(), self.replicas)
            queued = [r for r in leaving if new.can_run(r)][: new.credit - len(back)]
            aborts += [AbortAttempts(replica.replica_id, tuple(r.attempt_id for r in queued))] if queued else []
            for request in queued:
                self._release(request)
                request.replica_id, request.outstanding_tokens, request.waiting_since = None, 0, now
            back += queued
            waiting = max(0, replica.load.waiting - len(queued))  # the last heartbeat may have reported fewer
            replica.load = msgspec.structs.replace(replica.load, waiting=waiting)
        for request in back:
            self.waiting.add(request)
        return aborts

    def _on_heartbeat_arrived(self, event: HeartbeatArrived, *, now: float) -> list[Instruction]:
        if (replica := self.replicas.get(event.replica_id)) is None:
            return []
        if replica.take_heartbeat(event, now=now):
            self._replicas_changed()
        self.order.note_queue(event.replica_id, event.load.waiting, replica.held.values())
        self.drains.notice(event.replica_id, event.drain_left_s if event.draining else None, now=now)
        self._routing.changed(event.replica_id)
        return self._dispatch(now)

    def _forget_replica(self, replica_id: str, end: LinkEnd, unsent: Set[str] = frozenset(), *, now: float) -> list[Instruction]:
        """Put the replica's requests at the front of the queue. A second LinkLost finds nothing."""
        if (replica := self.replicas.pop(replica_id, None)) is None:
            return []
        self.drains.forget(replica_id)
        self.order.note_queue(replica_id, 0)
        self._routing.forget(replica_id)
        self._replicas_changed()
        for request in replica.held.values():
            del self._attempts[request.attempt_id]
            request.trail.lost(MOVED if request.attempt_id in unsent else end.name.lower())
        continuing, failed = self.failover.take_back(replica, end, unsent, now=now)
        for failure in failed:
            self._count_failed(failure, now)
        for request in continuing:
            self.waiting.add(request)
        return failed + self._end_blocked(now)

    def _end_blocked(self, now: float) -> list[Instruction]:
        """End waiting requests that are like one which has been quarantined meanwhile."""
        refused = self.quarantine.refused(self.waiting.values(), now=now)
        for failure in refused:
            self.waiting.remove(self.requests[failure.request_id])
        return [self._count_failed(failure, now) for failure in refused]

    def _count_failed(self, failure: FailRequest, now: float) -> FailRequest:
        self._forget(self.requests[failure.request_id], now)
        self.outcomes["quarantined" if isinstance(failure.error, RequestQuarantined) else "failed"] += 1
        return failure

    def _on_attempt_unsendable(self, event: AttemptUnsendable, *, now: float) -> list[Instruction]:
        request = self.requests.get(event.request_id)
        if request is None or request.replica_id is None:
            return []
        self._release(request)
        return [self._count_failed(FailRequest(event.request_id, event.error), now), *self._dispatch(now)]

    def _on_outputs_arrived(self, event: OutputsArrived, *, now: float) -> list[Instruction]:
        if (replica := self.replicas.get(event.replica_id)) is None:
            return []
        replica.hear(len(event.outputs), now=now)
        self._routing.changed(event.replica_id)
        deliver, swallowed, others = list[EngineOutput](), list[tuple[int, int]](), list[Instruction]()
        freed = False
        attempts = self._attempts
        for output in event.outputs:
            request = attempts.get(output.request_id)
            if request is None or request.replica_id != event.replica_id:
                continue  # an attempt that was aborted or moved while this frame was under way
            if request.attempt:
                try:
                    count = self.failover.swallow(request, output, now=now)
                except ResumeDiverged as diverged:
                    others += self._give_up(request, diverged, now)
                    freed = True
                    continue
                if count:
                    if not output.new_token_ids:
                        self._count_emitted(replica, request, ())
                        continue
                    swallowed.append((len(deliver), count))
            output.request_id = request.request_id
            if output.new_token_ids:
                if not request.emitted_ids:
                    replica.begin_answer(request)
                    self.order.begin(request, now)
                    self.tally.first_token(request, output, late=now - request.arrived_at > self.settings.ttft_s)
                self._count_emitted(replica, request, output.new_token_ids)
                request.trail.delivered(output, now)
            if output.finish_reason is not None:
                self._finish(request, output.finish_reason, now)
                freed = True
            elif output.new_token_ids and request.trial is not Trial.NONE:
                self.quarantine.pass_trial(request)
                others.append(PassTrial(replica.replica_id, request.attempt_id))
                freed = True
            deliver.append(output)
        instructions: list[Instruction] = [DeliverOutputs(deliver, tuple(swallowed))] if deliver else []
        return instructions + others + (self._dispatch(now) if freed else [])

    def _count_emitted(self, replica: ReplicaState, request: RequestState, token_ids: Sequence[int]) -> None:
        """Add to the emitted ids. From now on the replica only has to compute the request's remaining output tokens."""
        request.emitted_ids += token_ids
        self.tally.output(request, len(token_ids))
        request.max_tokens -= len(token_ids)
        left = request.to_swallow + (request.max_tokens if request.max_tokens > 0 else 0)
        replica.outstanding_tokens += left - request.outstanding_tokens
        request.outstanding_tokens = left
        if len(request.emitted_ids) >= request.charge_at:
            replica.count_part(request)
            self.order.charge(request)

    def _give_up(self, request: RequestState, error: ServingError, now: float) -> list[Instruction]:
        """End a request that waits or runs."""
        aborts: list[Instruction] = []
        if request.replica_id is None:
            self.waiting.remove(request)
        else:
            aborts.append(AbortAttempts(request.replica_id, (request.attempt_id,)))
            self._release(request)
        if request.attempt < 0 or isinstance(error, CannotStartInTime):
            return [*aborts, self._reject(request, error, now)]
        return [*aborts, self._count_failed(FailRequest(request.request_id, error), now)]

    def _eject_silent(self, now: float) -> list[Instruction]:
        instructions, limit_s = list[Instruction](), self.settings.heartbeat_timeout_s
        # All silent replicas are forgotten before any request starts again: an attempt on another silent one would be wasted.
        for replica in [r for r in self.replicas.values() if now - r.heard_at > limit_s]:
            reason = f"silent for {now - replica.heard_at:.1f} s, limit {limit_s:g} s"
            instructions.append(CloseLink(replica.replica_id, reason))
            instructions += self._forget_replica(replica.replica_id, LinkEnd.UNRESPONSIVE, now=now)
        return instructions + self._dispatch(now) if instructions else []

    def _end_long_waits(self, now: float) -> list[Instruction]:
        ended: list[Instruction] = []
        for request in self.refusals.overdue(self.requests, now):
            ended += self._give_up(request, self.refusals.too_late(request, now), now)
        for request in list(self.waiting.values()):
            error = self.refusals.of_long_wait(request, now) or self.failover.of_standstill(request, now)
            if error is not None:
                ended += self._give_up(request, error, now)
        return ended + self._dispatch(now)

    def _move_off_draining(self, now: float) -> list[Instruction]:
        """End attempts on draining replicas and start the next ones elsewhere, in one instant. Late tokens of the old ones are dropped."""
        instructions: list[Instruction] = []
        while (move := self.drains.due(self.replicas, self._routing, self.quarantine, now=now)) is not None:
            instructions.append(AbortAttempts(move.replica_id, (move.request.attempt_id,)))
            self._release(move.request)
            self.failover.note_loss(move.request, now=now)
            self.drains.moved(move)
            instructions.append(self._start(move.request, move.target, now=now))
        return instructions

    def _dispatch(self, now: float) -> list[Instruction]:
        """Start waiting requests, in the order of the line, while some replica has room."""
        started: list[Instruction] = []
        while (chosen := self.waiting.next_start(self._kinds, self.replicas, self._routing, self.quarantine)) is not None:
            request, choice = chosen
            self.waiting.remove(request)
            started.append(self._start(request, choice, now=now))
        self.order.note_fullness(len(self.replicas), self.waiting.first(), now)
        return started

    def _start(self, request: RequestState, choice: Choice, *, now: float) -> StartAttempt:
        replica, reason = choice
        request.attempt += 1
        request.replica_id = replica.replica_id
        hit_tokens = self._routing.placed(request, replica)
        request.trail.started(replica.replica_id, reason.value, hit_tokens, now)
        self.routed[reason.value] += 1
        self.expected_hit_tokens += hit_tokens
        request.outstanding_tokens = request.tokens_left()
        prefix = self.failover.begin(request)
        replica.held[request.request_id] = request
        if suspect := request.suspect_of is not None:
            self.quarantine.begin_trial(request)
        replica.outstanding_tokens += request.outstanding_tokens
        self._routing.changed(replica.replica_id)
        self._attempts[request.attempt_id] = request
        ids = request.request_id, request.attempt_id, replica.replica_id
        return StartAttempt(*ids, prefix, emitted=len(request.emitted_ids), suspect=suspect)

    def _finish(self, request: RequestState, reason: object, now: float) -> None:
        self._release(request)
        request.trail.finished(str(reason))
        self._forget(request, now)
        outcome = ENGINES_OWN_ENDS.get(str(reason), "complete")
        self.outcomes[outcome] += 1
        if outcome == "complete":
            self.tally.answer(request)

    def _reject(self, request: RequestState, error: ServingError, now: float) -> FailRequest:
        self._forget(request, now)
        self.outcomes["rejected"] += 1
        self.tally.rejected += not request.background
        return FailRequest(request.request_id, error)

    def _forget(self, request: RequestState, now: float) -> None:
        del self.requests[request.request_id]
        replica = None if request.emitted_ids else self.replicas.get(request.replica_id or "")
        self.order.end(request, now, prompt_begun=replica is not None and replica.note_given_up(request))

    def _release(self, request: RequestState) -> None:
        """Take the request off its replica; its credit and outstanding tokens come back."""
        assert request.replica_id is not None
        self.quarantine.end_trial(request)
        replica = self.replicas[request.replica_id]
        replica.let_go(request)
        del self._attempts[request.attempt_id]
        replica.outstanding_tokens -= request.outstanding_tokens
        self._routing.changed(replica.replica_id)
