"""`ended_by_signals` lets SIGINT and SIGTERM end a command that still starts Ray, at once and from a thread.

The main thread may wait in Ray's C++ code for seconds, until the raylet has registered. Python runs no handler of signals meanwhile.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """While the block runs, let the first SIGINT or SIGTERM call ``end`` in a thread. ``end`` ends the process, and does not return.

    The signal also interrupts the block, so that it starts nothing more; then the main thread waits for the end of the process. After the
    block both signals raise KeyboardInterrupt.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def wait_for_signal() -> None:
        with reading:
            while number := reading.recv(1):
                if number[0] in _ENDING:
                    end()

    waiting = threading.Thread(target=wait_for_signal, daemon=True)
    _handle(signal.default_int_handler)
    before = signal.set_wakeup_fd(writing.fileno())
    waiting.start()
    try:
        yield
    finally:
        _handle(signal.SIG_IGN)  # a second signal would interrupt the wait for what the first one ends
        signal.set_wakeup_fd(before)
        writing.close()
        waiting.join()
        _handle(signal.default_int_handler)


def _handle(handler: signal.Handlers | Callable[..., object]) -> None:
    for number in _ENDING:
        signal.signal(number, handler)
