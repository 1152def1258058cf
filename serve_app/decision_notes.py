"""Tells the lease board what the autoscaler decided, so that `/fleet` can show it.

The policy runs in Serve's controller and must never wait, so a thread speaks to the board. A note that the board does not take is lost:
autoscaling/decision_log.py keeps every decision, and these notes are for people who watch.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Full, Queue

import ray

from serve_app.membership import ScalingNote, board_name

logger = logging.getLogger(__name__)

QUEUED = 100
"""Notes that wait for the board; more are dropped."""
LIMIT_S = 5.0
"""How long the thread waits for the board to take a note."""


class DecisionNotes:
    """Notes of one application. ``put`` gives a note to its lease board; it may wait, and fail as Ray's calls do."""

    def __init__(self, put: Callable[[ScalingNote], None]) -> None:
        self._put = put
        self._queue: Queue[ScalingNote] = Queue(QUEUED)
        self._thread: threading.Thread | None = None

    def tell(self, note: ScalingNote) -> None:
        """Hand the note to the thread; returns at once and raises nothing."""
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
                logger.debug("a decision was not told: %s: %s", type(exc).__name__, exc)


def board_of(name: str) -> Callable[[ScalingNote], None]:
    """Return what gives a note to the lease board of the application ``name``. Outside Ray there is none, and nothing happens."""

    def put(note: ScalingNote) -> None:
        if ray.is_initialized():
            ray.get(ray.get_actor(board_name(name), namespace=name).note.remote(note), timeout=LIMIT_S)

    return put
