"""`time_of_schedulers` puts the engines' schedulers on another clock than the machine's."""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class Clock(Protocol):
    """What our schedulers use of the module `time`."""

    def monotonic(self) -> float:
        """Return the seconds since some moment."""


@contextlib.contextmanager
def time_of_schedulers(clock: Clock) -> Iterator[None]:
    """Let our schedulers read the clock's time where they would read the machine's."""
    from serve_app.replica import hand_over, scheduler

    modules: tuple[Any, ...] = hand_over, scheduler
    before = [module.time for module in modules]
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module, time in zip(modules, before, strict=True):
            module.time = time
