"""This benchmark measures how exactly several ingresses keep a tenant's quotas together, also while one of them is killed.

    python -m benchmarks.quotas [--minutes 5] [--port 8094] [--out results/quotas.json]

``make bench-tenants`` starts three ingresses and two simulated accelerators. Clients of three tenants send three times the quota of
each, on a new connection for each request, so that the kernel spreads them over the ingresses. The clients of one send no ``max_tokens``:
its answers end by chance, after 20 tokens in the mean. After two minutes one ingress is killed, and Ray Serve starts another. A request
counts at the moment at which its client sends it, its tokens when they come. The table shows the most that ran in any 60 seconds beside the
quota, and how much ran in all beside what the same demand gets from an exact count.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.processes import fleet, ingresses_of
from benchmarks.quota_load import at_times, authorization, client, config_of, exact, most_in_a_minute
from tests.doubles.fleet import MODEL

INGRESSES = 3
PROMPT, ANSWER = 20, 20
REQUESTS, TOKENS = 600, 24_000
"""Quotas a minute of the two tenants: 10 requests, and 10 x (20 + 20) tokens, a second."""
EXCESS = 3.0
"""The demand, as a multiple of the quota."""
KILL_AFTER_S = 120.0
VOCABULARY = 1024
STOPS = list(range(0, VOCABULARY, ANSWER))
"""Where a request has no ``max_tokens``: each token ends the answer with probability 1 / `ANSWER`."""


@dataclass
class Side:
    """One tenant: what its clients were given."""

    name: str
    quota: str
    limit: int
    amounts: list[tuple[float, int]] = field(default_factory=list)
    """When how much of the quota was used."""
    has_max_tokens: bool = True
    statuses: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        return sum(amount for _, amount in self.amounts)


async def ask(http: httpx.AsyncClient, url: str, side: Side) -> None:
    """Send a request and note what it used."""
    prompt = [random.randrange(5, VOCABULARY) for _ in range(PROMPT)]
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "ignore_eos": True, "stream": True}
    body |= {"max_tokens": ANSWER} if side.has_max_tokens else {"max_tokens": None, "stop_token_ids": STOPS}
    sent_at = time.monotonic()
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body, headers=authorization(side.name)) as answer:
            side.statuses[str(answer.status_code)] += 1
            if answer.status_code != 200:
                return
            side.amounts.append((sent_at, 1 if side.quota == "requests_per_minute" else PROMPT))
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and side.quota == "tokens_per_minute":
                    side.amounts.append((time.monotonic(), 1))
    except httpx.HTTPError as exc:
        side.statuses[type(exc).__name__] += 1


async def load(url: str, side: Side, rate: float, seconds: float) -> list[float]:
    """Send requests at the rate; return when each was sent."""
    async with client() as http:
        return await at_times([i / rate for i in range(int(seconds * rate))], lambda _: ask(http, url, side))


async def kill_one(ingresses: list[psutil.Process]) -> None:
    await asyncio.sleep(KILL_AFTER_S)
    ingresses[0].kill()
    print(f"ingress {ingresses[0].pid} killed", flush=True)


async def play(url: str, ingresses: list[psutil.Process], seconds: float) -> dict[str, Any]:
    sides = [
        Side("by-requests", "requests_per_minute", REQUESTS),
        Side("by-tokens", "tokens_per_minute", TOKENS),
        Side("without-max-tokens", "tokens_per_minute", TOKENS, has_max_tokens=False),
    ]
    killing = asyncio.create_task(kill_one(ingresses))
    demands = await asyncio.gather(*(load(url, side, EXCESS * REQUESTS / 60, seconds) for side in sides))
    killing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await killing
    rows = {}
    for side, demand in zip(sides, demands, strict=True):
        amount = 1 if side.quota == "requests_per_minute" else PROMPT + ANSWER
        if not side.has_max_tokens:
            amount = round(side.total() / side.statuses["200"])
        rows[side.name] = {
            "quota": side.quota,
            "limit": side.limit,
            "most_in_60_s": most_in_a_minute(side.amounts),
            "total": side.total(),
            "total_of_an_exact_count": exact([(at, amount) for at in demand], side.limit),
            "answers": dict(side.statuses),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--port", type=int, default=8094)
    parser.add_argument("--out", type=Path, default=Path("results/quotas.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = {"tokens_per_minute": TOKENS}
        limits = {"by-requests": {"requests_per_minute": REQUESTS}, "by-tokens": tokens, "without-max-tokens": tokens}
        config = config_of(folder, arguments.port, ingresses=INGRESSES, limits=limits)
        with fleet(config, folder) as (url, root):
            rows = asyncio.run(play(url, ingresses_of(root), 60 * arguments.minutes))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1))
    print(
        "| tenant | quota | limit | most in 60 s | error | in all, of an exact count | answers |\n|---|---|---|---|---|---|---|"
    )
    for tenant, row in rows.items():
        error, part = row["most_in_60_s"] / row["limit"] - 1, row["total"] / row["total_of_an_exact_count"]
        print(
            f"| {tenant} | {row['quota']} | {row['limit']} | {row['most_in_60_s']} | {100 * error:+.1f} % | {100 * part:.1f} % "
            f"| {row['answers']} |"
        )


if __name__ == "__main__":
    main()
