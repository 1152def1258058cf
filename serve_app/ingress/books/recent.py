"""`RecentRequests` keeps the ways of the latest HTTP requests of an ingress, for `/fleet/requests` and the fleet page.

A way has the replicas of a request in order, and why it went to each and left it. It holds nothing of a prompt or an answer, and no key.
Nothing is kept of lines of batches that found no free place, and of requests that no engine had to answer, such as those to `/tokenize`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from serve_app.books.words import CAUSES
from serve_app.core.events import LinkEnd
from serve_app.core.request import RequestState
from serve_app.core.trail import MOVED
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.outcomes import Ending

MAX_WAYS = 8
"""The most ways of requests that moved, and the most of those that did not, for each tenant."""
MAX_HOPS = 8
"""A way with more hops shows only its last ones."""
MAX_ID_CHARS = 64
MAX_TENANTS = 200
"""The ingress keeps the ways of so many tenants. The tenant that came first is forgotten for one that is new."""
MAX_LOOKED_AT = 500
"""So many running requests are looked at, the newest ones, so that an answer costs the event loop little."""
_ENDS = {end.name.lower(): end.value for end in LinkEnd}

CauseOfLoss = Callable[[str, str], str | None]
"""Model, replica -> why this ingress has lost the replica; None if that is not known."""


def unknown(model: str, replica_id: str) -> None:
    """Return None: no cause is known."""


class Hop(msgspec.Struct, frozen=True):
    """One start of a request at a replica."""

    replica: str
    reason: str
    """Why it went there: a `core.routing.Reason`."""
    start_s: float
    """Time from the head of the request to the start."""
    left: str = ""
    """Why the request left the replica before its end, in words; empty if it did not."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Of several engine requests (choices, prompts of a list, beams) the hops are those of the one that moved most often."""

    id: str
    tenant: str | None
    key: str | None
    """The id of the API key, never the key."""
    model: str
    time: float
    """When the head of the request was read, in seconds since the epoch."""
    state: str
    """``arriving``, ``queued`` or ``running``; then the outcome, in the words of `serve_app_requests_total`."""
    reason: str
    """Why the request had its outcome; empty while it runs."""
    queued_s: float | None
    """Time from the engine request's arrival to its first start. None: it was not started."""
    total_s: float
    """Time from the head of the request to its end, or until now."""
    output_tokens: int
    hops: list[Hop]


class _Kept(NamedTuple):
    """The latest ways of one tenant."""

    moved: deque[Way]
    others: deque[Way]

    def add(self, way: Way) -> None:
        (self.moved if len(way.hops) > 1 else self.others).append(way)


def _new_kept() -> _Kept:
    return _Kept(deque(maxlen=MAX_WAYS), deque(maxlen=MAX_WAYS))


class RecentRequests:
    """The ways of requests that have ended. ``cause``: why replicas were lost."""

    def __init__(self, cause: CauseOfLoss = unknown) -> None:
        self._cause = cause
        self._kept: dict[str | None, _Kept] = {}

    def end(self, exchange: Exchange, ending: Ending) -> None:
        """Keep the way of a request that has ended."""
        word = ending.word()
        if word == "held_back" or (word == "complete" and not exchange.requests.num):
            return
        if (kept := self._kept.get(exchange.tenant)) is None:
            if len(self._kept) >= MAX_TENANTS:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[exchange.tenant] = _new_kept()
        kept.add(self._way(exchange, word, ending.reason, exchange.ended_at))

    def shown(self, running: Iterable[Exchange], tenant: str | None, now: float) -> dict[str, Any]:
        """Return the tenant's ways, the newest first: at most `MAX_WAYS` that ``moved``, and as many ``others``.

        Args:
            running: The requests that have not ended, the newest first.
            tenant: None for the requests of an ingress that asks for no key.
            now: The ingress's monotonic second.
        """
        moved, others = list[Way](), list[Way]()
        for exchange in islice(running, MAX_LOOKED_AT):
            ways = moved if any(len(each.trail.replicas) > 1 for each in exchange.requests.kept) else others
            if exchange.tenant == tenant and len(ways) < MAX_WAYS:
                ways.append(self._way(exchange, _state(exchange), "", now))
        ended = self._kept.get(tenant) or _new_kept()
        return {"time": time.time(), "moved": _newest(moved, ended.moved), "others": _newest(others, ended.others)}

    def _way(self, exchange: Exchange, state: str, reason: str, until: float) -> Way:
        request = max(exchange.requests.kept, key=lambda each: len(each.trail.replicas), default=None)
        trail = None if request is None else request.trail
        queued_s = None if request is None or trail is None or trail.started_at is None else trail.started_at - request.arrived_at
        return Way(
            id=exchange.shown_id[:MAX_ID_CHARS],
            tenant=exchange.tenant,
            key=exchange.key,
            model=exchange.model,
            time=round(exchange.time, 3),
            state=state,
            reason=reason,
            queued_s=None if queued_s is None else round(queued_s, 3),
            total_s=round(until - exchange.arrived_at, 3),
            output_tokens=exchange.requests.output_tokens,
            hops=[] if request is None else self._hops(exchange, request),
        )

    def _hops(self, exchange: Exchange, request: RequestState) -> list[Hop]:
        trail = request.trail
        causes = {move.attempt: CAUSES.get(move.cause, move.cause) for move in trail.moves}
        hops: list[Hop] = []
        for number in range(max(0, len(trail.replicas) - MAX_HOPS), len(trail.replicas)):
            replica, end = trail.replicas[number], trail.ends[number] if number < len(trail.ends) else ""
            left = ""
            if end in _ENDS:
                left = self._cause(exchange.model, replica) or _ENDS[end]
            elif end == MOVED:
                left = causes.get(number, MOVED)
            start_s = round(trail.starts[number] - exchange.arrived_at, 3)
            hops.append(Hop(replica, trail.reasons[number], start_s, left))
        return hops


def _state(exchange: Exchange) -> str:
    """Return what a request that has not ended does now."""
    trails = [request.trail for request in exchange.requests.kept]
    if not trails:
        return "arriving"
    return "queued" if all(len(trail.ends) == len(trail.replicas) and not trail.end for trail in trails) else "running"


def _newest(*parts: Iterable[Way]) -> list[Way]:
    return sorted((way for part in parts for way in part), key=lambda way: way.time, reverse=True)[:MAX_WAYS]
