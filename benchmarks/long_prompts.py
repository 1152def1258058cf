"""This benchmark measures how prompts of 100,000 tokens delay the tokens of short streams in one ingress process.

    python -m benchmarks.long_prompts [--tokens 100000] [--streams 32] [--every 4 1 0] [--rounds 3] [--trees A B]

Short streams run all the time, on the fake engine of `ingress_alone`, which gives each stream a token every 6 ms and computes nothing. So
any delay that a long prompt causes comes from the ingress, and from the cores that client, ingress and fake engine share. Windows without
long prompts alternate with windows that have one every few seconds (0: the next prompt as soon as the previous one has its token).
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.ingress_alone import END, PATHS, WORDS, Ingress, read_answer, started
from serve_app.checkpoints import make_tiny_llama

WINDOW_S = 20.0
MOST_TOKENS = 1 << 17
SETTLE_S = 3.0
SHORT_TOKENS = 900
"""Tokens of a short stream's answer, after which the stream begins again."""
TOKENS_A_WORD = 1.054
"""Tokens per word of the tiny model's tokenizer for these words."""


@dataclass
class Window:
    """One window's measurements: gaps between reads of a stream's tokens, and latencies of long prompts, in seconds."""

    is_open: bool = False
    gaps_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)


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
    """Return the parts of a body; a number is inserted between them, so that no two prompts begin with the same tokens."""
    text = "# " + " ".join(random.Random(1).choices(WORDS, k=round(tokens / TOKENS_A_WORD)))
    asked = {"prompt": text} if kind == "completions" else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"model": "tiny", "stream": True, "max_tokens": 1, **asked}).encode().split(b"#", 1)


async def _window(ingress: Ingress, kind: str, body: Sequence[bytes], streams: int, every_s: float | None) -> str:
    """Return a line with the figures of one window. The window begins when all streams run."""
    window = Window()
    async with asyncio.timeout(120 + WINDOW_S), asyncio.TaskGroup() as clients:
        short = [clients.create_task(_short(ingress.port, window)) for _ in range(streams)]
        await asyncio.sleep(SETTLE_S)
        window.is_open, before_s = True, ingress.cpu_s()
        long = [] if every_s is None else [clients.create_task(_long(ingress.port, kind, body, every_s, window))]
        await asyncio.sleep(WINDOW_S)
        window.is_open, used_s = False, ingress.cpu_s() - before_s
        for task in (*short, *long):
            task.cancel()
    p50, p90, p99, most = np.percentile(np.array(window.gaps_s) * 1e3, [50, 90, 99, 100])
    beside = (
        f"{kind} every {every_s:g} s: {len(window.long_s)}, {np.mean(window.long_s) * 1e3:.0f} ms each"
        if window.long_s
        else "alone"
    )
    return f"{ingress.name}: ITL ms p50 {p50:.2f} p90 {p90:.2f} p99 {p99:.2f} most {most:.1f}, CPU {used_s / WINDOW_S:.2f} | {beside}"


async def _short(port: int, window: Window) -> None:
    """Read streams until cancelled."""
    await asyncio.sleep(random.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = {"model": "tiny", "stream": True, "max_tokens": SHORT_TOKENS, "ignore_eos": True, "prompt": "the cat"}
    while True:
        writer.write(_http("completions", json.dumps(request).encode()))
        last_s, tail = None, b""
        while not tail.endswith(END):
            if not (data := await reader.read(1 << 16)):
                raise RuntimeError("a short stream was cut")
            tail = (tail + data)[-len(END) :]
            if b'"text"' in data:
                now = time.monotonic()
                if last_s is not None and window.is_open:
                    window.gaps_s.append(now - last_s)
                last_s = now


async def _long(port: int, kind: str, body: Sequence[bytes], every_s: float, window: Window) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began_s = time.monotonic()
        writer.write(_http(kind, str(random.random()).encode().join(body)))
        await read_answer(reader, f"a long prompt, {kind}")
        window.long_s.append(time.monotonic() - began_s)
        await asyncio.sleep(began_s + every_s - time.monotonic())


def _http(kind: str, body: bytes) -> bytes:
    head = f"POST {PATHS[kind]} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


if __name__ == "__main__":
    main()
