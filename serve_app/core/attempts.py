"""`Attempts` starts a fleet's requests on replicas, and ends attempts and requests. `FleetState` is built on it and takes the events in.

Pure. Each request ends exactly once: by a delivered output with a finish reason, by a ``FailRequest``, or by the front end's own abort.
"""

from collections import Counter
from collections.abc import Sequence

from serve_app.core.apart import Apart
from serve_app.core.drain import Drains
from serve_app.core.failover import Failover
from serve_app.core.fair_order import FairOrder
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.hand_over import HandOvers
from serve_app.core.instructions import AbortAttempts, FailRequest, FreeKeptKv, HandOverAttempt, Instruction, StartAttempt
from serve_app.core.least_loaded import LeastOutstandingTokens
from serve_app.core.pools import Pools
from serve_app.core.quarantine import Quarantine
from serve_app.core.refusals import Refusals
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, ReplicaState, RoutingPolicy
from serve_app.core.tally import Tally
from serve_app.core.trail import ENGINES_OWN_ENDS, Route
from serve_app.core.waiting_line import WaitingLine
from serve_app.errors import CannotStartInTime, RequestQuarantined, ServingError


class Attempts:
    """Starts and ends attempts, and ends requests."""

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
        self.hand_overs = HandOvers()
        self._routing = routing or LeastOutstandingTokens()
        self._apart = self._make_apart(settings)
        if self._apart is not None:
            self._routing = self._apart
        self.refusals = Refusals(settings, self.replicas.values(), self.order)
        self._attempts: dict[str, RequestState] = {}
        self._kinds: list[ReplicaState] = []  # a replica of each kind

    def _make_apart(self, settings: FleetSettings) -> Apart | None:
        if settings.pools is not None:
            return Pools(self._routing, self.order, self.hand_overs, settings.pools, settings.ttft_s)
        return Apart(self._routing, self.order, self.hand_overs) if settings.apart else None

    def prefill_ids(self) -> list[str] | None:
        """Return the replicas that compute long prompts, sorted; None without pools."""
        found = None if self._apart is None else self._apart.prefill_ids
        return None if found is None else sorted(found)

    def _count_emitted(self, replica: ReplicaState, request: RequestState, token_ids: Sequence[int]) -> None:
        """Add to the emitted ids. From now on the replica only has to compute the request's remaining output tokens."""
        request.emitted_ids += token_ids
        self.tally.output(request, len(token_ids))
        request.max_tokens -= len(token_ids)
        left = request.to_swallow + (request.max_tokens if request.max_tokens > 0 else 0)
        replica.owe(request, left)
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

    def _dispatch(self, now: float) -> list[Instruction]:
        """Start waiting requests, in the order of the line, while some replica has room."""
        started: list[Instruction] = []
        while (chosen := self.waiting.next_start(self._kinds, self.replicas, self._routing, self.quarantine)) is not None:
            request, choice = chosen
            self.waiting.remove(request)
            if self._apart is not None and request.attempt < 0 and self._apart.is_long(request.prompt_tokens):
                started += self._make_way(self._apart, request, choice.replica, now)
            started.append(self._start(request, choice, now=now))
        self.order.note_fullness(len(self.replicas), self.waiting.first(), now)
        return started

    def _make_way(self, apart: Apart, request: RequestState, replica: ReplicaState, now: float) -> list[Instruction]:
        """Move answers off the replica that is to compute a long prompt, those for which that is cheaper."""
        tokens = request.prompt_tokens - apart.hit_tokens(request, replica)
        if not apart.is_long(tokens):
            return []
        moves = apart.moves(replica, self.replicas, now, more_tokens=tokens)
        return [self._ask_hand_over(leaving, target, apart.causes[0], now) for leaving, target in moves]

    def _ask_hand_over(self, request: RequestState, target: Choice, cause: str, now: float) -> HandOverAttempt:
        assert request.replica_id is not None
        self.hand_overs.ask(request, target, cause, now)
        self._routing.changed(target.replica.replica_id)
        return HandOverAttempt(request.replica_id, request.attempt_id)

    def _start(self, request: RequestState, choice: Choice, *, now: float, kv: object | None = None) -> StartAttempt:
        replica, reason, saves_s = choice
        request.attempt += 1
        request.replica_id = replica.replica_id
        hit_tokens = self._routing.placed(request, replica)
        request.trail.started(replica.replica_id, reason.value, Route(hit_tokens, replica.tokens_before(request), saves_s), now)
        self.routed[reason.value] += 1
        self.expected_hit_tokens += hit_tokens
        if kv is not None:
            self.hand_overs.begin_read(request, now)
        prefix = self.failover.begin(request)
        replica.held[request.request_id] = request
        if suspect := request.suspect_of is not None:
            self.quarantine.begin_trial(request)
        replica.owe(request, request.tokens_left() if kv is None else max(0, request.max_tokens))
        if kv is None:
            request.prefill_tokens = request.prompt_tokens + len(request.emitted_ids) - hit_tokens
            replica.prefill_tokens += request.prefill_tokens
            if self._apart is not None:
                self._apart.note_started(replica, request.prefill_tokens, now)
        self._routing.changed(replica.replica_id)
        self._attempts[request.attempt_id] = request
        ids = request.request_id, request.attempt_id, replica.replica_id
        return StartAttempt(*ids, prefix, emitted=len(request.emitted_ids), suspect=suspect, kv=kv)

    def _take_over(self, request: RequestState, result: str, *, kv: object | None = None, now: float) -> list[Instruction]:
        """Start a request, whose replica was asked to hand it over, at the target, or queue it.

        Args:
            result: How the hand-over ends; "" if that is not known yet.
            kv: Where the KV is; None if it is not kept.
        """
        unread: list[Instruction] = []
        if kv is not None and request.replica_id is not None:
            unread.append(FreeKeptKv(request.replica_id, request.attempt_id))
        target = self._release(request, result)
        self.failover.note_loss(request, now=now)
        is_blocked = self.quarantine.refusal(request.fingerprint, now=now) is not None
        if target is not None and not is_blocked:
            replica = target.replica
            if self.replicas.get(replica.replica_id) is replica and replica.takes(request):
                return [self._start(request, target, now=now, kv=kv)]
        if not result:
            self.hand_overs.count(request, "no_target")
        request.replica_id = None
        self.waiting.add(request)
        return unread + self._end_blocked(now)

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

    def _release(self, request: RequestState, hand_over: str = "ended") -> Choice | None:
        """Take the request off its replica; its credit and outstanding tokens come back.

        Args:
            hand_over: How its hand-over ends, if one was asked for; "" if that is not known yet.

        Returns:
            The target of that hand-over.
        """
        assert request.replica_id is not None
        target = self._end_hand_over(request, hand_over)
        self.quarantine.end_trial(request)
        replica = self.replicas[request.replica_id]
        replica.let_go(request)
        del self._attempts[request.attempt_id]
        replica.owe(request, 0)
        self._routing.changed(replica.replica_id)
        return target

    def _end_hand_over(self, request: RequestState, result: str) -> Choice | None:
        """End what was asked for the request, if anything; return its target."""
        if (target := self.hand_overs.end(request, result)) is not None:
            self._routing.changed(target.replica.replica_id)
        return target
