"""`PrefixAffinity` routes a prompt to a replica that has already computed its beginning, unless that replica has too much to do.

Pure. Only ``FleetState`` calls it. Each ingress learns from its own requests. For prompts that it has not seen it chooses by a rendezvous
hash, so that several ingresses send them to the same replica without exchanging messages. docs/adr/0019-route-by-cached-prefix.md has the
reasons. Sources: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998), the rendezvous hash; Mirrokni et al.,
"Consistent Hashing with Bounded Loads" (arXiv 1608.01350), the bound. Differs: the bound leaves room for some requests like this one.
"""

import heapq
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from serve_app.core.events import CacheReported
from serve_app.core.least_loaded import LeastOutstandingTokens, Loads
from serve_app.core.prefix_index import Prefix, PrefixIndex
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, Reason, ReplicaState

MIN_SHARE = 0.5
"""Share of a prompt that a replica must have cached for the prompt to go to that replica.

A smaller part, such as a short system prompt before a long question, would draw all requests to the first replica that cached it.
"""
MIN_CONTINUED = 0.1
"""Share of requests that must continue an earlier prompt for new prompts to be placed by the rendezvous hash, not by load.

The hash is for conversations whose turns come to different ingresses. Without conversations it would only load replicas unevenly.
"""
CONTINUED_OVER = 100
"""Requests over which the share of ``MIN_CONTINUED`` is measured."""
CONTINUED_AT_START = 0.5
"""The share that an ingress assumes before its first request: other ingresses may have placed conversations by the hash whose next turn
this ingress gets. Without conversations, the measured share is below ``MIN_CONTINUED`` after 161 requests."""
MAX_JUNCTIONS = 10_000
_ODD, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""A multiplication by ``_ODD`` spreads each bit over all higher ones. With Python's hash of a tuple one replica got three times as many
requests as another."""
MAX_TRIES = 3
"""Replicas that are tried by affinity before the request goes by load."""


class PrefixAffinity:
    """Sends a prompt to the replica that has its longest part cached; else by its session, or by its first new point; else by load.

    ``max_load``, > 1: how many times the mean of the other replicas the tokens to do of a replica may be that still gets requests by
    affinity; the request's own tokens raise this bound (`_bound`). ``continued``: the assumed share of requests that continue an earlier
    prompt, until requests have shown the true share. Cost of a pick, amortized: that of `LeastOutstandingTokens`, and a hash for each
    replica that may be chosen.
    """

    def __init__(self, max_load: float = 2.0, continued: float = CONTINUED_AT_START) -> None:
        self.index = PrefixIndex()
        self._max_load = max_load
        self._by_load = LeastOutstandingTokens()
        self._changed: set[str] = set()
        self._continued = continued
        """Share of the latest requests that continued an earlier prompt."""
        self._junctions: OrderedDict[int, None] = OrderedDict()
        """Points at which a prompt left the known ones with something new, the latest last. A later prompt that leaves them at the same
        point only shares its beginning with another prompt; it is not the next turn of one."""
        self._seeds: dict[str, int] = {}
        """Replica -> seed of the rendezvous hash, equal in all ingresses; for replicas that do not drain."""
        self._hashed: tuple[list[str], NDArray[np.uint64]] | None = None
        """Ids and seeds of ``_seeds``; None after a change."""

    def changed(self, replica_id: str) -> None:
        self._changed.add(replica_id)
        self._by_load.changed(replica_id)

    def forget(self, replica_id: str) -> None:
        self.changed(replica_id)
        self.index.forget(replica_id)

    def cache_reported(self, event: CacheReported) -> None:
        self.index.take_digest(event.replica_id, event.number, event.anew, event.added, event.removed)

    def placed(self, request: RequestState, replica: ReplicaState) -> int:
        self._changed.add(replica.replica_id)
        self._by_load.placed(request, replica)
        prefix = request.prefix
        if not prefix.hashes:
            return 0
        self._learn(prefix.hashes)
        hit_tokens = self.hit_tokens(request, replica)
        self.index.add(replica.replica_id, prefix, replica.kv_tokens and max(replica.kv_tokens, replica.host_kv_tokens))
        return hit_tokens

    def hit_tokens(self, request: RequestState, replica: ReplicaState) -> int:
        prefix = request.prefix
        hit_tokens = prefix.tokens(self.index.count(replica.replica_id, prefix.hashes))
        return min(hit_tokens, request.prompt_tokens - 1)  # an engine computes the last token in any case

    def leaving(self, queued: Sequence[RequestState], replicas: Mapping[str, ReplicaState]) -> Sequence[RequestState]:
        """Return those with little of their prompt cached at the replica, and of the others the last ones that exceed its bound."""
        if not queued:
            return []
        loads = self._by_load.all_loads
        loads.take_changes(replicas)
        excess = loads.tokens.get(queued[0].replica_id or "", 0) - self._bound(loads, 0)
        leaving: list[RequestState] = []
        for request in reversed(queued):
            if excess > 0 or request.trail.expected_hit_tokens <= MIN_SHARE * request.prompt_tokens:
                leaving.append(request)
                excess -= request.outstanding_tokens
        return leaving[::-1]

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        least = self._by_load.least(request, replicas)
        if least is None:
            return None
        self._take_changes(replicas)
        return self._affine(request, least, replicas)

    def _affine(self, request: RequestState, least: ReplicaState, replicas: Mapping[str, ReplicaState]) -> Choice:
        prefix, loads = request.prefix, self._by_load.loads(request)
        # A request that was started before goes by load: its replica is lost, drains, or had too much to do.
        if request.attempt >= 0 or request.spreads or (not prefix.hashes and prefix.session is None):
            return Choice(least, Reason.LOAD)
        count, holders = self.index.deepest(prefix.hashes)
        own_tokens = request.tokens_left()
        continues = prefix.session is None and self._continues(prefix.hashes, count)
        if continues or (key := self._key(prefix, count)) is None:
            if not continues and prefix.tokens(count) < MIN_SHARE * request.prompt_tokens:
                return Choice(least, Reason.LOAD)
            if least.replica_id in holders:
                return Choice(least, Reason.PREFIX)
            if not continues:  # a beginning that many prompts share costs little to compute once more: so they spread early
                own_tokens -= prefix.tokens(count)
            reason = Reason.PREFIX
            order = heapq.nsmallest(MAX_TRIES, (each for each in holders if each in loads.tokens), key=loads.tokens.__getitem__)
        else:
            reason = Reason.HASH if prefix.session is None else Reason.SESSION
            order = self._highest(key)
        bound = self._bound(loads, own_tokens)
        for replica_id in order:
            replica = replicas.get(replica_id)
            if (
                replica is not None
                and replica.takes(request)
                and loads.tokens[replica_id] <= bound
                and _has_headroom(replica, request)
            ):
                return Choice(replica, reason)
        return Choice(least, Reason.SPREAD)

    def _highest(self, key: int) -> list[str]:
        """Return the first replicas for the key by the rendezvous hash. For 1,000 replicas, Python's integers took ten times as long."""
        if self._hashed is None:
            self._hashed = list(self._seeds), np.array(list(self._seeds.values()), dtype=np.uint64)
        ids, seeds = self._hashed
        scores = (seeds ^ np.uint64(key & _BITS)) * np.uint64(_ODD)  # modulo 2^64; no two are equal
        top = np.argpartition(scores, -MAX_TRIES)[-MAX_TRIES:] if len(ids) > MAX_TRIES else np.arange(len(ids))
        return [ids[place] for place in top[np.argsort(scores[top])[::-1]]]

    def _bound(self, loads: Loads, own_tokens: int) -> float:
        """Return the most tokens to do with which a replica still gets a request of ``own_tokens`` by affinity.

        With m = ``max_load`` and n replicas that do not drain: m n / (m + n - 1) x (mean of all n + ``own_tokens``). For 2 replicas and
        m = 2 the factor is 4/3: m itself would let one of the two have everything. Without own tokens, the replica has at this bound m
        times the mean of the *other* replicas.
        """
        num_replicas = max(1, len(loads.tokens))
        of_mean = self._max_load * num_replicas / (self._max_load + num_replicas - 1)
        return of_mean * (loads.total / num_replicas + own_tokens)

    def _continues(self, hashes: Sequence[int], count: int) -> bool:
        """Return whether the prompt continues exactly one earlier prompt, as the next turn of a conversation does."""
        return count > 0 and hashes[count - 1] not in self._junctions

    def _key(self, prefix: Prefix, count: int) -> int | None:
        """Return the key for the rendezvous hash; None where the choice by load is better."""
        if prefix.session is not None:
            return prefix.session
        if self._continued >= MIN_CONTINUED and count < len(prefix.hashes):
            return prefix.hashes[count]
        return None

    def _learn(self, hashes: Sequence[int]) -> None:
        """Measure the share of requests that continue an earlier prompt."""
        count, _ = self.index.deepest(hashes)
        if count == len(hashes):
            return  # the same prompt again, or a turn too short for a point of its own: the prompt has no new point
        self._continued += (self._continues(hashes, count) - self._continued) / CONTINUED_OVER
        if count:
            self._junctions[hashes[count - 1]] = None
            self._junctions.move_to_end(hashes[count - 1])
            if len(self._junctions) > MAX_JUNCTIONS:
                self._junctions.popitem(last=False)

    def validate(self, replicas: Mapping[str, ReplicaState], placed: Container[str] | None = None) -> None:
        self._take_changes(replicas)
        self._by_load.validate(replicas)
        self.index.validate(replicas if placed is None else placed)
        assert self._seeds.keys() == {i for i, r in replicas.items() if not r.draining}
        assert len(self._junctions) <= MAX_JUNCTIONS

    def _take_changes(self, replicas: Mapping[str, ReplicaState]) -> None:
        for replica_id in self._changed:
            replica = replicas.get(replica_id)
            if replica is None or replica.draining:
                if self._seeds.pop(replica_id, None) is not None:
                    self._hashed = None
            elif replica_id not in self._seeds:
                self._hashed = None
                self._seeds[replica_id] = int.from_bytes(blake2b(replica_id.encode(), digest_size=8).digest())
        self._changed.clear()


def _has_headroom(replica: ReplicaState, request: RequestState) -> bool:
    """Return whether the replica has room for the prompt in its cache."""
    free_tokens = (1 - replica.load.kv_usage) * replica.kv_tokens
    return not replica.kv_tokens or request.prompt_tokens <= free_tokens
