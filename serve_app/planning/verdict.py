"""This module judges whether prefill and decode apart pay, from the figures of `Comparison`. Pure.

Goodput alone decides: who wants shorter gaps between tokens gives a lower limit for them, and then they count.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.planning.comparison import APART, KEEP_ITL, TOGETHER, Figures

MIN_GAIN = 1.05
"""Apart pays if its goodput is more than so many times that of each side without moves, with each seed."""
_UNMOVED = TOGETHER, KEEP_ITL
_AS_GOOD = 0.98
"""A side with this share of the best goodput counts as the best one, too."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether apart pays, the best of its sides, and both as a sentence."""

    pays: bool
    best: str
    set: str | None
    """The side to set: the best one apart if it pays, else `keep_itl` if that has a higher goodput than together, else None."""
    sentence: str


def verdict(found: Mapping[str, Sequence[Figures]]) -> Verdict:
    """Judge the figures of the sides, one for each seed. A side pays if it is better than each of `_UNMOVED`."""
    unmoved = [name for name in _UNMOVED if name in found]
    better = {
        name: [all(seed) for seed in zip(*(_better(runs, found[other]) for other in unmoved), strict=True)]
        for name, runs in found.items()
        if name not in unmoved
    }
    paying = [name for name, seeds in better.items() if all(seeds)]
    best = _best({name: found[name] for name in paying or better}, APART)
    together = _best({name: found[name] for name in unmoved}, TOGETHER)
    kept = KEEP_ITL if together == KEEP_ITL and all(_better(found[KEEP_ITL], found[TOGETHER])) else None

    def middle(of: Callable[[Figures], float]) -> tuple[float, float]:
        return median(found[together], of), median(found[best], of)

    good = middle(lambda each: each.good_per_s)
    offered = median(found[together], lambda each: each.requests_per_s)
    amounts = f"{good[1]:.1f} good requests/s of {offered:.1f}, {together} {good[0]:.1f}"
    share = f"{100 * good[1] / good[0]:.0f} % of the goodput ({amounts})" if good[0] else amounts
    gaps = _change("ITL p99", *middle(lambda each: each.itl_p99_s))
    waits = _change("TTFT p99", *middle(lambda each: each.ttft_p99_s))
    doubt = ", but not with every seed" if any(better[best]) and not paying else ""
    pays = "pays" if paying else "does not pay"
    if not good[1] and not good[0]:
        sentence = f"Apart does not pay: no answer keeps the limits either way; {gaps}, {waits}."
    else:
        sentence = f"Apart {pays}, at best as {best}: {share}{doubt}; {gaps}, {waits}."
    return Verdict(bool(paying), best, best if paying else kept, sentence)


def _better(runs: Sequence[Figures], others: Sequence[Figures]) -> list[bool]:
    """Return for each seed whether the goodput is so much higher that it pays."""
    return [one.good_per_s > MIN_GAIN * other.good_per_s for one, other in zip(runs, others, strict=True)]


def _best(found: Mapping[str, Sequence[Figures]], first: str) -> str:
    """Return the side of most goodput. If several have about as much: ``first``, which is the easiest to set, or the shortest gaps."""
    goods = {name: median(each, lambda run: run.good_per_s) for name, each in found.items()}
    near = [name for name, good in goods.items() if good >= _AS_GOOD * max(goods.values())]
    return first if first in near else min(near, key=lambda name: median(found[name], lambda run: run.itl_p99_s))


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
