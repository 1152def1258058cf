"""`EngineChild` is one process of ``replica/engine.py`` as its supervisor sees it: started, spoken to over the pipe, and ended."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serve_app.host.foreign_errors import in_one_line
from serve_app.replica import pipe
from serve_app.replica.forks import ForkedProcess, ForkServers
from serve_app.replica.process_group import end_group

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 7.0  # longer than an engine core gives its workers (process_group.py)
_OUTPUTS = (1, 2)
_NO_FORK = "this engine starts as a new process, which takes longer: no fork server made it: %s"


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


class _Ends:
    """Both ends of the pipe, and of the process's standard input. ``close`` closes those of the process."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.writer, self._arguments = socket.socketpair()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those of the process: the pipe, then standard input, output and error."""
        return (self._theirs.fileno(), self._arguments.fileno(), *_OUTPUTS)

    async def new_process(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serve_app.replica.engine", str(self._theirs.fileno())),
            stdin=self._arguments.fileno(),
            pass_fds=[self._theirs.fileno()],
            env=dict(environment),
            start_new_session=True,
        )

    def close(self) -> None:
        self._theirs.close()
        self._arguments.close()


class EngineChild:
    """Leads a process group of its own. ``on_closed`` is called when its end of the pipe closes, which is when the process ends."""

    def __init__(self, on_message: Callable[[pipe.FromEngine], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._forking: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._arguments: asyncio.Transport | None = None

    @property
    def pid(self) -> int | None:
        """The process; None until there is one. A fork server may first have to import vLLM."""
        return None if self._process is None else self._process.pid

    async def spawn(self, environment: Mapping[str, str], servers: ForkServers | None = None) -> None:
        """Start the process, which imports vLLM and waits for `hand_over`. With ``servers`` it is a fork, if they can make it."""
        if servers is None:
            await self._start_new(environment)
        else:
            self._forking = asyncio.create_task(self._fork_or_start(environment, servers), name="fork")

    async def _open(self) -> _Ends:
        ends, loop = _Ends(), asyncio.get_running_loop()
        self._arguments, _ = await loop.create_unix_connection(asyncio.Protocol, sock=ends.writer)
        self._transport, _ = await loop.create_unix_connection(
            lambda: _PipeProtocol(self._on_message, self._on_closed), sock=ends.ours
        )
        return ends

    async def _start_new(self, environment: Mapping[str, str]) -> None:
        with contextlib.closing(await self._open()) as ends:
            self._process = await ends.new_process(environment)

    async def _fork_or_start(self, environment: Mapping[str, str], servers: ForkServers) -> None:
        """Get a fork, or start a new process in its place. If there is neither, report why the start fails."""
        try:
            with contextlib.closing(await self._open()) as ends, servers.ask(environment, ends.descriptors) as asked:
                self._process = await servers.forked(asked)
            return
        except OSError as exc:
            logger.warning(_NO_FORK, exc)
        try:
            self._forget_ends()
            await self._start_new(environment)
        except OSError as exc:
            self._on_message(pipe.EngineFailed(in_one_line(exc)))
            self._on_closed()

    def _forget_ends(self) -> None:
        """Close our ends. A server that has not read the request may hold the others: a process with them would seem to live with it."""
        for transport in (self._transport, self._arguments):
            if transport is not None:
                transport.set_protocol(asyncio.Protocol())
                transport.close()

    def hand_over(self, start: Mapping[str, Any]) -> None:
        """Send the process the arguments of its engine, as soon as there is one. So `pid` is known before the engine is ready."""
        if self._forking is None or self._forking.done():
            self._write_arguments(start)
        else:
            self._forking.add_done_callback(lambda _: self._write_arguments(start))

    def _write_arguments(self, start: Mapping[str, Any]) -> None:
        if self._arguments is not None and not self._arguments.is_closing():
            self._arguments.write(msgspec.json.encode(start))
            self._arguments.close()

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
        if self._forking is not None:
            self._forking.cancel()
            await asyncio.wait([self._forking])
        for transport in (self._transport, self._arguments):
            if transport is not None:
                transport.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # a process that is stopped would not see the end of the pipe
            self._process.send_signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            logger.warning("engine process %d did not end by itself", self._process.pid)
        self.kill()
        await self._process.wait()
