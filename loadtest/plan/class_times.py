"""When a scenario draws which of its classes of requests: each from its ``from_s`` on and before its ``until_s``. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from loadtest.plan.laws import Arrival, Burst, Closed


class Timed(Protocol):
    """A class of requests."""

    @property
    def from_s(self) -> float: ...
    @property
    def until_s(self) -> float | None: ...


def is_drawn(cls: Timed, at_s: float) -> bool:
    """Whether the class may be drawn for a request that is due at this time."""
    return cls.from_s <= at_s and (cls.until_s is None or at_s < cls.until_s)


def changes_s(classes: Sequence[Timed]) -> list[float]:
    """Return the times after 0 at which a class begins or ends to be drawn, in order, each once."""
    return sorted({at_s for cls in classes for at_s in (cls.from_s, cls.until_s) if at_s})


def first_key(classes: Sequence[Timed]) -> str:
    """Return the path of the first of the two keys that a scenario gives; empty: all classes are drawn all the time."""
    given = (
        f"requests.{number}.{key}" for number, cls in enumerate(classes) for key in ("from_s", "until_s") if getattr(cls, key)
    )
    return next(given, "")


def check_times(classes: Sequence[Timed], arrival: Arrival, *, duration_s: float) -> None:
    """Check that each request finds a class, whenever it is due.

    Raises:
        ValueError: There is a time in [0, duration_s) without a class, or the law gives requests no times of their own.
    """
    if isinstance(arrival, Burst | Closed):
        if key := first_key(classes):
            raise ValueError(
                f"{key} does nothing with arrival.law {arrival.law}; take one with a rate, such as poisson, or leave it out"
            )
        return
    edges_s = [0.0, *(at_s for at_s in changes_s(classes) if at_s < duration_s), duration_s]
    for begin_s, end_s in pairwise(edges_s):
        if not any(is_drawn(cls, begin_s) for cls in classes):
            found = f"requests: no class is drawn from {begin_s:g} s to {end_s:g} s, and duration_s is {duration_s:g}"
            raise ValueError(f"{found}; lower a from_s or raise an until_s, so that each time has a class")
