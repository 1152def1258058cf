"""`FleetState` is the fleet of one model as one ingress sees it: which replica holds which request, which requests wait, which start where.

Pure: events in, instructions out, time is a number. The state has one door, ``handle``, and one ``validate``. The adapter is
``ingress/fleet/fleet_client.py``. Each request ends exactly once: by a delivered output with a finish reason, by a ``FailRequest``, or by
the front end's own abort. Cost: one dict lookup and one list extend per token; waiting requests cost nothing until something changes.
"""

from collections.abc import Set

import msgspec

from serve_app.core.attempts import Attempts
from serve_app.core.events import (
    ENGINE_ENDED,
    AttemptUnsendable,
    BlocksReported,
    CacheReported,
    Event,
    HeartbeatArrived,
    LinkEnd,
    LinkLost,
    LinkOpened,
    OutputsArrived,
    PoolsPlanned,
    RequestArrived,
    RequestsAborted,
    StartMeasured,
    StepCostsMeasured,
    Ticked,
    TrialBegan,
    WaitsReported,
)
from serve_app.core.hand_over import HANDED_OVER
from serve_app.core.instructions import (
    AbortAttempts,
    CloseLink,
    DeliverOutputs,
    FailRequest,
    FreeKeptKv,
    Instruction,
    PassTrial,
    WakeReplica,
)
from serve_app.core.request import EngineOutput, RequestState, Trial
from serve_app.core.routing import ReplicaState, mark_longest
from serve_app.core.trail import MOVED, TAKEN_BACK
from serve_app.errors import ResumeDiverged

WAKE_EVERY_S = 1.0


