"""This module measures the CPU time of one ingress process per request and token, for `python -m benchmarks.overhead --alone`.

Each checkout of ``--trees`` gets its own ingress, with a real link to a fake engine in its own process. All are up all the time, and a real
HTTP client loads them in turn, so that a slow minute of the machine affects all of them. CPU time is that of all threads of the ingress's
process, user + system, by the kernel's clock of the process.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import uvloop

from benchmarks.processes import server

PROGRAM = Path("benchmarks/ingress_process.py")
"""The program, relative to the measured checkout, whose modules it imports."""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "conversations": "/v1/chat/completions"}
"""Paths by kind of request; ``conversations`` are further turns in one of a few conversations of `HISTORY_TOKENS`."""
PROMPT_TOKENS = 64
CONVERSATIONS, MESSAGES, HISTORY_TOKENS = 16, 8, 4000
MAX_TOKENS = 8192
"""Most tokens of prompt and answer together."""
_PORT = 8070
END = b"0\r\n\r\n"
WORDS = ("the", "of", "and", "to", "in", "that", "is", "was", "he", "for", "it", "with", "as", "his", "on", "be", "at", "by")


@dataclass(frozen=True)
class Load:
    """A load of ``requests`` streamed answers of ``tokens`` tokens, ``streams`` at a time, on the route of ``kind``."""

    kind: str
    streams: int
    tokens: int
    requests: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.streams} streams, {self.tokens} tokens"


@dataclass(frozen=True)
class Ingress:
    """One ingress process under test."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        return time.clock_gettime((~self.pid << 3) | 2)  # Linux's number of another process's CPU clock


@contextmanager
def started(trees: Sequence[Path], model: Path, folder: Path, *, max_tokens: int = MAX_TOKENS) -> Iterator[list[Ingress]]:
    """Start an ingress and its engine for each checkout; a prompt and its answer have at most ``max_tokens`` tokens."""
    with ExitStack() as stack:
        folders = ((tree.resolve(), folder / f"tree-{number}") for number, tree in enumerate(trees))
        yield [_start(stack, number, tree, model, own, max_tokens) for number, (tree, own) in enumerate(folders)]


def _start(stack: ExitStack, number: int, tree: Path, model: Path, folder: Path, max_tokens: int) -> Ingress:
    folder.mkdir()
    port = _PORT + number
    env = {"PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    env |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # the tiny model's own limit is 2,048 tokens
    command = [sys.executable, "-P", str(tree / PROGRAM)]
    engine = subprocess.Popen([*command, "engine", str(folder), str(max_tokens)], env={**os.environ, **env}, cwd=tree)
    stack.callback(engine.wait)
    stack.callback(engine.send_signal, signal.SIGKILL)
    ingress = [*command, "ingress", str(port), str(model), str(folder), str(max_tokens)]
    url = f"http://127.0.0.1:{port}/readyz"
    process = stack.enter_context(server(ingress, url, log=folder / "log", environment=env, start_s=300))
    return Ingress(tree.name, port, process.pid)


def measure(ingresses: Sequence[Ingress], loads: Sequence[Load], rounds: int) -> dict[Load, dict[str, list[float]]]:
    """Return, by load and ingress, the CPU microseconds per request of each round, after one round that is not counted."""
    figures: dict[Load, dict[str, list[float]]] = {load: {each.name: [] for each in ingresses} for load in loads}
    for counted in range(rounds + 1):
        for load in loads:
            for ingress in ingresses:
                before = ingress.cpu_s()
                uvloop.run(_ask(ingress.port, load))
                used_s = ingress.cpu_s() - before
                if counted:
                    figures[load][ingress.name].append(used_s / load.requests * 1e6)
    return figures


def table(figures: dict[Load, dict[str, list[float]]]) -> str:
    """Return the Markdown table: median and least over the rounds, and the median over rounds of the ratio to the first tree."""
    rows = ["| load | tree | us/request: median (least) | us/token | x first |", "|---|---|---|---|---|"]
    for load, by_tree in figures.items():
        first = next(iter(by_tree.values()))
        for name, costs in by_tree.items():
            ratio = statistics.median(cost / base for cost, base in zip(costs, first, strict=True))
            median = statistics.median(costs)
            rows.append(f"| {load} | {name} | {median:.0f} ({min(costs):.0f}) | {median / load.tokens:.1f} | {ratio:.3f} |")
    return "\n".join(rows)


async def _ask(port: int, load: Load) -> None:
    numbers = iter(range(load.requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            writer.write(_request(load, number))
            await read_answer(reader, load)
        writer.close()

    async with asyncio.timeout(300), asyncio.TaskGroup() as clients:
        for _ in range(load.streams):
            clients.create_task(client())


@cache
def _history(number: int) -> list[dict[str, str]]:
    texts = (_text(number << 32 | k, HISTORY_TOKENS // MESSAGES) for k in range(MESSAGES))
    return [{"role": "assistant" if k % 2 else "user", "content": text} for k, text in enumerate(texts)]


def _text(seed: int, tokens: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=tokens))


def _request(load: Load, number: int) -> bytes:
    text = _text(number, PROMPT_TOKENS)
    history = _history(number % CONVERSATIONS) if load.kind == "conversations" else []
    asked = {"prompt": text} if load.kind == "completions" else {"messages": [*history, {"role": "user", "content": text}]}
    body = json.dumps({"model": "tiny", "stream": True, "max_tokens": load.tokens, "ignore_eos": True, **asked}).encode()
    head = f"POST {PATHS[load.kind]} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_answer(reader: asyncio.StreamReader, load: object) -> None:
    """Read a whole answer of status 200; raise a RuntimeError that names ``load`` for anything else."""
    start, tail = b"", b""
    while not tail.endswith(END):
        data = await reader.read(1 << 16)
        start = (start + data)[:4096] if len(start) < 4096 else start
        tail = (tail + data)[-64:]
        if not data or not start.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{load}: {start!r}")
    if b"[DONE]" not in tail:
        raise RuntimeError(f"{load}: the answer ends with {tail!r}")
