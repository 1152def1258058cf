"""This module computes figures for groups of a run's requests: for each turn of conversations, and for each class. Pure."""

from typing import Any

import numpy as np

from loadtest.judge.columns import NONE, Bools
from loadtest.judge.summary import ClassOfRequests, Turn
from loadtest.judge.window import Window
from loadtest.quantiles import Floats, quantile


def turns_of(items: Window) -> list[Turn]:
    """Return the figures of each turn, in order; empty for a run without conversations."""
    numbers = items.records.requests.turn[items.request]
    if not items.records.scenario.has_conversations:
        return []
    return [Turn(number=number + 1, **_figures(items, numbers == number)) for number in np.unique(numbers).tolist()]


def classes_of(items: Window) -> list[ClassOfRequests]:
    """Return the figures of each class, in the scenario's order; empty if there is only one class."""
    requests, records = items.records.requests, items.records
    if len(records.scenario.requests) == 1:
        return []
    which = np.array(requests.classes)[requests.cls[items.request]]
    return [
        ClassOfRequests(name=cls.name, model=cls.model or records.manifest.model, **_figures(items, which == cls.name))
        for cls in records.scenario.requests
    ]


def _figures(items: Window, is_its: Bools) -> dict[str, Any]:
    """Return the fields of `loadtest.judge.summary.Group`."""
    rows = items.records.columns
    index = items.row[is_its & (items.row >= 0)]
    bounds = items.bounds("ttft")
    waits = bounds.high[is_its[bounds.has]]
    told = rows.prompt_tokens[index]
    told = told[told != NONE]
    limits = items.records.scenario.slo.limits
    return {
        "n": int(is_its.sum()),
        "num_failed": int(is_its.sum()) - int(rows.is_state("ok", "cancelled")[index].sum()),
        "prompt_tokens": round(float(told.mean()), 1) if told.size else None,
        "ttft_p50_s": _finite(waits, 0.5),
        "ttft_p95_s": _finite(waits, 0.95),
        "num_good": int(items.good(limits)[is_its].sum()) if limits else None,
    }


def _finite(values: Floats, q: float) -> float | None:
    value = quantile(values, q) if values.size else np.inf
    return float(value) if np.isfinite(value) else None