class FleetState(Attempts):
    """Unfinished requests, replicas with open links, and the queue between them."""

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
            case CacheReported() if event.replica_id in self.replicas:
                self._routing.cache_reported(event)
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
            case PoolsPlanned():
                if self._apart is not None:
                    self._apart.plan(event.prefill_share, self.replicas.values())
            case Ticked():
                self.quarantine.expire(now=now)
                ended = self._eject_silent(now) + self._end_long_waits(now) + self._end_hand_overs(now)
                return ended + self._move_off_draining(now) + self._move_off_burdened(now) + self._wake(now)
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
        self.hand_overs.validate(self.requests.values(), self.replicas.values())
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
        request.gives_way = request.gives_way and self.settings.engines_preempt
        if (too_late := self.refusals.of_arrival(request, now)) is not None:
            return [self._reject(request, too_late, now)]
        self.waiting.add(request)
        started = self._dispatch(now)
        if request.replica_id is not None:
            return started
        started += self._wake(now, (request,))
        if (full := self.refusals.of_full_line(self.waiting, request, now)) is None:
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
        if self._apart is not None:
            self._apart.members_changed(self.replicas.values())

    def _take_back_queued(self, new: ReplicaState, now: float) -> list[Instruction]:
        """Take back requests that only wait in engines' queues, so that a new replica gets its part of them."""
        aborts, back = list[Instruction](), list[RequestState]()
        for replica in self.replicas.values():
            leaving = [] if replica.draining else self._routing.leaving(replica.queued(), self.replicas)
            queued = [r for r in leaving if new.can_run(r)][: new.credit - len(back)]
            aborts += [AbortAttempts(replica.replica_id, tuple(r.attempt_id for r in queued))] if queued else []
            for request in queued:
                request.trail.moves_on(TAKEN_BACK, now)
                self._release(request)
                request.replica_id, request.waiting_since = None, now
            back += queued
            waiting = max(0, replica.load.waiting - len(queued))  # the last heartbeat may have reported fewer
            replica.load = msgspec.structs.replace(replica.load, waiting=waiting)
        for request in back:
            self.waiting.add(request)
        return aborts

    def _on_heartbeat_arrived(self, event: HeartbeatArrived, *, now: float) -> list[Instruction]:
        if (replica := self.replicas.get(event.replica_id)) is None:
            return []
        if replica.sleeping and not event.sleeping:  # its engine has lost its KV cache, unless its drain ended awake
            self._routing.forget(event.replica_id)
        if replica.take_heartbeat(event, now=now):
            self._replicas_changed()
        self.order.note_queue(event.replica_id, event.load.waiting, replica.held.values())
        ends = event.draining and not event.sleeping
        self.drains.notice(event.replica_id, event.drain_left_s if ends else None, now=now)
        self._routing.changed(event.replica_id)
        return self._dispatch(now) + self._wake(now)

    def _forget_replica(self, replica_id: str, end: LinkEnd, unsent: Set[str] = frozenset(), *, now: float) -> list[Instruction]:
        """Put the replica's requests at the front of the queue. A second LinkLost finds nothing."""
        if (replica := self.replicas.pop(replica_id, None)) is None:
            return []
        freed: list[Instruction] = []
        if end in ENGINE_ENDED:
            freed += self._linked(*self.hand_overs.target_died(replica_id))
        self.drains.forget(replica_id)
        self.order.note_queue(replica_id, 0)
        self._routing.forget(replica_id)
        self._replicas_changed()
        for request in replica.held.values():
            self._end_hand_over(request, "ended")
            del self._attempts[request.attempt_id]
            request.trail.lost(MOVED if request.attempt_id in unsent else end.name.lower())
        continuing, failed = self.failover.take_back(replica, end, unsent, now=now)
        for failure in failed:
            self._count_failed(failure, now)
        for request in continuing:
            self.waiting.add(request)
        return freed + failed + self._end_blocked(now)

    def _linked(self, *orders: FreeKeptKv) -> list[FreeKeptKv]:
        """Return the orders for replicas to which there is a link."""
        return [order for order in orders if order.replica_id in self.replicas]

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
                others += self._of_ended_attempt(event.replica_id, output)
                continue
            if request.reads_kv and output.new_token_ids:
                others += self._linked(self.hand_overs.note_read(request, output, replica, now))
            if request.prefill_tokens and output.new_token_ids:
                replica.end_prefill(request)
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
                    late = now - request.arrived_at > self.settings.ttft_s
                    self.tally.first_token(request, output, late=late, apart=self._apart)
                self._count_emitted(replica, request, output.new_token_ids)
                request.trail.delivered(output, now)
                is_first = len(request.emitted_ids) == len(output.new_token_ids) and output.finish_reason is None
                if replica.long_tokens and is_first and self._apart is not None:
                    for _, target in self._apart.moves(replica, self.replicas, now, only=request):
                        others.append(self._ask_hand_over(request, target, self._apart.causes[0], now))
            if output.stop_reason == HANDED_OVER:
                kv = output.kv_transfer_params
                others += self._take_over(request, "" if kv else "not_kept", kv=kv or None, now=now)
                freed = True
                if not output.new_token_ids:
                    continue
                output.finish_reason = output.stop_reason = None
            elif output.finish_reason is not None:
                self._finish(request, output.finish_reason, now)
                freed = True
            elif output.new_token_ids and request.trial is not Trial.NONE:
                self.quarantine.pass_trial(request)
                others.append(PassTrial(replica.replica_id, request.attempt_id))
                freed = True
            deliver.append(output)
        instructions: list[Instruction] = [DeliverOutputs(deliver, tuple(swallowed))] if deliver else []
        return instructions + others + (self._dispatch(now) if freed else [])

    def _of_ended_attempt(self, replica_id: str, output: EngineOutput) -> list[FreeKeptKv]:
        """Return what frees the KV of an attempt that was aborted or moved while its output was under way."""
        if output.kv_transfer_params and output.stop_reason == HANDED_OVER:
            return [FreeKeptKv(replica_id, output.request_id)]
        if not output.new_token_ids:
            return []
        return self._linked(*self.hand_overs.note_late_token(replica_id, output.request_id))

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
        """Move requests off draining replicas: with their KV where that is possible.

        Else the attempt ends and the next one starts elsewhere, in one instant. Late tokens of the old ones are dropped.
        """
        instructions: list[Instruction] = []
        while (move := self.drains.due(self.replicas, self._routing, self.quarantine, now=now)) is not None:
            request, replica_id, target = move.request, move.replica_id, move.target
            self.drains.moved(move)
            tokens = request.prompt_tokens + len(request.emitted_ids)
            pays = self.hand_overs.costs.pays(tokens, self.order.costs)
            if pays and self.hand_overs.is_possible(request, self.replicas[replica_id], target.replica):
                target = target._replace(saves_s=tokens * self.order.costs.prompt_token_s)
                instructions.append(self._ask_hand_over(request, target, "drain", now))
                continue
            request.trail.moves_on("drain", now)
            instructions.append(AbortAttempts(replica_id, (request.attempt_id,)))
            self._release(request)
            self.failover.note_loss(request, now=now)
            instructions.append(self._start(request, target, now=now))
        return instructions

    def _move_off_burdened(self, now: float) -> list[Instruction]:
        """Move answers with their KV from replicas with much to do to others, where that saves more than it costs."""
        if self._apart is None:
            return []
        for replica_id in self._apart.tick(now):
            self._routing.changed(replica_id)
        return [
            self._ask_hand_over(request, target, self._apart.causes[1], now)
            for replica in self._apart.burdened(self.replicas.values())
            for request, target in self._apart.moves(replica, self.replicas, now)
        ]

    def _wake(self, now: float, came: tuple[RequestState, ...] = ()) -> list[Instruction]:
        """Ask a replica whose engine sleeps to wake, each second, while a request waits that can run there and nowhere else.

        Args:
            came: Looked at alone, for it has just come. Else all that wait are.
        """
        if not self.waiting:
            return []
        due = [
            r for r in self.replicas.values() if r.sleeping and (r.wake_asked_at is None or now - r.wake_asked_at >= WAKE_EVERY_S)
        ]
        if not due:
            return []
        taking = [r for r in self.replicas.values() if not r.draining]
        homeless = [r for r in came or self.waiting.values() if not any(replica.can_run(r) for replica in taking)]
        needed = [replica for replica in due if any(replica.can_run(r) for r in homeless)]
        for replica in needed:
            replica.wake_asked_at = now
        return [WakeReplica(replica.replica_id) for replica in needed]

    def _end_hand_overs(self, now: float) -> list[Instruction]:
        """Start requests again whose source did not hand them over, or whose target made no token, in time."""
        instructions: list[Instruction] = []
        self.hand_overs.tick(now)
        for request, result in self.hand_overs.overdue(now):
            assert request.replica_id is not None
            instructions.append(AbortAttempts(request.replica_id, (request.attempt_id,)))
            instructions += self._take_over(request, result, now=now)
        return instructions + self._dispatch(now) if instructions else []
