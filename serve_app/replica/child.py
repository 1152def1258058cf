"""`EngineChild` is one process of ``replica/engine.py`` as its supervisor sees it: started, spoken to over the pipe, and ended."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serve_app.replica import pipe
from serve_app.replica.process_group import end_group

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 7.0  # longer than an engine core gives its workers (process_group.py)


class _PipeProtocol(asyncio.Protocol):
    """Bytes from the engine's process to messages; end of file to ``on_closed``."""

    def __init__(self, on_message: Callable[[pipe.FromEngine], None], on_closed: Callable[[], None]) -> None:
        self._frames = pipe.frame_decoder()
        self._on_message = on_message
        self._on_closed = on_closed

    def data_received(self, data: bytes) -> None:
        for body in self._frames.receive_data(data):
            self._on_message(pipe.from_engine_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()


class EngineChild:
    """Leads a process group of its own. ``on_closed`` is called when its end of the pipe closes, which is when the process ends."""

    def __init__(self, on_message: Callable[[pipe.FromEngine], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(self, environment: Mapping[str, str]) -> None:
        """Start the process, which imports vLLM and waits for `hand_over`."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serve_app.replica.engine", str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(
            lambda: _PipeProtocol(self._on_message, self._on_closed), sock=ours
        )

    def hand_over(self, start: Mapping[str, Any]) -> None:
        """Send the process the arguments of its engine."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start))
        self._process.stdin.close()

    def send(self, message: pipe.ToEngine) -> None:
        """Queue a message for the engine; without effect once it is dead."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pipe.encode(message))

    def kill(self) -> None:
        """Kill the process group at once."""
        if self._process is not None:
            end_group(self._process.pid)

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Close the pipe, which ends the process and its workers; kill its process group after a grace time."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            logger.warning("engine process %d did not end by itself", self._process.pid)
        self.kill()
        await self._process.wait()
