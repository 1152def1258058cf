"""What prompts of 100,000 tokens do to the time between tokens of short streams, in one ingress process.

    python -m benchmarks.long_prompts [--tokens 100000] [--streams 32] [--every 4 1 0] [--rounds 3] [--trees A B]

Short streams run all the time, in front of the fake engine of `ingress_alone`, which gives each of them a token every 6 ms and computes
nothing: so all that a long prompt costs them is the ingress's doing, and that of the cores which client, ingress and fake engine share.
Windows without long prompts and with one every few seconds take turns (0: the next as soon as the one before has its token).
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.ingress_alone import PATHS, WORDS, Ingress, started
from serve_app.checkpoints import make_tiny_llama

WINDOW_S = 20.0
MOST_TOKENS = 1 << 17
SHORT_TOKENS = 900
"""Of an answer of a short stream; then it begins anew."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="of a long prompt")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--every", type=float, nargs="+", default=[4.0, 1.0, 0.0], help="seconds between long prompts")
    parser.add_argument(
        "--kinds", nargs="+", default=["completions", "chat"], choices=["completions", "chat"], help="routes of the long prompts"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path()], help="checkouts to compare; default: this one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_llama(Path(name) / "tiny")
        with started(arguments.trees, model, Path(name), max_tokens=MOST_TOKENS) as ingresses:
            print(", ".join(f"{each.name}: pid {each.pid}" for each in ingresses), flush=True)
            for kind in arguments.kinds:
                for _ in range(arguments.rounds):
                    for ingress in ingresses:
                        for every_s in (None, *arguments.every):
                            body = _body(kind, arguments.tokens)
                            print(uvloop.run(_window(ingress, kind, body, arguments.streams, every_s)), flush=True)


def _body(kind: str, tokens: int) -> list[bytes]:
    """Return parts between which a number goes, so that no two prompts begin alike."""
    text = "# " + " ".join(random.Random(1).choices(WORDS, k=tokens // 2))
    asked = {"prompt": text} if kind == "completions" else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"model": "tiny", "stream": True, "max_tokens": 1, **asked}).encode().split(b"#", 1)


async def _window(ingress: Ingress, kind: str, body: Sequence[bytes], streams: int, every_s: float | None) -> str:
    """Return a line of the figures of one window."""
    gaps: list[float] = []
    until = time.monotonic() + WINDOW_S
    latencies: list[float] = []
    before_s = ingress.cpu_s()
    async with asyncio.timeout(120 + WINDOW_S), asyncio.TaskGroup() as clients:
        for _ in range(streams):
            clients.create_task(_short(ingress.port, until, gaps))
        if every_s is not None:
            clients.create_task(_long(ingress.port, kind, body, every_s, until, latencies))
    used_s = ingress.cpu_s() - before_s
    p50, p90, p99, most = np.percentile(np.array(gaps) * 1e3, [50, 90, 99, 100])
    beside = (
        "alone" if every_s is None else f"{kind} every {every_s:g} s: {len(latencies)}, {np.mean(latencies) * 1e3:.0f} ms each"
    )
    return f"{ingress.name}: ITL ms p50 {p50:.2f} p90 {p90:.2f} p99 {p99:.2f} most {most:.1f}, CPU {used_s / WINDOW_S:.2f} | {beside}"


async def _short(port: int, until: float, gaps: list[float]) -> None:
    """Read streams until then; the gaps between reads of a stream's tokens, in seconds, go into ``gaps``."""
    await asyncio.sleep(random.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = {"model": "tiny", "stream": True, "max_tokens": SHORT_TOKENS, "ignore_eos": True, "prompt": "the cat"}
    while time.monotonic() < until:
        writer.write(_http("completions", json.dumps(request).encode()))
        last_s: float | None = None
        while b"[DONE]" not in (data := await reader.read(1 << 16)):
            if not data:
                raise RuntimeError("a short stream was cut")
            now = time.monotonic()
            if last_s is not None and b'"text"' in data:
                gaps.append(now - last_s)
            last_s = now
    writer.close()


async def _long(port: int, kind: str, body: Sequence[bytes], every_s: float, until: float, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (began_s := time.monotonic()) < until:
        writer.write(_http(kind, str(random.random()).encode().join(body)))
        data = await reader.read(1 << 16)
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{data!r}")
        while b"[DONE]" not in data:
            data = await reader.read(1 << 16)
        latencies.append(time.monotonic() - began_s)
        await asyncio.sleep(began_s + every_s - time.monotonic())
    writer.close()


def _http(kind: str, body: bytes) -> bytes:
    head = f"POST {PATHS[kind]} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


if __name__ == "__main__":
    main()
