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
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from serve_app.host.vllm_start import without_collection
from serve_app.replica import engine
from serve_app.replica.pipe import peer_of

logger = logging.getLogger(__name__)

LINGER_S = 600.0
"""Seconds for which a server without a fork keeps the memory of its import for the next engine."""
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
"""The variables in which engines of one fork server may differ. Others are taken to matter to the import, whoever reads them."""
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

    def __init__(self, listener: socket.socket, raylet: int, lead: Callable[[socket.socket], None], linger_s: float) -> None:
        self._listener = listener
        self._raylet = raylet
        self._lead = lead
        self._linger_s = linger_s
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
            if peer_of(conn).uid != os.getuid():
                return
            body, descriptors, _, _ = socket.recv_fds(conn, _MAX_REQUEST_BYTES, NUM_DESCRIPTORS)
            try:
                if len(descriptors) == NUM_DESCRIPTORS and not _is_given_up(conn):
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
        fork = os.pidfd_open(pid)
        self._forks[fork] = pid
        self._poll.register(fork, select.POLLIN)
        try:
            socket.send_fds(conn, [str(pid).encode()], [fork])
        except OSError:  # the supervisor does not wait any longer, and may have started another process on the same pipe
            os.kill(pid, signal.SIGKILL)

    def _become_engine(self, conn: socket.socket, request: ForkRequest, descriptors: list[int]) -> None:
        os.setsid()
        pipe, *standard = descriptors
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        for descriptor in (*standard, self._raylet, *self._forks):
            os.close(descriptor)
        self._listener.close()
        conn.close()
        os.set_inheritable(pipe, False)
        for name in READ_AFTER_THE_IMPORT:
            os.environ.pop(name, None)
        os.environ.update(request.environment)
        with contextlib.suppress(OSError):
            os.chdir(request.folder)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(request.oom_score_adj))
        _name_process(f"{sys.executable} -m {engine.__name__} {pipe}")
        self._lead(socket.socket(fileno=pipe))

    def _bury(self, fork: int) -> None:
        self._poll.unregister(fork)
        os.close(fork)
        os.waitpid(self._forks.pop(fork), 0)


def _is_given_up(conn: socket.socket) -> bool:
    """Return whether the supervisor has closed the connection: it waited too long and has started a process itself."""
    closed = select.poll()
    closed.register(conn, select.POLLRDHUP | select.POLLHUP)
    return bool(closed.poll(0))


def _name_process(title: str) -> None:
    """Show this process as what it has become, by which people and tools find engines."""
    import setproctitle

    setproctitle.setproctitle(title)


@contextlib.contextmanager
def _ending_with(raylet: int) -> Iterator[None]:
    """End this process during the block if the raylet ends. No thread is left after the block."""
    done, leaving = os.pipe()
    ends = select.poll()
    for descriptor in (raylet, done):
        ends.register(descriptor, select.POLLIN)

    def watch() -> None:
        if any(descriptor == raylet for descriptor, _ in ends.poll()):
            os._exit(0)

    thread = threading.Thread(target=watch, name="raylet-watch")
    thread.start()
    try:
        yield
    finally:
        os.close(leaving)
        thread.join()
        os.close(done)


def serve(
    listener: socket.socket,
    raylet: int,
    load: Callable[[], None],
    lead: Callable[[socket.socket], None],
    *,
    linger_s: float = LINGER_S,
) -> None:
    """Run ``load``, then fork processes that run ``lead`` with their pipe. Supervisors may connect meanwhile, and wait.

    If ``load`` fails, they find the listener closed, and start processes themselves, which report the failure.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # as in an engine
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _ending_with(raylet):
        load()
    sys.stdout.flush()  # forks would write it again
    gc.freeze()  # a collection in a fork would write to the pages of all these objects, and so copy them
    ForkServer(listener, raylet, lead, linger_s).run()


def _import_vllm() -> None:
    with without_collection():
        importlib.import_module("serve_app.replica.engine_core")
    import torch

    if torch.cuda.is_initialized():
        sys.exit("vLLM's import has initialized CUDA, which a fork cannot use: set warm_start: false")


def main() -> None:
    """Run the server; arguments 1 and 2 are the file descriptors of the listening socket and of the raylet's pidfd."""
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), _import_vllm, engine.lead)


if __name__ == "__main__":
    main()
