"""`Pools` gives replicas roles: some compute long prompts and hand the answers over with their KV, the others make the answers.

Pure. Only `Attempts` and `FleetState` call this module, in place of `Apart`, whose window, budget and targets it uses. Any replica can do
both, so roles are only an order of preference: without a replica of the right role that takes a request, one of the other role gets it.

Roles follow from the ids of the replicas to which this ingress has a link and that do not drain: the first ones in order compute prompts
(`PoolSizes.num_prefill`). Ingresses with the same links agree without a message. Whichever replica drains or is lost, the next one takes
its role; if only one ingress loses a link, it differs from the others until the link is back, and moves answers meanwhile.
"""

import heapq
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

from serve_app.core.apart import (
    CANDIDATES,
    WINDOW_S,
    Apart,
    Target,
    before_tokens,
    may_leave,
    num_left,
    num_requests_of,
    num_tokens,
)
from serve_app.core.drain import MAX_UNANSWERED, takes_moved
from serve_app.core.fair_order import FairOrder
from serve_app.core.hand_over import HandOvers
from serve_app.core.least_loaded import rank_of
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, Reason, ReplicaState, RoutingPolicy
from serve_app.core.usual_costs import GUESS


class Pools(Apart):
    """A routing policy in front of another, which chooses among the replicas that make answers.

    Args:
        max_wait_s: A prompt that would wait longer than this for its prefill goes to a replica of the other role.
    """

    causes = ("role", "role")

    def __init__(
        self, inner: RoutingPolicy, order: FairOrder, hand_overs: HandOvers, sizes: PoolSizes, max_wait_s: float
    ) -> None:
        super().__init__(inner, order, hand_overs)
        self._sizes, self._max_wait_s = sizes, max_wait_s
        self._share: float | None = None
        self._prefill: dict[str, ReplicaState] = {}
        self._decode: dict[str, ReplicaState] = {}
        """All other replicas, draining ones included."""
        self._has_more = False
        """Whether the last change gave a replica this other role."""

    @property
    def prefill_ids(self) -> Collection[str]:
        return self._prefill.keys()

    def plan(self, share: float, replicas: Collection[ReplicaState]) -> None:
        if share != self._share:
            self._share = share
            self.members_changed(replicas)

    def members_changed(self, replicas: Collection[ReplicaState]) -> None:
        """Give the replicas their roles, now that one is new or gone, or began or ended to drain."""
        able = sorted((each for each in replicas if each.kv_transfer and not each.draining), key=lambda each: each.replica_id)
        first = able[: self._sizes.num_prefill(len(able), self._share)]
        before, self._prefill = self._prefill.keys(), {each.replica_id: each for each in first}
        others = {each.replica_id: each for each in replicas if each.replica_id not in self._prefill}
        self._has_more, self._decode = bool(others.keys() - self._decode.keys()), others
        for replica_id in before ^ self._prefill.keys():
            self.changed(replica_id)

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        if not queued:
            return []
        # If the new replica has the other role, it does not take these requests, and they would only lose their place.
        if queued[0].replica_id in self._decode:
            if self._has_more:
                return self._inner.leaving(queued, self._decode)
            queued = [request for request in queued if self.is_long(request.prefill_tokens)]
        return queued if any(not replica.prefill_tokens for replica in self._prefill.values()) else []

    def validate(self, replicas: Mapping[str, ReplicaState], placed: Container[str] | None = None) -> None:
        """Assert the invariants."""
        assert self._prefill | self._decode == dict(replicas)
        assert not any(replica.draining for replica in self._prefill.values())
        self._inner.validate(self._decode, replicas)
        self._validate(replicas)

    def is_long(self, tokens: int) -> bool:
        """Return whether the prefill of so many tokens disturbs answers, and takes longer than a read of their KV."""
        return super().is_long(tokens) and self._hand_overs.costs.pays(tokens, self._order.costs)

    def is_of_pool(self, tokens: int) -> bool:
        return self.is_long(tokens)

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        choice = self._inner.pick(request, self._decode)
        if choice is None:
            others = (each for each in self._prefill.values() if each.takes(request))
            least = min(others, key=lambda replica: rank_of(replica, request), default=None)
            return None if least is None else Choice(least, Reason.SPREAD)
        if request.emitted_ids and request.replica_id is not None:
            return choice  # its replica drains, and the KV moves along: nothing is to be computed

        def tokens(replica: ReplicaState) -> int:
            return num_tokens(request) - self._inner.hit_tokens(request, replica)

        if not self.is_long(tokens(choice.replica)):
            return choice

        def before(replica: ReplicaState) -> int:
            return before_tokens(replica, tokens(replica))

        able = (each for each in self._prefill.values() if each.takes(request))
        best = min(able, key=lambda each: (before(each) + tokens(each), each.replica_id), default=None)
        if best is None:
            return choice
        later_tokens = min(before(best), before(best) - before(choice.replica))
        is_late = later_tokens * self._order.costs.prompt_token_s > self._max_wait_s
        return choice if is_late else Choice(best, Reason.PROMPT)

    def burdened(self, replicas: Collection[ReplicaState]) -> Iterable[ReplicaState]:
        """Return the replicas whose answers should leave: those that have the role of computing prompts."""
        return [replica for replica in self._prefill.values() if replica.held]

    def moves(
        self,
        replica: ReplicaState,
        replicas: Mapping[str, ReplicaState],
        now: float,
        *,
        more_tokens: int = 0,
        only: RequestState | None = None,
    ) -> Iterator[tuple[RequestState, Choice]]:
        """Yield answers that leave a replica of the prefill pool, and the replica of the other pool with the fewest requests.

        An answer leaves after its first token (``only``), and without limit, for no more can begin than prompts are computed. Those that
        did not find a target then, or are there since before the replica had this role, leave within the budget.
        """
        if replica.replica_id not in self._prefill or self._order.costs is GUESS:
            return
        coming = self._hand_overs.coming_tokens()
        for request in [only] if only is not None else list(replica.held.values()):
            if only is None and self._budget < 1.0:
                return
            if not may_leave(request, now) or not self._outlasts_read(request):
                continue
            open_to_moves = (each for each in self._decode.values() if takes_moved(each, MAX_UNANSWERED))
            least = heapq.nsmallest(CANDIDATES, open_to_moves, key=num_requests_of)
            targets = (Target(each, coming[each.replica_id]) for each in least)
            if (target := next((each for each in targets if self._takes(each, request, replica)), None)) is not None:
                if only is None:
                    self._budget -= 1.0
                coming[target.replica.replica_id] += num_tokens(request)
                yield request, Choice(target.replica, Reason.LOAD, self._saves_s(request, replica))

    def _takes(self, target: Target, request: RequestState, source: ReplicaState) -> bool:
        return target.takes(request) and self._hand_overs.is_possible(request, source, target.replica)

    def _outlasts_read(self, request: RequestState) -> bool:
        """Return whether the rest of the answer takes longer than the read of its KV."""
        return num_left(request) * self._step_s() > self._hand_overs.costs.seconds(num_tokens(request))

    def _saves_s(self, request: RequestState, source: ReplicaState) -> float:
        """Return the seconds for which prompts like the latest would stop the rest of the answer."""
        return min(1.0, num_left(request) * self._step_s() / WINDOW_S) * source.long_tokens * self._order.costs.prompt_token_s
