"""`Probe` is the ingress's end of one real link, and records all that happens on it."""

import asyncio
import itertools
import os
import ssl
from typing import Any

from serve_app.core.events import LinkEnd
from serve_app.ingress.fleet.link import ReplicaLink, dial
from serve_app.links.protocol.connection import IngressConnection
from serve_app.links.protocol.messages import Message
from tests.doubles.fake_engine import FINGERPRINT, VLLM_VERSION

_numbers = itertools.count()


class Probe:
    """One link. ``link`` exists once ``connect`` has started; ``lost`` has the causes of its end, ``ended`` their kinds."""

    link: ReplicaLink

    def __init__(self, *, send_buffer_bytes: int = 1 << 30, stuck_after_s: float = 0.1, **changes: Any) -> None:
        self.opened = 0
        self.room = 0
        self.messages: list[Message] = []
        self.lost: list[str] = []
        self.ended: list[LinkEnd] = []
        self._send_buffer_bytes = send_buffer_bytes
        self._stuck_after_s = stuck_after_s
        self._connection: dict[str, Any] = {
            "ingress_id": f"probe-{next(_numbers)}",
            "model": "tiny",
            "fingerprint": FINGERPRINT,
            "vllm_version": VLLM_VERSION,
            "token": b"",
            "nonce": os.urandom(32),
            "max_frame_bytes": 64 << 20,
            **changes,
        }

    async def connect(self, port: int, *, tls: ssl.SSLContext | None = None, timeout_s: float = 30.0) -> ReplicaLink:
        return await dial(("127.0.0.1", port), self.new_link, timeout_s=timeout_s, tls=tls)

    def new_connection(self) -> IngressConnection:
        """Return the ingress's end of a link, without a transport."""
        return IngressConnection(**self._connection)

    def pause(self) -> None:
        """Stop reading."""
        self.link._transport.pause_reading()

    def new_link(self) -> ReplicaLink:
        self.link = ReplicaLink(
            self.new_connection(),
            on_open=self._on_open,
            on_messages=lambda _, messages: self.messages.extend(messages),
            on_lost=self._on_lost,
            on_room=self._on_room,
            send_buffer_bytes=self._send_buffer_bytes,
            stuck_after_s=self._stuck_after_s,
        )
        return self.link

    def _on_lost(self, link: ReplicaLink, end: LinkEnd, cause: str) -> None:
        self.lost.append(cause)
        self.ended.append(end)

    def _on_room(self, link: ReplicaLink) -> None:
        self.room += 1

    def _on_open(self, link: ReplicaLink) -> None:
        self.opened += 1


async def silent_listener() -> tuple[asyncio.Server, list[asyncio.StreamReader]]:
    """Return a server that accepts connections, sends and reads nothing, and the connections' readers."""
    readers: list[asyncio.StreamReader] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        readers.append(reader)

    return await asyncio.start_server(accept, "127.0.0.1", 0, limit=1024), readers


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])
