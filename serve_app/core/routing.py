"""A routing policy chooses the replica of an attempt. This module has the interface and its input, `ReplicaState`.

Pure; only ``FleetState`` calls it. `least_loaded.py` has the choice by load, `affinity.py` that by what replicas have cached.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self

from serve_app.core.events import CacheReported, HeartbeatArrived, LinkOpened
from serve_app.core.load import NO_LOAD, EngineLoad
from serve_app.core.request import RequestState, Trial

_STEP_TOKENS = 8192
"""Prompt tokens that an engine probably computes at the same time: vLLM's default for a step of an accelerator that serves clients."""


@dataclass(slots=True)
class ReplicaState:
    """One replica with an open link, as this ingress knows it.

    ``outstanding_tokens``: prompt tokens not yet prefilled plus output tokens still allowed, over this ingress's attempts.
    ``yielding_tokens``: those of them that belong to requests which give way to others (`RequestState.gives_way`).
    ``prefill_tokens``: prompt tokens that its engine has probably still to compute for this ingress. ``long_tokens``: tokens of the long
    prompts that this ingress started here lately (`Apart`).
    ``queued_chats``: how many requests that are no batch's were in the engine's queue at the last heartbeat.
    ``step_parts``: the sum over all frames of what one request had of the step: a tenth if ten requests got an output.
    ``kv_tokens``: tokens that the replica's KV cache holds, and ``max_model_len`` those of one prompt and answer; 0 if it did not report
    them. ``is_longest``: no replica with these weights that takes new work has a longer context. Replicas with equal ``kv_transfer``, not
    "", can read each other's KV; ``kv_token_bytes`` is that of one token in all layers and workers, 0 if the replica did not report it.
    ``host_kv_tokens``: tokens of prompts whose KV is also copied to the host's memory.
    ``sleeping``: it takes no new work because its engine sleeps, or is about to. ``wake_asked_at``: when it was asked last to wake.
    ``coming``: ids of requests that another replica was asked to hand over, for which a place is kept here.
    """

    replica_id: str
    credit: int
    heard_at: float
    held: dict[str, RequestState] = field(default_factory=dict)
    outstanding_tokens: int = 0
    load: EngineLoad = NO_LOAD
    queued_chats: int = 0
    step_parts: float = 0.0
    prefill_tokens: int = 0
    long_tokens: int = 0
    draining: bool = False
    sleeping: bool = False
    wake_asked_at: float | None = None
    weights: str = ""
    kv_tokens: int = 0
    adapters: frozenset[int] = frozenset()
    max_model_len: int = 0
    is_longest: bool = True
    kv_transfer: str = ""
    kv_token_bytes: int = 0
    host_kv_tokens: int = 0
    coming: set[str] = field(default_factory=set)
    yielding_tokens: int = 0
    _others: int = 0  # requests of other ingresses that ran at the last heartbeat
    _last_part: float = 0.0
    _vain_tokens: int = 0  # since the last frame: tokens of prompts that were given up while the engine computed them

    @classmethod
    def linked(cls, event: LinkOpened, *, now: float) -> Self:
        """Return the replica of a link that has opened."""
        replica = cls(event.replica_id, event.credit, now, draining=event.draining, weights=event.weights)
        replica.kv_tokens, replica.adapters, replica.max_model_len = event.kv_tokens, event.adapters, event.max_model_len
        replica.kv_transfer, replica.kv_token_bytes = event.kv_transfer, event.kv_token_bytes
        replica.host_kv_tokens = event.host_kv_tokens
        return replica

    @property
    def kind(self) -> "Kind":
        """What decides which requests the engine can run. Replicas with equal ids of weights have equal adapters."""
        return self.weights, self.max_model_len, self.is_longest

    @property
    def tokens_to_do(self) -> int:
        """The tokens by which replicas are compared: those outstanding, and those of long prompts like the latest, which are expected."""
        return self.outstanding_tokens + self.long_tokens

    @property
    def firm_tokens(self) -> int:
        """As ``tokens_to_do``, without the requests that give way: what a request that does not may have to wait for."""
        return self.tokens_to_do - self.yielding_tokens

    def tokens_before(self, request: RequestState) -> int:
        """Return the tokens by which replicas are compared for this request."""
        return self.tokens_to_do if request.gives_way else self.firm_tokens

    def owe(self, request: RequestState, tokens: int) -> None:
        """Note that so many tokens of the request are outstanding from now on."""
        more = tokens - request.outstanding_tokens
        request.outstanding_tokens = tokens
        self.outstanding_tokens += more
        if request.gives_way:
            self.yielding_tokens += more

    def num_requests(self) -> int:
        """Return how many requests the replica has, with those of other ingresses that ran at the last heartbeat."""
        return len(self.held) + self._others

    def has_room(self) -> bool:
        return not self.draining and len(self.held) + len(self.coming) < self.credit

    def can_run(self, request: RequestState) -> bool:
        """Return whether the engine has the weights that began the answer, the request's adapter, and room in its context.

        During roll-outs, some replicas lack one of these. The replica with the longest context also runs a request whose answer it may
        have to end early, if the prompt and the answer so far fit.
        """
        if request.weights not in (None, self.weights) or (request.adapter is not None and request.adapter not in self.adapters):
            return False
        limit = self.max_model_len
        if not limit or request.tokens_left() <= limit:
            return True
        return self.is_longest and request.prompt_tokens + len(request.emitted_ids) < limit

    def takes(self, request: RequestState) -> bool:
        """Return whether an attempt of the request may start here."""
        return self.has_room() and self.can_run(request)

    def take_heartbeat(self, event: HeartbeatArrived, *, now: float) -> bool:
        """Take over the load that the replica reported; return whether it began or ended to drain."""
        has_turned = self.draining is not event.draining
        begun = sum(bool(r.emitted_ids) for r in self.held.values())
        # The second limit: a prompt of this ingress that is being computed runs, and has not begun to be answered.
        self._others = max(0, min(event.load.running - begun, event.load.running + event.load.waiting - len(self.held)))
        self.heard_at, self.load, self.draining, self.sleeping = now, event.load, event.draining, event.sleeping
        # Computed now and not when asked for: by then, lines that were in the queue may have begun.
        self.queued_chats = max(0, event.load.waiting - sum(r.background and not r.emitted_ids for r in self.held.values()))
        return has_turned

    def hear(self, num_outputs: int, *, now: float) -> None:
        """Take in that a step's outputs have come. Called for each frame, so it does little."""
        self.heard_at, self._vain_tokens = now, 0
        if num_outputs:  # none in the middle of a long prompt
            self._last_part = 1 / (num_outputs + self._others)
            self.step_parts += self._last_part

    def begin_answer(self, request: RequestState) -> None:
        """Note that the latest frame has the first token of the request."""
        request.weights, request.part_from = self.weights, self.step_parts - self._last_part

    def count_part(self, request: RequestState) -> None:
        """Give the request its part of the steps since its first token. After a failover, later attempts have no part."""
        if request.part_from is not None:
            request.step_part += self.step_parts - request.part_from
            request.part_from = self.step_parts

    def settle(self, request: RequestState) -> None:
        """Give the request its last part of the steps: its attempt is over."""
        self.count_part(request)
        request.part_from = None

    def let_go(self, request: RequestState) -> None:
        """Forget the request, whose attempt is over."""
        self.settle(request)
        self.end_prefill(request)
        del self.held[request.request_id]

    def end_prefill(self, request: RequestState) -> None:
        """Note that the engine has computed the request's prompt, or will not."""
        self.prefill_tokens -= request.prefill_tokens
        request.prefill_tokens = 0

    def note_given_up(self, request: RequestState) -> bool:
        """Note that a request was given up without a token, and return whether the engine had probably begun to compute its prompt.

        It had if the prompts before this one have fewer tokens than a step. Prompts that were given up since the last frame count as
        before it: of 100 prompts that are given up at once, in whatever order, the engine was computing a few.
        """
        before = (r.prompt_tokens for r in self.held.values() if not r.emitted_ids and r.priority < request.priority)
        has_begun = all(tokens < _STEP_TOKENS for tokens in accumulate(before, initial=self._vain_tokens))
        if has_begun:
            self._vain_tokens += request.prompt_tokens
        return has_begun

    def queued(self) -> list[RequestState]:
        """Return the requests that probably still wait in the engine's queue: the last ones, as many as this ingress's share of the queue.

        Suspects on trial are left out: the engine may be computing one, and an abort would hide that it was there at a crash.
        """
        running, waiting = self.load.running, self.load.waiting
        if not waiting:
            return []
        unstarted = [r for r in self.held.values() if not r.emitted_ids and r.trial is Trial.NONE]
        part = round(waiting * len(self.held) / (running + waiting))
        return unstarted[max(0, len(unstarted) - part) :]

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.outstanding_tokens == sum(r.outstanding_tokens for r in self.held.values()) >= 0
        assert self.yielding_tokens == sum(r.outstanding_tokens for r in self.held.values() if r.gives_way)
        assert self.prefill_tokens == sum(r.prefill_tokens for r in self.held.values())
        assert all(r.replica_id == self.replica_id for r in self.held.values())
        assert len(self.held) <= self.credit

    def describe(self) -> dict[str, Any]:
        """Return the load as plain data."""
        held = {"held": len(self.held), "outstanding_tokens": self.outstanding_tokens}
        load = {"running": self.load.running, "waiting": self.load.waiting, "kv_usage": self.load.kv_usage}
        return held | load | {"draining": self.draining}


