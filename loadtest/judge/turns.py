"""The figures of a run with conversations, turn by turn: how the time to the first token grows with what was said before. Pure."""

import numpy as np

from loadtest.judge.columns import NONE, Bools
from loadtest.judge.summary import Turn
from loadtest.judge.window import Window
from loadtest.quantiles import Floats, quantile


def turns_of(items: Window) -> list[Turn]:
    """Return a line per turn, the first one first; nothing of a run without conversations."""
    numbers = items.records.requests.turn[items.request]
    if not items.records.scenario.has_conversations:
        return []
    return [_turn(number, items, numbers == number) for number in np.unique(numbers).tolist()]


def _turn(number: int, items: Window, is_its: Bools) -> Turn:
    rows = items.records.columns
    index = items.row[is_its & (items.row >= 0)]
    bounds = items.bounds("ttft")
    waits = bounds.high[is_its[bounds.has]]
    told = rows.prompt_tokens[index]
    told = told[told != NONE]
    return Turn(
        number=number + 1,
        n=int(is_its.sum()),
        num_failed=int(is_its.sum()) - int(rows.is_state("ok", "cancelled")[index].sum()),
        prompt_tokens=round(float(told.mean()), 1) if told.size else None,
        ttft_p50_s=_finite(waits, 0.5),
        ttft_p95_s=_finite(waits, 0.95),
    )


def _finite(values: Floats, q: float) -> float | None:
    value = quantile(values, q) if values.size else np.inf
    return float(value) if np.isfinite(value) else None
