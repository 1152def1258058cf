"""Threads carry the autoscaler's notes to the lease board, for people who watch `/fleet`, and its memory, for the next controller.

The policy runs in Serve's controller and must never wait, so threads talk to the board. A note that the board does not take is lost;
autoscaling/decision_log.py keeps every decision, and the policy repeats the notes of pools. The memory is lost with the board, that is
with the head node.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Full, Queue
from typing import Any, Generic, TypeVar

import ray

from serve_app.membership import PoolNote, ScalingNote, board_name

logger = logging.getLogger(__name__)
T = TypeVar("T")
N = TypeVar("N", bound=ScalingNote | PoolNote)

QUEUED = 100
"""Notes that wait for the board; more are dropped."""
LIMIT_S = 5.0
"""How long a thread waits for the board to take a note, or to keep the memory."""
READ_S = 10.0
"""How long a new controller leaves every target as it is while it asks for the memory of the controller before."""


class DecisionNotes(Generic[N]):
    """Notes of one application. ``put`` gives a note to its lease board; it may wait, and fail as Ray's calls do."""

    def __init__(self, put: Callable[[N], None]) -> None:
        self._put = put
        self._queue: Queue[N] = Queue(QUEUED)
        self._thread: threading.Thread | None = None

    def send(self, note: N) -> None:
        """Hand the note to the thread; return at once and raise nothing."""
        with contextlib.suppress(Full):
            self._queue.put_nowait(note)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="decision notes", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started now; the next note tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            note = self._queue.get()
            try:
                self._put(note)
            except Exception as exc:  # the root of a thread: Ray is away, or the board is of another version
                logger.debug("a note was not sent to the lease board: %s: %s", type(exc).__name__, exc)


def board_of(name: str) -> Callable[[ScalingNote | PoolNote], None]:
    """Return a function that gives a note to the lease board of the application ``name``; outside Ray it does nothing."""

    def put(note: ScalingNote | PoolNote) -> None:
        if ray.is_initialized():
            board = ray.get_actor(board_name(name), namespace=name)
            method = board.plan_pools if isinstance(note, PoolNote) else board.note
            ray.get(method.remote(note), timeout=LIMIT_S)

    return put


class BoardMemoryStore:
    """Keeps the memory of one application's autoscaler on the lease board. ``put`` and ``get`` may wait, and fail as Ray's calls do."""

    def __init__(
        self, put: Callable[[bytes], object], get: Callable[[], bytes], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._put, self._get, self._now = put, get, now
        self._reading: Future[bytes] | None = None
        self._reads_until = 0.0
        self._writing: Future[object] | None = None

    def kept(self) -> bytes | None:
        """Return the memory kept last, empty if there is none or the board does not answer within `READ_S`; None until then."""
        if self._reading is None:
            self._reading, self._reads_until = _in_thread(self._get), self._now() + READ_S
        if not self._reading.done():
            return None if self._now() < self._reads_until else b""
        if (exc := self._reading.exception()) is not None:
            logger.info("no memory of an earlier controller: %s: %s", type(exc).__name__, exc)
            return b""
        return self._reading.result()

    def keep(self, data: bytes) -> None:
        """Hand over the present memory. It is left out while the one before is still being written."""
        if self._writing is None or self._writing.done():
            self._writing = _in_thread(lambda: self._put(data))


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Start the call in a daemon thread, which does not delay the end of the process; return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as exc:  # the root of a thread: Ray is away, or the board is of another version
            future.set_exception(exc)

    try:
        threading.Thread(target=run, name="autoscaler's knowledge", daemon=True).start()
    except RuntimeError as exc:  # no thread can be started now
        future.set_exception(exc)
    return future


def board_memory_store(name: str) -> BoardMemoryStore | None:
    """Return the store on the lease board of the application ``name``; None outside Ray."""
    if not ray.is_initialized():
        return None

    def board() -> Any:
        return ray.get_actor(board_name(name), namespace=name)

    def put(data: bytes) -> None:
        ray.get(board().keep.remote(data), timeout=LIMIT_S)

    def get() -> bytes:
        return bytes(ray.get(board().kept.remote(), timeout=LIMIT_S))

    return BoardMemoryStore(put, get)
