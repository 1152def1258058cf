"""The listener runs uvicorn inside the ingress replica's event loop, on a port that ingress replicas share by SO_REUSEPORT."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from serve_app.config import IngressSettings
from serve_app.errors import ListenFailed
from serve_app.ingress.http.connection import LimitedHttpProtocol


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals to Ray's worker process."""
        yield


class Listener:
    """The HTTP server of an ASGI app, from ``start`` to ``stop``."""

    def __init__(self, app: Any, settings: IngressSettings, *, connection: type[asyncio.Protocol] = LimitedHttpProtocol) -> None:
        self._settings = settings
        self._server = _Server(
            uvicorn.Config(
                app,
                http=connection,
                ws="none",
                lifespan="off",
                loop="none",
                access_log=False,
                # uvicorn's default calls dictConfig, after which a restarted Serve controller replaces every replica.
                log_config=None,
                server_header=False,
                timeout_keep_alive=math.ceil(settings.keep_alive_s),
                backlog=2048,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ListenFailed: The address is taken, or belongs to no interface of this machine.
        """
        sock = bind_shared(self._settings.host, self._settings.port)
        # Each connection inherits it. Without it, a client that acknowledges but reads nothing would hold its stream and a drain for ever.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(self._settings.stalled_client_s * 1000))
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="http")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Accept no more connections and wait until the open ones have finished their requests."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    def check(self) -> None:
        """Raise the error that ended the server, if the server has ended."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP listener ended")


def bind_shared(host: str, port: int) -> socket.socket:
    """Return a listening socket on an address that several ingress replicas of one machine may share.

    Raises:
        ListenFailed: Another process has the address and does not share it, or it belongs to no interface of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise ListenFailed(host=host, port=port, reason=exc.strerror or str(exc)) from exc
    sock.setblocking(False)
    return sock