def mark_longest(replicas: Collection[ReplicaState]) -> list[str]:
    """Set ``is_longest`` of the replicas, and return the ids of those for which it changed."""
    longest: dict[str, int] = {}
    for replica in replicas:
        if not replica.draining:
            longest[replica.weights] = max(longest.get(replica.weights, 0), replica.max_model_len)
    changed = [r for r in replicas if r.is_longest != (r.max_model_len >= longest.get(r.weights, 0))]
    for replica in changed:
        replica.is_longest = not replica.is_longest
    return [replica.replica_id for replica in changed]


class Reason(StrEnum):
    """Why a request went to its replica."""

    PREFIX = "prefix"
    """The replica has at least half of the prompt cached."""
    SESSION = "session"
    """The session's requests go there."""
    HASH = "hash"
    """The first new point of the prompt belongs there, by a hash that all ingresses share."""
    SPREAD = "spread"
    """The replicas of the reasons above had too much to do, or no room; so the request went by load."""
    LOAD = "load"
    """The replica had the least to do."""
    PROMPT = "prompt"
    """The prompt is long, and slows the fewest answers there (`Apart`)."""
    TRIAL = "trial"
    """A request like this suspect is tried there."""


class Choice(NamedTuple):
    """A replica for an attempt, and why. ``saves_s`` is that of `Route`."""

    replica: ReplicaState
    reason: Reason
    saves_s: float = 0.0


