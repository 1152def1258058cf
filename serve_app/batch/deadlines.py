"""How fast lines have to be answered so that each batch ends within its window. Pure."""

from collections.abc import Iterable

from serve_app.batch.records import Batch

_SHARE = 0.9
"""Of its window, in which a batch should have its last answer: the rest is for starts of replicas, and for chats that come meanwhile."""
_LEAST_S = 60.0
"""A batch that is late, or nearly so, is to end within this time: in no time at all no number of replicas could."""


def lines_per_s(batches: Iterable[Batch], now: float) -> dict[str, float]:
    """Return model -> the least steady pace, in lines a second, that ends every open batch in time.

    That is the largest of (lines due by t) / (seconds until t). What is left of a batch counts as the same share of each of its models:
    how many lines of each are answered is not recorded.

    Args:
        batches: Those that have not ended.
        now: Seconds since 1970.
    """
    due: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        if batch.status != "in_progress" or not batch.total:
            continue
        left = max(0.0, 1.0 - (batch.completed + batch.failed) / batch.total)
        in_s = max(_LEAST_S, batch.created_at + _SHARE * (batch.expires_at - batch.created_at) - now)
        for model, num_lines in batch.lines.items():
            due.setdefault(model, []).append((in_s, left * num_lines))
    return {model: _rate(sorted(lines)) for model, lines in due.items()}


def _rate(due: list[tuple[float, float]]) -> float:
    rate = num_lines = 0.0
    for in_s, more in due:
        num_lines += more
        rate = max(rate, num_lines / in_s)
    return rate
