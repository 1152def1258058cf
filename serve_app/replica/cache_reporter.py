"""`CacheReporter` reports to a replica's ingresses which points of prompts its engine has cached, if that has several tiers of KV."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from serve_app.core.cached_points import CachedPoints, Changes, Digest, DigestStream
from serve_app.replica import pipe

EVERY_S = 0.2
"""The least time between two digests. A point is one in 16 tokens or fewer, so at 20,000 prompt tokens/s a link carries 11 kB/s more, and
as much for what is removed."""


_MAX_POINTS = 2000
"""The most points that a digest adds, and that it removes. An ingress takes in each between the outputs of its streams."""


class Link(Protocol):
    """An ingress's link, which is open."""

    digest_stream: DigestStream

    def send_digests(self, digests: Iterable[Digest]) -> None: ...

    def is_full(self) -> bool:
        """Return whether the ingress reads too slowly."""
        ...


class CacheReporter:
    """Sends nothing before the engine's first report, which only engines with several tiers make.

    Args:
        links: Returns the open links.
    """

    def __init__(self, block_size: int, links: Callable[[], Iterable[Link]]) -> None:
        self._cached = CachedPoints(block_size)
        self._links = links
        self._timer: asyncio.TimerHandle | None = None
        self._has_reports = False

    def take(self, message: pipe.CacheChanged) -> None:
        """Take in what the engine reports. The ingresses hear of it, and of what follows, after `EVERY_S`."""
        self._has_reports = True
        for report in message.reports:
            self._cached.note(report)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._send_all)

    def greet(self, link: Link) -> None:
        """Send all that is cached over a new link, or over one that was full and has room again."""
        if self._has_reports and not link.digest_stream.is_in_step:
            self._send(link, Changes((), ()))

    def _send_all(self) -> None:
        self._timer = None
        changes = self._cached.take()
        if changes.added or changes.removed:
            for link in self._links():
                self._send(link, changes)

    def _send(self, link: Link, changes: Changes) -> None:
        digests = link.digest_stream.digests(changes, self._cached.points, _MAX_POINTS, has_room=not link.is_full())
        if digests:
            link.send_digests(digests)
