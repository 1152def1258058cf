"""`SupervisorWatch` is the engine core's watch over its supervisor: they end together, and a supervisor that hangs is killed.

The supervisor's event loop serves links, lease, drain and the watch over the engine. When that loop is blocked or the whole process
is stopped, a thread of the same process cannot be relied on: it stops, too, or waits for the interpreter lock that the loop holds.
The engine core is another process, and all that it needs is the pings that come over the pipe.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import time

from serve_app.core.health import PeerSilence
from serve_app.replica.pipe import EngineEnd, peer_of
from serve_app.replica.process_group import end_own_group

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_MAX_GAP_S = 4 * _LOOK_EVERY_S


class SupervisorWatch:
    """One thread of the engine core process. ``limit_s`` is set when the process has got its arguments."""

    def __init__(self, sock: socket.socket, end: EngineEnd) -> None:
        self._sock = sock
        self._end = end
        self._supervisor = peer_of(sock).pid
        self._silence = PeerSilence(math.inf, _MAX_GAP_S)
        self._num_pings = 0

    @property
    def limit_s(self) -> float:
        """Seconds without a sign of life after which the supervisor has hung."""
        return self._silence.limit_s

    @limit_s.setter
    def limit_s(self, limit_s: float) -> None:
        self._silence.limit_s = limit_s

    def run(self) -> None:
        """End this process and its workers as soon as the pipe's other end is closed, also while a model still loads.

        Workers of a multi-process executor watch this process only once they have loaded; before that, they would keep their GPUs' memory.
        """
        ended = select.poll()
        ended.register(self._sock, select.POLLRDHUP | select.POLLHUP)
        while not ended.poll(_LOOK_EVERY_S * 1000):
            if self._is_hung():
                self._kill_supervisor()
                break
        end_own_group(0)

    def _is_hung(self) -> bool:
        """Return whether the supervisor has pinged, and then neither sent nor pinged for ``limit_s``."""
        is_over = self._silence.is_over(time.monotonic())
        unread = select.poll()
        unread.register(self._sock, select.POLLIN)
        # Unread bytes count as a sign of life: the reading thread may be busy with a large request.
        if self._end.num_pings != self._num_pings or self._num_pings == 0 or unread.poll(0):
            self._num_pings = self._end.num_pings
            self._silence.heard()
            return False
        return is_over

    def _kill_supervisor(self) -> None:
        """Kill the process that made the pipe. It has not ended: only it has the other end, which was open just now."""
        logger.error(
            "the supervisor process %d did not reach its engine for %.1f s: killing it",
            self._supervisor,
            self._silence.silent_s,
        )
        if self._supervisor == 0:  # of another container; this number would mean our own group
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._supervisor, signal.SIGKILL)
