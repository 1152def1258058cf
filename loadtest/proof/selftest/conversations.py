"""These checks of conversations compare the content and the time of later turns with what they must be."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from loadtest.plan.schedule import read_schedule
from loadtest.proof.selftest.bench import Bench, Observed, Point, judged, ms, poisson
from loadtest.proof.selftest.times import P50_S, P99_S
from loadtest.quantiles import quantile
from loadtest.records import Row, ScheduledRequest

PREFIX_TOKENS = 32
LAW: dict[str, Any] = {"ttft": {"law": "constant", "s": 0.02}, "prompt_token_s": 0.0005, "gap": {"law": "constant", "s": 0.002}}


def t19_conversations(bench: Bench) -> Iterator[Point]:
    """A later turn is sent with all that was said before it, when its user has read and thought.

    The server counts exactly the tokens of the shared prefix, of the turns and of its own answers so far; a turn is due its drawn pause
    after the answer before it, to the microsecond. The law's TTFT grows by 0.5 ms for each token of the prompt; what is seen is off
    from the server's actual one by at most 2 ms at the p50 and 5 ms at the p99.
    """
    conversation = {"turns": {"dist": "uniform", "min": 1, "max": 5}, "think_s": {"mean": 0.2}}
    lengths = {
        "input_tokens": {"dist": "uniform", "min": 4, "max": 40},
        "output_tokens": {"dist": "uniform", "min": 1, "max": 16},
    }
    asked = {"endpoint": "chat", "prompt": "text", "shared_prefix_tokens": PREFIX_TOKENS, "conversation": conversation, **lengths}
    observed = bench.run(LAW, poisson(10, 5 if bench.quick else 30, requests=[asked]))
    chains = list(_chains(observed))
    later = [(before, row) for chain in chains for (_, before), (_, row) in pairwise(chain)]
    wrong = sum(_said(chain, k) != row.prompt_tokens for chain in chains for k, (_, row) in enumerate(chain))
    words = f"{wrong} of {sum(map(len, chains))} prompts wrong, {len(later)} of later turns"
    yield judged("what is sent", words, "0", wrong == 0 and len(later) > 0)
    pauses = {request.id: request.think_s for chain in chains for request, _ in chain}
    off_s = max(abs(row.due_s - (before.end_s or 0.0) - pauses[row.id]) for before, row in later)
    yield judged("when it is due", f"off by {off_s * 1e6:.1f} us at most", "1.5 us", off_s < 1.5e-6)
    ttft_s, token_s = LAW["ttft"]["s"], LAW["prompt_token_s"]
    wrong_s = max(abs((e.scheduled_first_s or 0.0) - ttft_s - token_s * (row.prompt_tokens or 0)) for row, e in observed.pairs)
    yield judged("what it costs", f"off from the law by {wrong_s * 1e6:.1f} us at most", "1.5 us", wrong_s < 1.5e-6)
    p50, p99 = (quantile(np.abs(observed.late_s), q) for q in (0.5, 0.99))
    seen = f"TTFT off by {ms(p50)} {ms(p99)} ms; {observed.lateness()}"
    yield judged("what is seen", seen, "2, 5 ms", p50 <= P50_S and p99 <= P99_S, timing=True)


def _chains(observed: Observed) -> Iterator[list[tuple[ScheduledRequest, Row]]]:
    """Yield the answered turns of each conversation, in order."""
    rows = {row.id: row for row in observed.rows if row.state == "ok"}
    requests = read_schedule(observed.folder / "schedule.jsonl").requests
    following = {request.after: request for request in requests if request.after is not None}
    for first in (request for request in requests if request.after is None):
        chain: list[tuple[ScheduledRequest, Row]] = []
        request: Any = first
        while request is not None and request.id in rows:
            chain.append((request, rows[request.id]))
            request = following.get(request.id)
        yield chain


def _said(chain: list[tuple[ScheduledRequest, Row]], k: int) -> int:
    """Return the number of prompt tokens of turn k of a conversation."""
    asked = sum(request.input_tokens for request, _ in chain[: k + 1])
    return PREFIX_TOKENS + asked + sum(request.output_tokens for request, _ in chain[:k])
