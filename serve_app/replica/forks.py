"""`ForkServers` gets a supervisor an engine core process from a fork server (``fork_server.py``), which it starts if there is none."""

import asyncio
import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from serve_app.replica.fork_server import BACKLOG, GO, LOAD_S, MAX_ANSWER_BYTES, READ_AFTER_THE_IMPORT, ForkRequest
from serve_app.replica.pipe import is_own, peer_of
from serve_app.replica.process_group import is_stopped

logger = logging.getLogger(__name__)

FORK_S = 10.0
"""Limit for a fork once the import is over. A fork with a simulated engine took up to 0.5 s beside other work on two cores. Waiting longer
than an import takes, 8 s and more, would cost a start more than a new process."""
_MODULE = "serve_app.replica.fork_server"
_SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
_LAUNCH = """
import os, sys
pid, says = os.fork(), int(sys.argv[1])
if pid:
    os.write(says, str(pid).encode())
    os._exit(0)
os.close(says)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Runs Python with these arguments as a process whose parent has ended, and writes its process id to the first argument, a descriptor."""
_LOOK_EVERY_S = 1.0
_TRIES, _RETRY_S = 20, 0.01
_IMPORTED = ("serve_app", "vllm", "torch")
_DEFAULTS = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's import would start threads. A server that has threads does not fork."""
_SETTINGS = {"SPT_NOENV": "1"}
"""With it setproctitle leaves /proc/PID/environ, by which the fleet page finds forks."""


