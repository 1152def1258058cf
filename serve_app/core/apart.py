"""`Apart` places long prompts where they slow few answers, and finds answers that would be slowed less at another replica.

Pure. Only `Attempts` and `FleetState` call this module. A long prompt makes the steps of its replica longer by seconds in all, and each
answer that is made there waits. So a long prompt goes to the replica where it and the answers there wait least in sum; an answer that can
be handed over with its KV waits at most as long as its read. Then those answers move for which that is cheaper, and the answer to the
prompt moves if more such prompts come to its replica. Any replica may do both; which one computes prompts follows from the costs alone.

All costs are measured: those of tokens by the replicas, those of reads by this ingress (`read_costs.py`). A replica counts as burdened with
as many tokens of long prompts as it got in the last `WINDOW_S`. This keeps short requests off it, and is the hysteresis: without it,
answers would come back after each long prompt, only to move again.
"""

import heapq
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from serve_app.core.drain import MAX_UNANSWERED, takes_moved
from serve_app.core.events import CacheReported
from serve_app.core.fair_order import FairOrder
from serve_app.core.hand_over import HandOvers
from serve_app.core.request import RequestState, Trial
from serve_app.core.routing import Choice, Reason, ReplicaState, RoutingPolicy
from serve_app.core.usual_costs import GUESS

WINDOW_S = 10.0
"""As many tokens of long prompts as a replica got in this time are expected in the next."""
LONG_STEPS = 8
"""A prompt is long if its tokens take as long as this many steps that only make answers. Shorter ones disturb too little."""
MIN_GAIN = 2.0
"""A move has to save this many times what it costs: the costs are estimates."""
MOVES_PER_S, MAX_MOVES = 16.0, 32
"""Moves per second of one ingress in the long run, and at once."""
MIN_STAY_S = 5.0
"""A moved answer stays this long."""
FULL, ROOMY = 0.9, 0.7
"""Used share of a KV cache from which on an engine may soon preempt requests, and up to which another may take one of them."""
_BATCH = 16
"""Answers of a usual step, whose time is the measure of long prompts."""
_MORE_TOKENS = 32
"""An answer is expected to become as long again as it is, and this many tokens longer."""
CANDIDATES = 16
"""The least burdened replicas, among which the target of a move is chosen."""
_TRIES = 16
"""After so many answers without a target that is worth a move, the others of the replica are not looked at."""


