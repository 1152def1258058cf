"""Tells the lease board what the autoscaler decided, so that `/fleet` can show it.

The policy runs in Serve's controller and must never wait, so a thread speaks to the board. A note that cannot be told within
`LIMIT_S` is lost: decision_log.py keeps every decision, these notes are for people who watch.
"""

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, Full, Queue

import ray

from serve_app.membership import ScalingNote, board_name

QUEUED = 100
"""Notes that wait for the board; more are dropped."""
LIMIT_S = 5.0
IDLE_S = 60.0
"""Seconds without a note after which the thread ends; the next note starts another."""


class DecisionNotes:
    """Notes of one application. ``put`` gives a note to its lease board; it may wait, and fail as Ray's calls do."""

    def __init__(self, put: Callable[[ScalingNote], None]) -> None:
        self._put = put
        self._queue: Queue[ScalingNote] = Queue(QUEUED)
        self._thread: threading.Thread | None = None

    def tell(self, note: ScalingNote) -> None:
        """Hand the note to the thread; returns at once."""
        with contextlib.suppress(Full):
            self._queue.put_nowait(note)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="decision notes", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                note = self._queue.get(timeout=IDLE_S)
                with contextlib.suppress(
                    ray.exceptions.RayError, ValueError, OSError, RuntimeError
                ):  # away: as membership.py has it
                    self._put(note)


def board_of(name: str) -> Callable[[ScalingNote], None]:
    """Return what gives a note to the lease board of the application ``name``. Outside Ray there is none, and nothing happens."""

    def put(note: ScalingNote) -> None:
        if ray.is_initialized():
            ray.get(ray.get_actor(board_name(name), namespace=name).note.remote(note), timeout=LIMIT_S)

    return put
