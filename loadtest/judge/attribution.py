"""This module splits an answer's time: the client's clock gives the whole, server sums its parts, and named residuals the rest.

Pure. TTFT from the due time = lag + connect + queue + prefill + edge; the rest of the answer = decode + flush. Edge and flush are
residuals, which no server series covers: network, proxies, routers, queues before the engine, writing out. They are never spread
over the other parts, and are negative if the server's sums and the client's rows are not of the same requests.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from loadtest.records import Row, ServerSample

PARTS = ("queue_s", "prefill_s", "decode_s")
COUNTERS = tuple(f"{part}_{kind}" for part in PARTS for kind in ("sum", "count"))


class Attribution(msgspec.Struct, frozen=True, omit_defaults=True):
    """Means in seconds per request over ``window_s``: the times of the two scrapes whose sums are compared."""

    window_s: tuple[float, float]
    num_client: int
    """Rows that ended successfully between the scrapes."""
    num_server: float
    """Requests that the server counted between them."""
    lag_s: float
    connect_s: float
    queue_s: float
    prefill_s: float
    edge_s: float
    decode_s: float
    flush_s: float
    ttft_s: float
    """Measured by the client from the due time, like ``e2e_s``: the sum of the first five parts; ``e2e_s`` is the sum of all seven."""
    e2e_s: float

    def parts(self) -> dict[str, float]:
        """Return the parts in the order of time; their sum is ``e2e_s``."""
        names = ("lag_s", "connect_s", "queue_s", "prefill_s", "edge_s", "decode_s", "flush_s")
        return {name.removesuffix("_s"): getattr(self, name) for name in names}


def attribution(samples: Sequence[ServerSample], rows: Sequence[Row], window: tuple[float, float]) -> Attribution | None:
    """Return the parts between the first and last scrape in the window; None: too few scrapes, parts or answers, or a sum fell.

    A server counts an answer at its end, so both sides use the answers that ended between the scrapes. Choose a window that begins and
    ends with an idle server, or that is much longer than an answer: an answer that ends during a scrape may be on one side only.

    A sum falls when a replica leaves or restarts, or when several ingresses share the address: the sum then covers other requests.
    """
    inside = [s for s in samples if window[0] <= s.t_s <= window[1] and all(name in s.values for name in COUNTERS)]
    if len(inside) < 2 or any(b.values[name] < a.values[name] for a, b in pairwise(inside) for name in COUNTERS):
        return None
    first, last = inside[0], inside[-1]
    count = last.values["queue_s_count"] - first.values["queue_s_count"]
    ended = [
        (row, row.sent_s, row.first_s, row.end_s)
        for row in rows
        if row.state == "ok" and row.sent_s is not None and row.first_s is not None and row.end_s is not None
        if first.t_s < row.end_s <= last.t_s
    ]
    if count <= 0 or not ended:
        return None
    queue_s, prefill_s, decode_s = (_mean(first, last, part) for part in PARTS)
    num = len(ended)
    lag_s = sum(sent_s - row.due_s for row, sent_s, _, _ in ended) / num
    connect_s = sum((row.connected_s or sent_s) - sent_s for row, sent_s, _, _ in ended) / num
    ttft_s = sum(first_s - row.due_s for row, _, first_s, _ in ended) / num
    e2e_s = sum(end_s - row.due_s for row, _, _, end_s in ended) / num
    return Attribution(
        window_s=(first.t_s, last.t_s), num_client=num, num_server=count,
        lag_s=lag_s, connect_s=connect_s, queue_s=queue_s, prefill_s=prefill_s,
        edge_s=ttft_s - lag_s - connect_s - queue_s - prefill_s,
        decode_s=decode_s, flush_s=e2e_s - ttft_s - decode_s, ttft_s=ttft_s, e2e_s=e2e_s,
    )  # fmt: skip


def _mean(first: ServerSample, last: ServerSample, part: str) -> float:
    count = last.values[f"{part}_count"] - first.values[f"{part}_count"]
    return (last.values[f"{part}_sum"] - first.values[f"{part}_sum"]) / count if count > 0 else 0.0
