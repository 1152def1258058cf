"""The state of `FairOrder` is a `Lane` for each priority, with an `Account` for each tenant and a `Place` for each request. Pure.

A lane also moves its virtual time.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest

from serve_app.core.queue_rate import QueueRate
from serve_app.core.usual_costs import UsualCosts
from serve_app.core.wait_margin import WaitMargin

_MEAN_S = 2.0
"""Virtual time is a moving mean, over about this time, of the starts of requests that have their first token.

The lowest start of the waiting requests was rejected: it stands still while requests of tenants that ask little wait for a place, and a
new tenant would get everything until it moved. So was the highest start: it follows an engine where only one tenant's requests wait, far
ahead of the others.
"""
_LOOK_EACH_S = 0.1
"""Seconds between two searches for the tenants that are furthest behind: a search takes a step for each tenant that waits."""
_AHEAD = 8
"""Requests by which a tenant may be ahead of another one before its requests give way to those of others: a small burst."""
_MAX_BACK = 2
"""Usual requests by whose cost one frame may move virtual time back at most."""
_LEAST_PACE = 0.4
"""Share of its full pace at which virtual time moves at least. Without it, where every tenant sends rarely, all requests start at the
virtual time, so the mean of their starts stands still, and a request that costs more than those that keep coming never starts."""


@dataclass(slots=True, eq=False)
class Queue:
    """Requests without a first token."""

    num_waiting: int = 0
    rate: QueueRate = field(default_factory=QueueRate)
    """Their starts per second, while engines are full and some of them wait."""
    begun_s: float | None = None
    """Moving mean of the expected GPU-seconds of those that began; None before the first."""
    usual: UsualCosts = field(default_factory=UsualCosts)
    """Costs of those that ended. Until a tenant's first answer, those of its lane are expected."""


@dataclass(slots=True, eq=False)
class Account(Queue):
    """One tenant in one lane. Finish and tag are virtual times."""

    tenant: str = ""
    finish_s: float = 0.0
    """When its requests so far are finished, by what they cost or are expected to cost."""
    tag_s: float = 0.0
    """The latest tag: while requests wait, a later one gets no lower tag, unless it takes free time."""
    latest: "Place | None" = None
    """Its latest request."""
    waiting: "OrderedDict[Place, None]" = field(default_factory=OrderedDict)
    """Its requests without a first token, in the order of arrival."""
    waiting_s: float = 0.0
    """Expected GPU-seconds of its requests without a first token."""
    margin: WaitMargin = field(default_factory=WaitMargin)
    weight: float = 1.0
    reached_s: float = 0.0
    """The greatest start of its requests that have begun since its queue was last empty. Where another engine's queue is shorter, it is
    later than the start of its first waiting request."""
    unreported_s: float = 0.0
    """Virtual seconds charged since the last report that the lease board has answered."""
    free_s: list[tuple[float, float]] = field(default_factory=list)
    """A heap of starts and lengths: the virtual time of requests that gave up before others of the tenant, while requests wait. Later
    requests take it. Otherwise no request would have a tag there, virtual time would leap over it, and the tenant would lose it."""

    def take_free(self, needed_s: float, virtual_s: float) -> float | None:
        """Take the first free time of this length, in one piece or several, and return its end; None if less is free.

        Free time that virtual time has passed is lost. Nothing is taken once all that the tenant is charged ends after its latest tag.
        """
        pieces: list[tuple[float, float]] = []
        while needed_s > 0.0 and self.free_s and self.finish_s <= self.tag_s:
            start_s, length_s = heappop(self.free_s)
            if start_s >= virtual_s:
                pieces.append((start_s, length_s))
                needed_s -= length_s
        if needed_s > 0.0:
            for piece in pieces:
                heappush(self.free_s, piece)
            return None
        end_s = sum(pieces[-1]) + needed_s
        if needed_s < 0.0:
            heappush(self.free_s, (end_s, -needed_s))
        return end_s

    def charge(self, seconds: float) -> None:
        """Charge the tenant for GPU-seconds. A negative number gives some back."""
        self.finish_s += seconds / self.weight
        self.unreported_s += seconds / self.weight


