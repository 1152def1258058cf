"""`lines_per_s` computes how fast lines have to be answered so that each batch ends within its window. Pure."""

from collections.abc import Iterable

from serve_app.batch.records import Batch

_SHARE = 0.9
"""Share of its window in which a batch should get its last answer. The rest is for starts of replicas, and for chats meanwhile."""
_LEAST_S = 60.0
"""A batch that is late, or nearly late, is planned to end in this time: no number of replicas could end it at once."""


def lines_per_s(batches: Iterable[Batch], now: float) -> dict[str, float]:
    """Return model -> the smallest steady pace, in lines a second, that ends every open batch in time.

    The pace is the largest of (lines due by t) / (seconds until t), for each model apart: a batch asks its models beside each other.

    Args:
        batches: Batches that have not ended.
        now: Seconds since 1970.
    """
    due: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        if batch.status != "in_progress" or not batch.total:
            continue
        in_s = max(_LEAST_S, batch.created_at + _SHARE * (batch.expires_at - batch.created_at) - now)
        for model, num_lines in _left(batch).items():
            due.setdefault(model, []).append((in_s, num_lines))
    return {model: _rate(sorted(lines)) for model, lines in due.items()}


def _left(batch: Batch) -> dict[str, float]:
    """Return model -> lines to do. Lines that an older ingress answered are of unknown models, and are shared out among the models."""
    left = {model: float(max(0, num_lines - batch.ended.get(model, 0))) for model, num_lines in batch.lines.items()}
    unknown = max(0, batch.completed + batch.failed - sum(batch.ended.values()))
    known = sum(left.values()) or 1.0
    return {model: max(0.0, 1.0 - unknown / known) * num_lines for model, num_lines in left.items()}


def _rate(due: list[tuple[float, float]]) -> float:
    rate = num_lines = 0.0
    for in_s, more in due:
        num_lines += more
        rate = max(rate, num_lines / in_s)
    return rate
