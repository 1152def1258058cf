"""This module computes the classes from which a scenario draws requests at a time. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from loadtest.plan.laws import Arrival, Burst, Closed


class Timed(Protocol):
    """A class of requests. A protocol, because scenario.py, which defines `RequestClass`, imports this module."""

    @property
    def name(self) -> str: ...
    @property
    def from_s(self) -> float: ...
    @property
    def until_s(self) -> float | None: ...


def is_drawn(cls: Timed, at_s: float) -> bool:
    """Whether the class may be drawn for a request that is due at this time."""
    return cls.from_s <= at_s and (cls.until_s is None or at_s < cls.until_s)


def changes_s(classes: Sequence[Timed]) -> list[float]:
    """Return the times after 0 at which a class begins or ends: sorted, without duplicates."""
    return sorted({at_s for cls in classes for at_s in (cls.from_s, cls.until_s) if at_s})


def classes_from(classes: Sequence[Timed], *, duration_s: float) -> dict[float, str]:
    """Return, by the time of each change, the names of the classes that are drawn from then on."""
    return {
        at_s: ", ".join(cls.name for cls in classes if is_drawn(cls, at_s)) for at_s in changes_s(classes) if at_s < duration_s
    }


def first_time_key(classes: Sequence[Timed]) -> str:
    """Return the path of the first `from_s` or `until_s` that a class sets, such as `requests.1.from_s`; empty if none does."""
    given = (
        f"requests.{number}.{key}" for number, cls in enumerate(classes) for key in ("from_s", "until_s") if getattr(cls, key)
    )
    return next(given, "")


def check_times(classes: Sequence[Timed], arrival: Arrival, *, duration_s: float) -> None:
    """Check that each class is drawn at some time, and that each request finds a class, whenever it is due.

    Raises:
        ValueError: A class ends before it begins, or begins after the arrivals have ended; a time in [0, duration_s) has no class;
            or the law gives requests no times.
    """
    for number, cls in enumerate(classes):
        if cls.until_s is not None and cls.until_s <= cls.from_s:
            found = f"requests.{number}.until_s {_exact(cls.until_s)} is not after from_s {_exact(cls.from_s)}"
            raise ValueError(f"{found}; raise until_s, or leave one of them out")
    if isinstance(arrival, Burst | Closed):
        if key := first_time_key(classes):
            raise ValueError(
                f"{key} does nothing with arrival.law {arrival.law}; take one with a rate, such as poisson, or leave it out"
            )
        return
    for number, cls in enumerate(classes):
        if cls.from_s >= duration_s > 0:
            found = f"requests.{number}.from_s {_exact(cls.from_s)} is not before duration_s {_exact(duration_s)}"
            raise ValueError(f"{found}, so the class is never drawn; lower from_s, raise duration_s, or leave the class out")
    edges_s = [0.0, *(at_s for at_s in changes_s(classes) if at_s < duration_s), duration_s]
    for begin_s, end_s in pairwise(edges_s):
        if not any(is_drawn(cls, begin_s) for cls in classes):
            if not duration_s:
                raise ValueError("duration_s 0 leaves no time in which a class is drawn; raise it")
            found = f"requests: no class is drawn from {_exact(begin_s)} s to {_exact(end_s)} s, and duration_s is {_exact(duration_s)}"
            raise ValueError(f"{found}; lower a from_s or raise an until_s, so that each time has a class")


def _exact(at_s: float) -> str:
    """Return the time with all digits, so that different times look different."""
    return repr(at_s).removesuffix(".0")