class RoutingPolicy(Protocol):
    """Chooses among replicas that take a request."""

    def changed(self, replica_id: str) -> None:
        """Note that a replica is new or gone, or that anything that `pick` reads of it may have changed."""
        ...

    def forget(self, replica_id: str) -> None:
        """Note that a replica is gone, and its cache with it."""
        ...

    def cache_reported(self, event: CacheReported) -> None:
        """Take in what a replica, which has a link, has cached. It does so only if it has several tiers of KV."""
        ...

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        """Return the replica for the next attempt of ``request``, None when none of ``replicas`` takes it."""
        ...

    def placed(self, request: RequestState, replica: ReplicaState) -> int:
        """Note that an attempt of ``request`` starts at ``replica``; return the prompt tokens that are probably cached there."""
        ...

    def hit_tokens(self, request: RequestState, replica: ReplicaState) -> int:
        """Return the prompt tokens that are probably cached at the replica."""
        ...

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        """Return those of a replica's queued requests that should leave it for a new replica, in the same order."""
        ...

    def validate(self, replicas: Mapping[str, ReplicaState], placed: Container[str] | None = None) -> None:
        """Assert the invariants.

        Args:
            replicas: Those among which `pick` chooses.
            placed: The replicas for which `placed` may have been called, if these are more.
        """
        ...


Kind = tuple[str, int, bool]
