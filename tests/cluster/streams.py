"""This script sends endless chats from a pod of the cluster, to show what a client sees while pods come and go.

    python -c "$(cat streams.py)" URL MODEL STREAMS TOKENS

STREAMS clients ask the same question, greedily, again and again, until standard input ends; what runs then is finished. Each
client has a cache salt of its own, so that no engine has its KV of another's. Prints `started` once every client has a first token, and
at the end one JSON line. $API_KEY is the key. The pod has httpx, but no tests.
A client whose request failed sleeps before it asks again, as clients do; nothing else would slow a loop of failures down.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

QUESTION = "Tell me a story that does not end."
ANSWER_LIMIT_S = 600.0
PAUSE_AFTER_FAILURE_S = 0.5


@dataclass
class Client:
    """One client with connections of its own, as if it were another machine."""

    http: httpx.AsyncClient
    body: dict[str, Any]
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    """The outcome of each request, and its text or its error."""
    longest_gap_s: float = 0.0
    """Between two lines of a stream."""

    async def ask_until(self, stop: asyncio.Event) -> None:
        """Ask again and again."""
        while not stop.is_set():
            self.outcomes.append(outcome := await self._ask())
            if outcome[0] != "complete":
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _ask(self) -> tuple[str, str]:
        text = ""
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=self.body) as response:
                if response.status_code != 200:
                    return f"refused with {response.status_code}", (await response.aread()).decode()
                received_at = time.monotonic()
                async for line in response.aiter_lines():
                    now = time.monotonic()
                    self.longest_gap_s, received_at = max(self.longest_gap_s, now - received_at), now
                    if line == "data: [DONE]":
                        return "complete", text
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            return "ended by an error event", line
                        text += event["choices"][0]["delta"].get("content") or ""
                        self.first_token.set()
            return "truncated", f"the body ended after {text!r}"
        except httpx.HTTPError as exc:
            return "truncated" if text else "not answered", repr(exc)


async def main(url: str, model: str, streams: int, tokens: int) -> None:
    """Run until standard input ends, then print the sums."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get("API_KEY")) else {}
    bodies = [{**body, "cache_salt": f"client {number}"} for number in range(streams)]
    clients = [Client(httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S, headers=headers), body) for body in bodies]
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.ask_until(stop))
        for client in clients:
            await client.first_token.wait()
        print("started", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
    outcomes = [outcome for client in clients for outcome in client.outcomes]
    sums = {
        "counts": Counter(outcome for outcome, _ in outcomes),
        "others": [f"{outcome}: {detail[:300]}" for outcome, detail in outcomes if outcome != "complete"][:20],
        "num_texts": len({text for outcome, text in outcomes if outcome == "complete"}),
        "longest_gap_s": max(client.longest_gap_s for client in clients),
    }
    print(json.dumps(sums))


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
