"""Chats that never stop, run inside a pod of the cluster: what a client sees while pods come and go. Prints one JSON line.

    python - URL MODEL STREAMS TOKENS STOP_FILE < streams.py

STREAMS clients ask the same question, greedily, again and again, until STOP_FILE exists; what runs then is finished. A line
`started` is printed once every client has its first token. The key is read from $API_KEY. Only httpx is imported: the pod has no tests.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

QUESTION = "Tell me a story that does not end."
ANSWER_LIMIT_S = 300.0
PAUSE_AFTER_REFUSAL_S = 0.5


async def ask(http: httpx.AsyncClient, body: dict[str, Any], first_token: asyncio.Event) -> tuple[str, str]:
    """Return (outcome, text): complete, refused (before the first byte), truncated, or error with its reason."""
    text, last = "", time.monotonic()
    longest_gap_s = 0.0
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"refused {response.status_code}", (await response.aread()).decode()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                longest_gap_s, last = max(longest_gap_s, now - last), now
                if line == "data: [DONE]":
                    return "complete", text
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"error {event['error'].get('type')}", line
                text += event["choices"][0]["delta"].get("content") or ""
                if text:
                    first_token.set()
        return "truncated: the body ended", text
    except httpx.ConnectError as exc:
        return "refused connection", repr(exc)
    except httpx.HTTPError as exc:
        return f"truncated: {type(exc).__name__}" if text else f"failed: {type(exc).__name__}", repr(exc)
    finally:
        longest_gaps.append(longest_gap_s)


longest_gaps: list[float] = []


async def client(body: dict[str, Any], stop: Path, first_token: asyncio.Event, outcomes: list[tuple[str, str]]) -> None:
    """One client: its own connections, as if it were another machine."""
    url, key = sys.argv[1], os.environ.get("API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S, headers=headers) as http:
        while not stop.exists():
            outcome = await ask(http, body, first_token)
            outcomes.append(outcome)
            if outcome[0] != "complete":
                await asyncio.sleep(PAUSE_AFTER_REFUSAL_S)


async def main() -> None:
    """Run until the stop file appears, then print the sums."""
    model, streams, tokens, stop = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    stop.unlink(missing_ok=True)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
    }
    outcomes: list[tuple[str, str]] = []
    started = [asyncio.Event() for _ in range(streams)]
    async with asyncio.TaskGroup() as clients:
        for event in started:
            clients.create_task(client(body, stop, event, outcomes))
        for event in started:
            await event.wait()
        print("started", flush=True)
    texts = {text for outcome, text in outcomes if outcome == "complete"}
    others = [f"{outcome}: {detail[:300]}" for outcome, detail in outcomes if outcome != "complete"]
    counts = Counter(outcome for outcome, _ in outcomes)
    print(json.dumps({"counts": counts, "others": others[:20], "texts": len(texts), "longest_gap_s": max(longest_gaps)}))


asyncio.run(main())