class ForkedProcess:
    """A process whose parent is not this one. The pidfd is closed when it has ended."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(None)

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if not self._ended.done():
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await asyncio.shield(self._ended)


class ForkServers:
    """The fork servers of one Ray node: one for each environment in which vLLM was imported.

    Their sockets have abstract addresses, which the kernel frees with the server: one address has at most one server.
    """

    def __init__(self, node: str, raylet: int, arguments: Sequence[str] = ("-m", _MODULE)) -> None:
        """``node``: Ray's id of the node; ``raylet``: the process with which the servers end; ``arguments``: Python's, for a server."""
        self._node = node
        self._raylet = raylet
        self._arguments = arguments
        self._started: int | None = None
        """The server that this object started last. Until its import is over no connection tells its process id."""

    def ask(self, environment: Mapping[str, str], descriptors: Sequence[int]) -> socket.socket:
        """Ask for a process with this environment; return the connection for `forked`. Blocks for a tenth of a second to start a server.

        Args:
            descriptors: The engine's pipe, then its standard input, output and error.

        Raises:
            OSError: No server can be reached or started.
        """
        conn = self._connect(environment)
        try:
            own = {name: environment[name] for name in READ_AFTER_THE_IMPORT & environment.keys()}
            order = int(Path("/proc/self/oom_score_adj").read_text())
            socket.send_fds(conn, [msgspec.json.encode(ForkRequest(own, os.getcwd(), order))], list(descriptors))
        except OSError:
            conn.close()
            raise
        return conn

    async def forked(self, conn: socket.socket) -> ForkedProcess:
        """Return the process that was asked for.

        A server that does not answer in time after its import is killed, and one that is stopped in its import by the supervisor that
        started it: the others' connections end with it. Its forks stay.

        Raises:
            OSError: The server has ended, refuses, or does not answer in time; or this process has no free file descriptor.
        """
        server = self._server_behind(conn)
        limit_s = LOAD_S if server is None else FORK_S
        watching: asyncio.Task[bool] | None = None
        if server is None and self._started is not None:
            watching = asyncio.create_task(_killed_as_stopped(self._started), name="fork-server")
        try:
            if not await _is_readable(conn.fileno(), limit_s):
                if server is not None:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(server, signal.SIGKILL)
                raise TimeoutError(f"it did not answer within {limit_s:g} s{'' if server is None else ', and was killed'}")
            return _taken(conn)
        except ConnectionError as exc:
            if watching is not None and watching.done() and watching.result():
                raise ConnectionAbortedError("it was stopped while it imported, and was killed") from exc
            raise
        finally:
            if watching is not None:
                watching.cancel()
            if server is not None:
                os.close(server)

    def _server_behind(self, conn: socket.socket) -> int | None:
        """Return a pidfd of the server that takes this connection; None while the server imports, when its starter is the peer."""
        pid = peer_of(conn).pid
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # the starter has ended
            return None
        words: list[str] = []
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        if words[1 : 1 + len(self._arguments)] == list(self._arguments):
            return pidfd
        os.close(pidfd)
        return None

    def _connect(self, environment: Mapping[str, str]) -> socket.socket:
        address = self._address(environment)
        self._started = None
        for _ in range(_TRIES):
            conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            conn.setblocking(False)  # a full queue is refused, not waited for
            try:
                conn.connect(address)
                if not is_own(conn):
                    raise PermissionError("another user or container has the fork server's address")
                return conn
            except ConnectionRefusedError:
                conn.close()
                if not self._start(address, environment):
                    time.sleep(_RETRY_S)  # another supervisor has the address, and does not listen yet
            except OSError:
                conn.close()
                raise
        raise ConnectionRefusedError("the fork server's address is taken, and its owner does not listen")

    def _address(self, environment: Mapping[str, str]) -> str:
        common = sorted((name, value) for name, value in environment.items() if name not in READ_AFTER_THE_IMPORT)
        what = msgspec.json.encode([self._node, os.getuid(), sys.executable, self._arguments, _code(), common])
        return f"\0serve-app-fork-server-{hashlib.sha256(what).hexdigest()[:40]}"

    def _start(self, address: str, environment: Mapping[str, str]) -> bool:
        """Start a server, which takes connections from now on; return False if another supervisor was faster."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError:
                return False
            listener.listen(BACKLOG)
            told, says = os.pipe()
            raylet = os.pidfd_open(self._raylet)
            try:
                passed = [listener.fileno(), raylet]
                # subprocess closes all other descriptors. A process of uvloop's inherits Ray's, and the raylet would not notice a worker's
                # end while a server holds the worker's connection.
                subprocess.run(
                    [sys.executable, "-ISc", _LAUNCH, str(says), *self._arguments, *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[*passed, says],
                    env={**_DEFAULTS, **environment, **_SETTINGS},
                    start_new_session=True,
                    check=True,
                )
                self._started = int(os.read(told, 32))
            except subprocess.CalledProcessError as exc:
                raise ChildProcessError(f"the fork server did not start: {exc}") from exc
            finally:
                for descriptor in (raylet, told, says):
                    os.close(descriptor)
        return True


def _code() -> list[tuple[str, int, int]]:
    """Return what tells one installation of the imported packages from the next: a server may outlive an upgrade."""
    found = []
    for package in _IMPORTED:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            file = Path(spec.origin).stat()
            found.append((spec.origin, file.st_ino, file.st_mtime_ns))
    return found


def servers_here(node: str) -> ForkServers | None:
    """Return the fork servers of this Ray worker's node; None, with a warning, if Ray would kill them and their forks."""
    if os.environ.get(_SUBREAPER, "").lower() in ("1", "true"):
        logger.warning("warm_start has no effect: with %s Ray kills what outlives a worker", _SUBREAPER)
        return None
    return ForkServers(node, int(os.environ.get("RAY_RAYLET_PID") or os.getppid()))


def _taken(conn: socket.socket) -> ForkedProcess:
    """Read the server's answer, and take the fork if there is one."""
    answer, pidfds, flags, _ = socket.recv_fds(conn, MAX_ANSWER_BYTES, 1)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not pidfds:
        raise ConnectionRefusedError(answer.decode(errors="replace") or "the fork server has ended")
    try:
        conn.send(GO)  # until now the fork has been no engine, and ends with the connection
    except OSError:
        os.close(pidfds[0])
        raise
    return ForkedProcess(int(answer), pidfds[0])


async def _killed_as_stopped(pid: int) -> bool:
    """Kill the process once it is found stopped twice, a second apart, and return True; return False if it ends by itself."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        looks_stopped = 0
        while (looks_stopped := looks_stopped + 1 if is_stopped(pid) else 0) < 2:
            await asyncio.sleep(_LOOK_EVERY_S)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    except OSError:  # it has ended
        return False
    finally:
        os.close(pidfd)


async def _is_readable(descriptor: int, within_s: float) -> bool:
    """Wait until there is something to read, and return True; return False if nothing comes within ``within_s``."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(within_s):
            await ready.wait()
    except TimeoutError:
        # Look once more: after a turn of the loop that took longer than the limit, both are due at once, and the timeout wins.
        (look := select.poll()).register(descriptor, select.POLLIN)
        return bool(look.poll(0))
    finally:
        loop.remove_reader(descriptor)
    return True
