"""This module judges whether prefill and decode apart pay, from the figures of `Comparison`. Pure.

Goodput alone decides: who wants shorter gaps between tokens gives a lower limit for them, and then they count.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.planning.comparison import Figures

MIN_GAIN = 1.05
"""Apart pays if its goodput is more than so many times that of together, with each seed."""
_AS_GOOD = 0.98
"""A side with this share of the best goodput counts as the best one, too."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether apart pays, the best of its sides, and both as a sentence."""

    pays: bool
    best: str
    sentence: str


def verdict(found: Mapping[str, Sequence[Figures]]) -> Verdict:
    """Judge the figures of the sides, one for each seed. The first side is together, the second `routing.apart`."""
    together, apart, *_ = found
    better = {name: _better(runs, found[together]) for name, runs in found.items() if name != together}
    paying = [name for name, seeds in better.items() if all(seeds)]
    best = _best({name: found[name] for name in paying or better}, apart)

    def middle(of: Callable[[Figures], float]) -> tuple[float, float]:
        return median(found[together], of), median(found[best], of)

    good = middle(lambda each: each.good_per_s)
    offered = median(found[together], lambda each: each.requests_per_s)
    amounts = f"{good[1]:.1f} good requests/s of {offered:.1f}, together {good[0]:.1f}"
    share = f"{100 * good[1] / good[0]:.0f} % of the goodput ({amounts})" if good[0] else amounts
    gaps = _change("ITL p99", *middle(lambda each: each.itl_p99_s))
    waits = _change("TTFT p99", *middle(lambda each: each.ttft_p99_s))
    doubt = ", but not with every seed" if any(better[best]) and not paying else ""
    pays = "pays" if paying else "does not pay"
    if not good[1] and not good[0]:
        sentence = f"Apart does not pay: no answer keeps the limits either way; {gaps}, {waits}."
    else:
        sentence = f"Apart {pays}, at best as {best}: {share}{doubt}; {gaps}, {waits}."
    return Verdict(bool(paying), best, sentence)


def _better(runs: Sequence[Figures], together: Sequence[Figures]) -> list[bool]:
    """Return for each seed whether the goodput is so much higher that it pays."""
    return [one.good_per_s > MIN_GAIN * other.good_per_s for one, other in zip(runs, together, strict=True)]


def _best(found: Mapping[str, Sequence[Figures]], apart: str) -> str:
    """Return the side of most goodput. If several have about as much: `routing.apart`, which has no number to set, or the shortest gaps."""
    goods = {name: median(each, lambda run: run.good_per_s) for name, each in found.items()}
    near = [name for name, good in goods.items() if good >= _AS_GOOD * max(goods.values())]
    return apart if apart in near else min(near, key=lambda name: median(found[name], lambda run: run.itl_p99_s))


def median(runs: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    return statistics.median(map(of, runs))


def shown_s(seconds: float) -> str:
    """Return a time like `6.4 ms`, `480 ms` or `2.31 s`."""
    if seconds < 1.0:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    return f"{seconds:.2f} s" if seconds < 10.0 else f"{seconds:.0f} s"


def _change(name: str, before_s: float, after_s: float) -> str:
    before, after = shown_s(before_s), shown_s(after_s)
    if before == after:
        return f"{name} stays at {before}"
    return f"{name} {'falls' if after_s < before_s else 'rises'} from {before} to {after}"
