"""This model computes how a batch slows chats: vLLM's scheduling and the simulated accelerator's law, without processes or clock.

    python -m benchmarks.batch_steps        each way to bound a batch, in a minute: benchmarks/results/batches-beside-chats.md

There is one engine. Chats come by a seeded Poisson law; a batch keeps a fixed number of lines at the engine. The host's time in a step is
left out, so the figures are the same on each machine and under each load; `benchmarks.batch_interference` measures real processes.
"""

import argparse
import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.batch_lines import Lengths, lines, sizes
from serve_app.core.step_budget import Chats, StepBudget
from serve_app.simulated.profiles import PROFILES, Profile
from serve_app.simulated.timing import step_time_s, step_work

NUM_LINES = 5000
RETURN_S = 0.003
"""Time from the last token of a line until the next line is at the engine: HTTP, the journal, and the network for both."""
MAX_SEQS = 256
WARM_UP_S = 10.0
"""Time that is not counted: the batch fills the engine before the first chat comes, and the step budget is not yet measured."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to bound a batch. ``share`` is that of `StepBudget`; None: by priority alone."""

    name: str
    lines: int = 32
    step_tokens: int = 2048
    longest_chunk: int = 0
    """vLLM's ``long_prefill_token_threshold``; 0: none."""
    share: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request at the engine. ``token_at`` has the times of its tokens."""

    is_chat: bool
    came_at: float
    prompt_left: int
    answer_left: int
    context: int = 0
    token_at: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a run: latencies of the chats in seconds, and tokens per second of all prompts and answers."""

    ttft_s: np.ndarray
    itl_s: np.ndarray
    tokens_per_s: float


def chats(rate: float, seconds: float, seed: int = 1) -> list[Sequence]:
    """Return chats like those of `benchmarks.batch_interference`, in the order of arrival; ``rate`` is per second."""
    chance, now, made = random.Random(seed), 0.0, list[Sequence]()
    while (now := now + chance.expovariate(rate)) < seconds:
        answer = min(192, max(1, round(chance.expovariate(1 / 48))))
        made.append(Sequence(True, now, chance.randint(16, 256), answer))
    return made


class Engine:
    """An engine that schedules as vLLM does with priorities: running requests, queued chats, then lines. The KV cache has room for all."""

    def __init__(self, profile: Profile, way: Way) -> None:
        self.now, self.tokens = 0.0, 0
        self.running: list[Sequence] = []
        self.queue: list[tuple[bool, float, int, Sequence]] = []
        self._profile, self._way = profile, way
        self._budget = None if way.share is None else StepBudget(way.share, way.step_tokens)
        self._count = 0

    def add(self, sequence: Sequence) -> None:
        self._count += 1
        heapq.heappush(self.queue, (not sequence.is_chat, sequence.came_at, self._count, sequence))

    def step(self) -> list[Sequence]:
        """Make one step; return the requests that ended with it."""
        wants = self._chats()
        plan = None if self._budget is None else self._budget.plan(wants, now=self.now)
        left = self._way.step_tokens if plan is None else plan.max_tokens
        max_answers = None if plan is None else plan.max_answers
        if plan is not None:
            self.running.sort(key=lambda s: not s.is_chat)
        given = list[tuple[Sequence, int]]()
        for sequence in self.running:
            if not sequence.is_chat and max_answers is not None:
                if sequence.prompt_left or max_answers == 0:
                    continue
                max_answers -= 1
            left = self._give(sequence, left, given)
        while left and self.queue and len(self.running) < MAX_SEQS:
            sequence = heapq.heappop(self.queue)[-1]
            self.running.append(sequence)
            left = self._give(sequence, left, given)
        step_s = step_time_s(self._profile, step_work([s.context for s, _ in given], [n for _, n in given]))
        self.now += step_s
        if self._budget is not None:
            self._budget.learn(wants, sum(n for s, n in given if not s.is_chat), step_s)
        return self._after(given)

    def _chats(self) -> Chats:
        running = [s for s in self.running if s.is_chat]
        queued = [s.prompt_left for *_, s in self.queue if s.is_chat]
        return Chats(
            is_any=bool(running or queued),
            answers=sum(not s.prompt_left for s in running),
            prompts=sum(s.prompt_left for s in running),
            queued_prompts=sum(queued),
        )

    def _give(self, sequence: Sequence, left: int, given: list[tuple[Sequence, int]]) -> int:
        wanted = sequence.prompt_left or 1
        count = min(left, wanted, self._way.longest_chunk or wanted)
        if count:
            given.append((sequence, count))
        return left - count

    def _after(self, given: list[tuple[Sequence, int]]) -> list[Sequence]:
        ended = []
        for sequence, count in given:
            self.tokens += count
            sequence.context += count
            sequence.prompt_left = max(0, sequence.prompt_left - count)
            if sequence.prompt_left:
                continue
            sequence.token_at.append(self.now)
            sequence.answer_left -= 1
            if sequence.answer_left == 0:
                ended.append(sequence)
        self.running = [s for s in self.running if s.answer_left]
        return ended


