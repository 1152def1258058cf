"""This program answers for a trace: would prefill and decode apart pay for my traffic? It plays the trace on simulated accelerators.

    python -m benchmarks.plan_apart TRACE [--accelerator h100] [--model llama-8b] [--gpus 2] [--engines 4] [--link efa-400g]
        [--seconds 60] [--speed 1] [--ttft 2] [--itl 0.1] [--out apart.png]

TRACE is a file that `loadtest/plan/traces.py` reads. The same seconds of it are played in virtual time on each side of `sides`: without
hand-overs, with `routing.apart`, and with each number of replicas for long prompts (`pools`). Out come a table, a sentence, and a figure.

All figures are simulated. What prompts of the trace share is left out: each has its tokens to itself, and 256 cached ones before them.
`benchmarks/virtual_fleet.py` says what is real. Prompts and answers that do not fit into the engines' context are left out and counted.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.apart import CONTEXT, SIDES, costs_of, engine_cores, p99, pools
from benchmarks.fairness_virtual import print_table, row
from benchmarks.virtual_fleet import SHARED, VirtualFleet
from benchmarks.virtual_loads import Load
from loadtest.plan.traces import read_trace
from loadtest.records import ScheduledRequest
from loadtest.report.plots import STYLE, Sample, plot_cdf
from serve_app.checkpoints import make_tiny_llama
from serve_app.core.fleet import FleetState
from serve_app.simulated.profiles import ACCELERATORS, MODELS
from serve_app.simulated.transfer import LINKS

TOGETHER, APART = "together", "routing.apart"
REST_S = 20.0
"""Time after the last arrival in which answers may end. Answers that have not ended are not good."""
MORE_GOOD, LESS_ITL = 0.01, 0.8
"""Prefill and decode apart pay if this share more of the answers are good, or, with as many, the ITL p99 is at most this multiple."""


@dataclass(frozen=True)
class Played:
    """What one side made of the trace. Times in seconds; ``good`` is the share of answers within both limits, 0..1."""

    side: str
    good: float
    firsts_s: Sequence[float]
    gaps_s: Sequence[float]
    num_failed: int
    """Answers without a first token."""
    moves: int

    @property
    def itl_s(self) -> float:
        """The 99th percentile of all gaps between tokens."""
        return p99(self.gaps_s)


def sides(num_engines: int) -> Mapping[str, Callable[[FleetState], object]]:
    numbers = range(1, num_engines)
    return {TOGETHER: SIDES["together"], APART: SIDES["apart"]} | {f"pools {n}": partial(pools, num_prefill=n) for n in numbers}


def fitting(requests: Sequence[ScheduledRequest], seconds: float, speed: float) -> tuple[list[tuple[float, Load]], int]:
    """Return when each request of the first seconds arrives, as a load of its own, and how many were left out as too long."""
    due = [(each.due_s / speed, each) for each in requests if each.due_s is not None and each.due_s / speed < seconds]
    fit = [(at, each) for at, each in due if SHARED + each.input_tokens + each.output_tokens <= CONTEXT]
    loads = [(at, Load("trace", own=(each.input_tokens,) * 2, answer=(each.output_tokens,) * 2, account="")) for at, each in fit]
    return loads, len(due) - len(fit)


def play(fleet: VirtualFleet, loads: Sequence[tuple[float, Load]], side: str, *, ttft_s: float, itl_s: float) -> Played:
    """Play the trace on the fleet."""
    for at, load in loads:
        fleet.at(at, fleet.ask, load)
    fleet.run([load for _, load in loads], loads[-1][0] + REST_S, warmup_s=0.0)
    counted = fleet.counted()
    firsts = [asked.begun_at - asked.at for asked in counted if asked.begun_at is not None]
    good = sum(
        asked.is_complete and asked.begun_at is not None and asked.begun_at - asked.at <= ttft_s and p99(asked.gaps) <= itl_s
        for asked in counted
    )
    gaps = [gap for asked in counted for gap in asked.gaps]
    return Played(side, good / len(counted), firsts, gaps, len(counted) - len(firsts), fleet.hand_overs().total())


def verdict(played: Sequence[Played], *, ttft_s: float, itl_s: float) -> str:
    """Return the answer as a sentence. The first of ``played`` is the side without hand-overs."""
    together, *others = played
    best = max(others, key=lambda each: (round(each.good, 2), -each.itl_s))
    more_good = best.good - together.good >= MORE_GOOD
    pays = more_good or (best.good > together.good - MORE_GOOD and best.itl_s <= LESS_ITL * together.itl_s)
    number = best.side.removeprefix("pools ")
    setting = "routing.apart: true" if best.side == APART else f"pools: {{prefill: {{min: {number}, max: {number}}}}}"
    found = f"with `{setting}` {best.good:.1%} of the answers keep {ttft_s:g} s to the first token and {itl_s:g} s between tokens"
    found += f", and {together.good:.1%} without; the ITL p99 is {1000 * best.itl_s:.1f} and {1000 * together.itl_s:.1f} ms"
    return f"{'Yes' if pays else 'No, it would hardly pay'}: {found} (simulated)."


def draw(played: Sequence[Played], *, ttft_s: float, itl_s: float) -> Figure:
    """Draw the times to first tokens and between tokens of the side without hand-overs and of the best two others."""
    style: Any = STYLE  # matplotlib's type lists the keys
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        shown = [played[0], *sorted(played[1:], key=lambda each: (-round(each.good, 2), each.itl_s))[:2]]
        for color, each in enumerate(shown):
            plot_cdf(left, Sample(each.side, np.sort(np.array(each.firsts_s)), each.num_failed), color=color, limit_s=ttft_s)
            plot_cdf(right, Sample(each.side, np.sort(np.array(each.gaps_s)), 0), color=color, limit_s=itl_s)
        left.set(xlabel="time to first token, simulated")
        right.set(xlabel="time between tokens, simulated", ylabel="share of gaps")
    return figure


def table(played: Sequence[Played]) -> list[str]:
    rows = [
        row(each.side, f"{each.good:.1%}", f"{p99(each.firsts_s):.2f}", f"{1000 * each.itl_s:.1f}", each.moves) for each in played
    ]
    return ["| side | good answers | TTFT p99 s | ITL p99 ms | moves |", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--accelerator", default="h100", choices=ACCELERATORS)
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    parser.add_argument("--gpus", type=int, default=2, help="of each engine")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--link", default="efa-400g", choices=LINKS)
    parser.add_argument("--seconds", type=float, default=60.0, help="that are played")
    parser.add_argument("--speed", type=float, default=1.0, help="2: the trace in half of its time")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds to a first token in a good answer")
    parser.add_argument("--itl", type=float, default=0.1, help="seconds between tokens in a good answer")
    parser.add_argument("--out", type=Path, default=Path("apart.png"))
    options = parser.parse_args()
    loads, num_left_out = fitting(read_trace(options.trace).requests, options.seconds, options.speed)
    if not loads or options.engines < 2:
        parser.error("give a trace with requests in its first seconds, and two engines or more")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    profile = {"accelerator": options.accelerator, "model": options.model, "num_accelerators": options.gpus}
    limits = {"ttft_s": options.ttft, "itl_s": options.itl}
    playing: list[VirtualFleet] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, costs = make_tiny_llama(Path(folder) / "tiny-llama"), costs_of(profile)
        cores = engine_cores(
            checkpoint, options.engines, options.link, lambda: playing[-1].monotonic() if playing else 0.0, profile
        )
        played = []
        for side, set_side in sides(options.engines).items():
            playing[:] = [VirtualFleet(cores, seed=1, costs=costs, apart=set_side)]
            played.append(play(playing[-1], loads, side, **limits))
        for core in cores:
            core.shutdown()
    print_table(iter(table(played)))
    print(f"\n{len(loads)} requests of {options.trace}, {num_left_out} left out as too long.\n{verdict(played, **limits)}")
    draw(played, **limits).savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
