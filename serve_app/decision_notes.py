"""Tells the lease board what the autoscaler decided, so that `/fleet` can show it.

The policy runs in Serve's controller and must never wait, so a thread speaks to the board. A note that cannot be told within
`LIMIT_S` is lost: decision_log.py keeps every decision, these notes are for people who watch.
"""

import contextlib
import threading
from queue import Empty, Full, Queue

import ray

from serve_app.membership import ScalingNote, board_name

QUEUED = 100
"""Notes that wait for the board; more are dropped."""
LIMIT_S = 5.0
IDLE_S = 60.0
"""Seconds without a note after which the thread ends; the next note starts another."""


class DecisionNotes:
    """Notes of the application ``name``. Outside Ray none is told."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: Queue[ScalingNote] = Queue(QUEUED)
        self._thread: threading.Thread | None = None

    def tell(self, note: ScalingNote) -> None:
        """Hand the note to the thread; returns at once."""
        if not ray.is_initialized():
            return
        with contextlib.suppress(Full):
            self._queue.put_nowait(note)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="decision notes", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._tell_board(self._queue.get(timeout=IDLE_S))

    def _tell_board(self, note: ScalingNote) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError, OSError, RuntimeError):  # away: as membership.py has it
            board = ray.get_actor(board_name(self._name), namespace=self._name)
            ray.get(board.note.remote(note), timeout=LIMIT_S)