@dataclass(slots=True, eq=False)
class Place:
    """One request that has not ended. ``start_s`` is a virtual time, ``expected_s`` are GPU-seconds, of which the prompt's are a part."""

    lane: "Lane"
    account: Account
    start_s: float
    expected_s: float
    prompt_s: float
    earlier_tag_s: float | None
    """The tenant's latest tag before it; None if it took free time."""
    waits: bool = True


@dataclass(slots=True, eq=False)
class Lane(Queue):
    """The requests of one priority."""

    end: float = math.inf
    """The first tag of the next priority."""
    virtual_s: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    elsewhere_s: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> expected GPU-seconds of what waits at other ingresses, as last heard."""
    active: dict[Account, None] = field(default_factory=dict)
    """Tenants with waiting requests. It is no set, whose order, and so the rounding of sums, would change from run to run."""
    weights: float = 0.0
    """The sum of the weights of ``active``."""
    queueing: set[str] = field(default_factory=set)
    """Replicas in whose engines requests of this priority, or of one before it, waited at the last heartbeat."""
    is_full: bool = False
    usual_s: float = 0.0
    """Moving mean of GPU-seconds / weight over the requests that began: the unit in which tenants are ahead. 0 before the first."""
    floor_s: float = -math.inf
    """Lower bound of virtual time. Each start raises it by `_LEAST_PACE` x its GPU-seconds / the weights of all tenants that wait."""
    moved_at: float = 0.0
    """When virtual time moved last."""
    starts_s: list[float] = field(default_factory=list)
    """The starts since ``moved_at``. All first tokens of a frame come at the same time."""
    limits: Sequence[tuple[float, str]] = ()
    """For the two tenants that are furthest behind: the virtual time from which others are ahead of it, and its name; as last computed."""
    looked_at: float = -math.inf
    """When `limits` was computed."""

    def waiting_s(self, account: Account) -> float:
        """Return the expected GPU-seconds of the tenant's requests that wait at all ingresses."""
        return account.waiting_s + self.elsewhere_s.get(account.tenant, 0.0)

    def look_who_is_next(self, now: float) -> None:
        """Find the two tenants that are furthest behind, at most once in `_LOOK_EACH_S`."""
        if now - self.looked_at >= _LOOK_EACH_S:
            self.looked_at = now
            self.limits = nsmallest(2, ((self._limit_s(account), account.tenant) for account in self.active))

    def _limit_s(self, account: Account) -> float:
        first = next(iter(account.waiting))
        return max(first.start_s, account.reached_s) + _AHEAD * max(first.expected_s / account.weight, self.usual_s)

    def ahead_from_s(self, account: Account) -> float:
        """Return the virtual time from which the tenant is ahead of another one.

        That is `_AHEAD` requests after the place that the other one has reached: usual ones, or such as its first waiting one if they cost
        more. It is never less than `_AHEAD` usual requests after virtual time: one request that is held up at an engine says that its
        tenant is behind, but not that the others had too much.
        """
        of_virtual_s = self.virtual_s + _AHEAD * self.usual_s
        return max(of_virtual_s, next((limit_s for limit_s, tenant in self.limits if tenant != account.tenant), of_virtual_s))

    def advance(self, begun: Place, now: float) -> None:
        """Move virtual time towards the start of a place that has its first token, or up to it if no request of the lane waits anywhere."""
        begun.account.reached_s = max(begun.account.reached_s, begun.start_s)
        if not (self.num_waiting or self.elsewhere_s):
            self.virtual_s = max(self.virtual_s, begun.start_s)
            self.moved_at = now
            self.starts_s.clear()
            return
        self.starts_s.append(begun.start_s)
        least_s = self.virtual_s - _MAX_BACK * self.usual_s
        self.floor_s = max(self.floor_s, least_s) + _LEAST_PACE * begun.expected_s / (self.weights + begun.account.weight)
        self.virtual_s = max(self.virtual_s, self.floor_s)
        if now > self.moved_at:
            ahead_s = sum(self.starts_s) / len(self.starts_s) - self.virtual_s
            # A long prompt that waited for long began its wait long ago, which says nothing about the others.
            ahead_s = max(ahead_s, -_MAX_BACK * self.usual_s)
            self.virtual_s = max(self.floor_s, self.virtual_s + min(1.0, (now - self.moved_at) / _MEAN_S) * ahead_s)
            self.moved_at = now
            self.starts_s.clear()