class Apart:
    """A routing policy in front of another, which chooses for all but long prompts."""

    causes = ("prompts", "balance")
    """Why answers leave: when a prompt begins or its first token came, and at a tick."""

    def __init__(self, inner: RoutingPolicy, order: FairOrder, hand_overs: HandOvers) -> None:
        self._inner, self._order, self._hand_overs = inner, order, hand_overs
        self._long: deque[tuple[float, ReplicaState, int]] = deque()
        """When long prompts started, their replicas and their tokens; the oldest first, none older than `WINDOW_S` at the last tick."""
        self._looked_at = set[str]()
        """Replicas that were looked at in turn, until all have been."""
        self._budget, self._ticked_at = float(MAX_MOVES), 0.0

    def changed(self, replica_id: str) -> None:
        self._inner.changed(replica_id)

    def forget(self, replica_id: str) -> None:
        self._inner.forget(replica_id)
        self._looked_at.discard(replica_id)
        self._long = deque(each for each in self._long if each[1].replica_id != replica_id)

    def cache_reported(self, event: CacheReported) -> None:
        self._inner.cache_reported(event)

    def placed(self, request: RequestState, replica: ReplicaState) -> int:
        return self._inner.placed(request, replica)

    def hit_tokens(self, request: RequestState, replica: ReplicaState) -> int:
        return self._inner.hit_tokens(request, replica)

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        return self._inner.leaving(queued, replicas)

    @property
    def prefill_ids(self) -> Collection[str] | None:
        """The replicas that compute long prompts; None if any may."""
        return None

    def plan(self, share: float, replicas: Collection[ReplicaState]) -> None:
        """Take over the share of replicas that the autoscaler wants to compute prompts. Without roles, this changes nothing."""

    def is_of_pool(self, tokens: int) -> bool:
        """Return whether the computation of so many prompt tokens is the work of a pool of its own; never without roles."""
        return False

    def members_changed(self, replicas: Collection[ReplicaState]) -> None:
        """Note that a replica is new or gone, or began or ended to drain: roles may follow from that (`Pools`)."""

    def validate(self, replicas: Mapping[str, ReplicaState], placed: Container[str] | None = None) -> None:
        self._inner.validate(replicas, placed)
        self._validate(replicas)

    def _validate(self, replicas: Mapping[str, ReplicaState]) -> None:
        for replica in replicas.values():
            assert replica.long_tokens == sum(tokens for _, other, tokens in self._long if other is replica)
        assert -1.0 < self._budget <= MAX_MOVES

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        choice = self._inner.pick(request, replicas)
        if choice is None or request.attempt >= 0 or not self.is_long(request.prompt_tokens):
            return choice
        if not self.is_long(request.prompt_tokens - self._inner.hit_tokens(request, choice.replica)):
            return choice
        able = [replica for replica in replicas.values() if replica.takes(request)]
        cheapest = heapq.nsmallest(CANDIDATES, able, key=lambda replica: self._cost_s(request.prompt_tokens, replica))
        if choice.replica not in cheapest:
            cheapest.append(choice.replica)

        def cost(replica: ReplicaState) -> tuple[float, bool]:
            tokens = request.prompt_tokens - self._inner.hit_tokens(request, replica)
            return self._cost_s(tokens, replica), replica is not choice.replica

        best = min(cheapest, key=cost)
        return choice if best is choice.replica else Choice(best, Reason.PROMPT, cost(choice.replica)[0] - cost(best)[0])

    def is_long(self, tokens: int) -> bool:
        """Return whether the computation of so many prompt tokens would disturb answers at the same replica."""
        costs = self._order.costs
        return costs is not GUESS and tokens * costs.prompt_token_s >= LONG_STEPS * self._step_s()

    def note_started(self, replica: ReplicaState, tokens: int, now: float) -> None:
        """Note that the replica is to compute so many prompt tokens of one request."""
        if self.is_long(tokens):
            self._long.append((now, replica, tokens))
            replica.long_tokens += tokens

    def tick(self, now: float) -> list[str]:
        """Forget long prompts that are too old to say anything; return their replicas. More moves are allowed again."""
        self._budget = min(MAX_MOVES, self._budget + MOVES_PER_S * (now - self._ticked_at))
        self._ticked_at = now
        changed = list[str]()
        while self._long and now - self._long[0][0] > WINDOW_S:
            _, replica, tokens = self._long.popleft()
            replica.long_tokens -= tokens
            changed.append(replica.replica_id)
        return changed

    def burdened(self, replicas: Collection[ReplicaState]) -> Iterable[ReplicaState]:
        """Return the replicas with most prompt tokens to do, most requests, and the fullest cache, each once, and another in turn.

        If the answers of the first ones cannot move, those of the last may. Looking at every replica at each tick would cost too much.
        """
        able = [replica for replica in replicas if replica.held and replica.kv_transfer and not replica.draining]
        most = [
            max(able, key=measure, default=None) for measure in (_prompt_burden, num_requests_of, lambda each: each.load.kv_usage)
        ]
        found = {each.replica_id: each for each in most if each is not None}
        others = [replica for replica in able if replica.replica_id not in found and replica.replica_id not in self._looked_at]
        if (another := max(others, key=_burden, default=None)) is None:
            self._looked_at.clear()
        else:
            self._looked_at.add(another.replica_id)
            found[another.replica_id] = another
        return found.values()

    def moves(
        self,
        replica: ReplicaState,
        replicas: Mapping[str, ReplicaState],
        now: float,
        *,
        more_tokens: int = 0,
        only: RequestState | None = None,
    ) -> Iterator[tuple[RequestState, Choice]]:
        """Yield answers that should leave the replica, and where to. The caller asks for each hand-over before it takes the next.

        Args:
            more_tokens: Prompt tokens that the replica is about to get.
            only: The one answer that may leave; None for all.
        """
        if not replica.kv_transfer or replica.draining or self._order.costs is GUESS:
            return
        coming = self._hand_overs.coming_tokens()
        others = (r for r in replicas.values() if r is not replica and r.kv_transfer == replica.kv_transfer)
        able = [r for r in others if takes_moved(r, MAX_UNANSWERED)]
        targets = [Target(r, coming[r.replica_id]) for r in heapq.nsmallest(CANDIDATES, able, key=_burden)]
        source = _Source(replica, more_tokens)
        streams = [only] if only is not None else sorted(replica.held.values(), key=num_left, reverse=True)
        tries = _TRIES
        for request in streams:
            if self._budget < 1.0 or not targets or not tries:
                return
            if not may_leave(request, now):
                continue
            best, gain_s = None, MIN_GAIN * self._hand_overs.costs.seconds(num_tokens(request))
            for target in targets:
                gain = self._gain_s(request, source, target)
                if gain > gain_s and target.takes(request) and self._hand_overs.is_possible(request, replica, target.replica):
                    best, gain_s = target, gain
            if best is None:
                tries -= 1
                continue
            self._budget -= 1.0
            yield request, Choice(best.replica, Reason.LOAD, gain_s)
            source.leave(request)
            best.coming_tokens += num_tokens(request)
            targets = [target for target in targets if takes_moved(target.replica, MAX_UNANSWERED)]

    def _step_s(self) -> float:
        costs = self._order.costs
        return costs.step_s + _BATCH * costs.output_token_s

    def _cost_s(self, tokens: int, replica: ReplicaState) -> float:
        """Return the seconds that requests would wait in sum if the replica computed so many tokens of a prompt."""
        own_s = tokens * self._order.costs.prompt_token_s
        before_s = before_tokens(replica, tokens) * self._order.costs.prompt_token_s
        num_answers = replica.num_requests()
        each_s = own_s
        if replica.kv_transfer:
            each_s = min(
                own_s, self._hand_overs.costs.seconds(int(replica.load.kv_usage * replica.kv_tokens / max(1, num_answers)))
            )
        return before_s + own_s + MIN_GAIN * num_answers * each_s

    def _gain_s(self, request: RequestState, source: "_Source", target: "Target") -> float:
        """Return how many seconds shorter the rest of the answers would be in sum, without what the move costs."""
        costs, left, here, there = self._order.costs, num_left(request), source.replica, target.replica
        part = min(1.0, left * self._step_s() / WINDOW_S)
        prompts = source.prompt_tokens - there.prefill_tokens + part * (here.long_tokens - there.long_tokens)
        answers = left * (source.num_requests - 1 - num_requests_of(there))
        again = num_tokens(request) if source.kv_usage() > FULL and target.kv_usage() < ROOMY else 0
        return (prompts + again) * costs.prompt_token_s + answers * costs.output_token_s


