"""The fork server imports vLLM once on a node and forks an engine core process for each supervisor that asks.

A fork has the imported modules at once and shares their memory, where a new process would import for seconds. ``forks.py`` is the
supervisors' side. The server ends with its node's raylet, or when it has had no fork for `LINGER_S`. No supervisor is its parent, because
Ray kills a worker's children with the worker. The forks survive the server.
"""

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from serve_app.host.foreign_errors import in_one_line
from serve_app.host.vllm_start import without_collection
from serve_app.replica import engine
from serve_app.replica.pipe import is_own

logger = logging.getLogger(__name__)

LINGER_S = 600.0
"""Seconds for which a server without a fork keeps the memory of its import for the next engine."""
LOAD_S = 120.0
"""Limit for the import, which took up to 60 s beside other starts on two cores. Supervisors that ask before its end wait as long."""
BACKLOG = 128
GO = b"go"
"""A supervisor's answer to a fork that it takes."""
MAX_ANSWER_BYTES = 1 << 10
NUM_DESCRIPTORS = 4
"""Of a request: the engine's pipe, then its standard input, output and error."""
READ_AFTER_THE_IMPORT = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",  # CUDA reads it when it is initialized, which the import does not do
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_HOST_IP",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
"""Engines that differ in any other variable get different servers."""
_MAX_REQUEST_BYTES = 1 << 16
_HEAR_S = 1.0


class ForkRequest(msgspec.Struct, frozen=True):
    """What a fork takes over from its supervisor, beside the file descriptors."""

    environment: Mapping[str, str]
    """The variables of `READ_AFTER_THE_IMPORT` that are set. All others are as in the server's own environment."""
    folder: str
    oom_score_adj: int


class ForkServer:
    """Serves ``listener`` until the process behind the pidfd ``raylet`` ends. It has one thread: a fork has only the one that forks."""

    def __init__(
        self, listener: socket.socket, raylet: int, lead: Callable[[socket.socket], None], linger_s: float, refusal: str = ""
    ) -> None:
        """``refusal``: why this server forks nothing; empty if it forks."""
        self._listener = listener
        self._raylet = raylet
        self._lead = lead
        self._linger_s = linger_s
        self._refusal = refusal
        self._forks: dict[int, int] = {}
        """Process ids by pidfd."""
        self._poll = select.poll()
        for descriptor in (listener.fileno(), raylet):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Fork until the raylet ends, or there was no fork for ``linger_s``."""
        while events := self._poll.poll(None if self._forks else self._linger_s * 1000):
            for descriptor, _ in events:
                if descriptor == self._raylet:
                    return
                if descriptor == self._listener.fileno():
                    with contextlib.suppress(OSError):  # the supervisor has ended, or gets no answer and starts a process itself
                        self._accept()
                else:
                    self._bury(descriptor)

    def _accept(self) -> None:
        conn, _ = self._listener.accept()
        with conn:
            conn.settimeout(_HEAR_S)
            if not is_own(conn):
                return
            body, descriptors, _, _ = socket.recv_fds(conn, _MAX_REQUEST_BYTES, NUM_DESCRIPTORS)
            try:
                if self._refusal:
                    conn.send(self._refusal.encode()[:MAX_ANSWER_BYTES])
                elif len(descriptors) == NUM_DESCRIPTORS:
                    self._fork(conn, msgspec.json.decode(body, type=ForkRequest), descriptors)
            finally:  # an open pipe would hide the engine's death from its supervisor
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork(self, conn: socket.socket, request: ForkRequest, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self._become_engine(conn, request, descriptors)
            except BaseException:
                logger.exception("a fork did not become an engine")
            finally:
                os._exit(1)
        try:
            fork = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._forks[fork] = pid
        self._poll.register(fork, select.POLLIN)

    def _become_engine(self, conn: socket.socket, request: ForkRequest, descriptors: list[int]) -> None:
        import setproctitle  # comes with vLLM; supervisors load this module, too

        os.setsid()
        self._listener.close()
        for descriptor in (self._raylet, *self._forks):
            os.close(descriptor)
        _wait_for_go(conn)
        pipe, *standard = descriptors
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(pipe, False)
        for name in READ_AFTER_THE_IMPORT:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in request.environment.items() if name in READ_AFTER_THE_IMPORT})
        with contextlib.suppress(OSError):
            os.chdir(request.folder)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(request.oom_score_adj))
        # People and tools find engines by this name.
        setproctitle.setproctitle(f"{sys.executable} -m {engine.__name__} {pipe}")
        self._lead(socket.socket(fileno=pipe))

    def _bury(self, fork: int) -> None:
        self._poll.unregister(fork)
        os.close(fork)
        os.waitpid(self._forks.pop(fork), 0)


def _wait_for_go(conn: socket.socket) -> None:
    """Tell the supervisor of this fork, and end the process unless it takes it: it may have started another process meanwhile."""
    with conn:
        conn.settimeout(None)
        pidfd = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(conn, [str(os.getpid()).encode()], [pidfd])
            goes = conn.recv(len(GO)) == GO
        except ConnectionError:
            goes = False
        os.close(pidfd)
    if not goes:
        os._exit(0)


def why_not_to_fork(raylet: int) -> str:
    """Return why this process, with its modules loaded, should not fork; empty if it can. ``raylet`` is a pidfd."""
    tasks = sorted(Path("/proc/self/task").iterdir())
    if len(tasks) > 1:
        names = ", ".join((task / "comm").read_text().strip() for task in tasks)
        return f"the import has left threads, which a fork lacks: {names}"
    if f"Pid:\t{os.getppid()}\n" in Path(f"/proc/self/fdinfo/{raylet}").read_text():
        return "the raylet has adopted the fork server, and kills such children"
    return ""


def serve(
    listener: socket.socket,
    raylet: int,
    load: Callable[[], None],
    lead: Callable[[socket.socket], None],
    *,
    linger_s: float = LINGER_S,
) -> None:
    """Run ``load``, then fork processes that run ``lead`` with their pipe. Supervisors may connect meanwhile, and wait.

    A server that cannot fork tells them why for ``linger_s``, so that they do not start the next one at once, and then ends.

    The server calls ``listen``, as the supervisor that started it has, at the end of ``load``: a supervisor that connects from then on
    finds this process as its peer, and so knows that the import is over.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # as in an engine
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LOAD_S)  # ends a process that is stuck
    try:
        load()
        refusal = why_not_to_fork(raylet)
    except Exception as exc:
        logger.exception("the fork server cannot load")
        refusal = in_one_line(exc)
    signal.setitimer(signal.ITIMER_REAL, linger_s if refusal else 0)
    sys.stdout.flush()  # forks would write it again
    gc.freeze()  # a collection in a fork would write to the pages of all these objects, and so copy them
    listener.listen(BACKLOG)
    ForkServer(listener, raylet, lead, linger_s, refusal).run()


def _import_vllm() -> None:
    with without_collection():
        importlib.import_module("serve_app.replica.engine_core")
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("vLLM's import has initialized CUDA, which a fork cannot use: set warm_start: false")


def main() -> None:
    """Run the server; arguments 1 and 2 are the file descriptors of the listening socket and of the raylet's pidfd."""
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), _import_vllm, engine.lead)


if __name__ == "__main__":
    main()
