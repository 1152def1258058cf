"""A clock of the time of day that no change of the machine's time moves."""

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Return a function that returns seconds since 1970: the time of day now, and what passes from now on by the monotonic clock."""
    began_at = time.time() - time.monotonic()
    return lambda: began_at + time.monotonic()