class _Source:
    """A replica without the answers that leave it."""

    def __init__(self, replica: ReplicaState, more_tokens: int) -> None:
        self.replica = replica
        self.prompt_tokens = replica.prefill_tokens + more_tokens
        self.num_requests = num_requests_of(replica)
        self._leaving_tokens = 0
        for request in replica.held.values():
            if request.is_leaving:
                self.leave(request)

    def leave(self, request: RequestState) -> None:
        """Note that the request was asked to leave."""
        self.num_requests -= 1
        self._leaving_tokens += num_tokens(request)

    def kv_usage(self) -> float:
        """Return the used share of the cache, from 0 to 1."""
        return self.replica.load.kv_usage - self._leaving_tokens / max(1, self.replica.kv_tokens)


@dataclass(slots=True)
class Target:
    """A replica with the answers that come to it. ``coming_tokens``: those whose KV it is to read, or reads."""

    replica: ReplicaState
    coming_tokens: int

    def kv_usage(self) -> float:
        return self.replica.load.kv_usage + self.coming_tokens / max(1, self.replica.kv_tokens)

    def takes(self, request: RequestState) -> bool:
        """Return whether the engine can run the request and has room for its KV."""
        fits = not self.replica.kv_tokens or self.kv_usage() + num_tokens(request) / self.replica.kv_tokens <= FULL
        return fits and self.replica.can_run(request)


def before_tokens(replica: ReplicaState, tokens: int) -> int:
    """Return the prompt tokens that the replica computes before those of a new prompt.

    Args:
        tokens: The tokens of the new prompt. As many are assumed for each request that waits in the engine for another ingress.
    """
    unseen = 0
    if replica.load.waiting:
        unseen = max(0, replica.load.waiting - sum(bool(request.prefill_tokens) for request in replica.held.values()))
    return replica.prefill_tokens + unseen * tokens


def may_leave(request: RequestState, now: float) -> bool:
    """Return whether the request is in an answer that has not moved lately."""
    if (
        not request.emitted_ids
        or request.is_leaving
        or request.prefill_tokens
        or request.reads_kv
        or request.trial is not Trial.NONE
    ):
        return False
    return request.attempt == 0 or now - request.trail.starts[-1] >= MIN_STAY_S


def num_left(request: RequestState) -> int:
    """Return how many tokens the answer will probably have still."""
    return min(max(0, request.max_tokens), len(request.emitted_ids) + _MORE_TOKENS)


def num_tokens(request: RequestState) -> int:
    return request.prompt_tokens + len(request.emitted_ids)


def _burden(replica: ReplicaState) -> tuple[int, int]:
    return _prompt_burden(replica), num_requests_of(replica)


def num_requests_of(replica: ReplicaState) -> int:
    """Return how many requests the replica has or will have soon, those of other ingresses included."""
    return replica.num_requests() + len(replica.coming)


def _prompt_burden(replica: ReplicaState) -> int:
    return replica.prefill_tokens + replica.long_tokens