def _lines() -> Iterator[tuple[int, int]]:
    made = [sizes(line) for line in lines(NUM_LINES, Lengths())]
    while True:
        yield from made


def play(profile: Profile, way: Way, *, rate: float, seconds: float) -> Found:
    """Return the figures of chats of ``rate`` per second beside ``way.lines`` lines. With a rate of 0 no chats come."""
    engine, source, before = Engine(profile, way), _lines(), (0.0, 0)
    coming = [(s.came_at, n, s) for n, s in enumerate(chats(rate, WARM_UP_S + seconds) if rate else [])]
    asked = [s for *_, s in coming]
    coming += [(0.0, len(coming) + n, Sequence(False, 0.0, *next(source))) for n in range(way.lines)]
    heapq.heapify(coming)
    while engine.now < WARM_UP_S + seconds:
        if engine.now < WARM_UP_S:
            before = engine.now, engine.tokens
        while coming and coming[0][0] <= engine.now:
            engine.add(heapq.heappop(coming)[-1])
        if not (engine.running or engine.queue):
            engine.now = coming[0][0] if coming else WARM_UP_S + seconds
            continue
        for ended in engine.step():
            if not ended.is_chat:
                due = engine.now + RETURN_S
                heapq.heappush(coming, (due, engine._count + len(coming) + NUM_LINES, Sequence(False, due, *next(source))))
    began = [s for s in asked if s.token_at and s.came_at >= WARM_UP_S]
    return Found(
        ttft_s=np.array([s.token_at[0] - s.came_at for s in began]),
        itl_s=np.concatenate([np.diff(s.token_at) for s in began]) if began else np.array([]),
        tokens_per_s=(engine.tokens - before[1]) / (engine.now - before[0]),
    )


WAYS = (
    Way(name="priority alone"),
    Way(name="priority alone, 8 lines", lines=8),
    Way(name="`max_num_batched_tokens: 256`", step_tokens=256),
    Way(name="`long_prefill_token_threshold: 64`", longest_chunk=64),
    Way(name="`batch_step_share: 0.1`", share=0.1),
    Way(name="priority alone, 256 lines", lines=256),
    *(Way(name=f"`batch_step_share: {share:g}`, 256 lines", lines=256, share=share) for share in (0.02, 0.05, 0.1, 0.2, 0.5)),
    Way(name="`batch_step_share: 0.1`, 512 lines", lines=512, share=0.1),
)


def report(profile: Profile, rate: float, seconds: float) -> str:
    """Return a Markdown table: milliseconds of chats alone, and the factors by which a batch multiplies them.

    Idle capacity is the tokens per second of as many lines (at least 32) without chats, less those of the chats.
    """
    alone = play(profile, Way(name="chats alone", lines=0), rate=rate, seconds=seconds)
    capacity = {
        n: play(profile, Way(name="", lines=n), rate=0.0, seconds=seconds).tokens_per_s for n in {w.lines for w in WAYS} | {32}
    }
    said = ["| way | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | idle capacity filled |", "|---|---|---|---|---|---|"]
    values = [f"{1000 * np.quantile(each, q):.1f} ms" for each in (alone.ttft_s, alone.itl_s) for q in (0.5, 0.99)]
    said.append(f"| chats alone, n = {alone.ttft_s.size} | {' | '.join(values)} | |")
    for way in WAYS:
        both = play(profile, way, rate=rate, seconds=seconds)
        ratios = [
            f"{np.quantile(b, q) / np.quantile(a, q):.2f}"
            for a, b in ((alone.ttft_s, both.ttft_s), (alone.itl_s, both.itl_s))
            for q in (0.5, 0.99)
        ]
        idle = capacity[max(32, way.lines)] - alone.tokens_per_s
        said.append(f"| {way.name} | {' | '.join(ratios)} | {(both.tokens_per_s - alone.tokens_per_s) / idle:.0%} |")
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100-llama-8b", help=f"of {', '.join(PROFILES)}")
    parser.add_argument("--rate", type=float, default=6.0, help="chats a second")
    parser.add_argument("--seconds", type=float, default=100.0, help="of computed time for each way")
    arguments = parser.parse_args()
    print(report(PROFILES[arguments.profile], arguments.rate, arguments.seconds))


if __name__ == "__main__":
    main()
