"""This benchmark measures prefill and decode apart, and drains with KV, on pairs of simulated H100s in virtual time.

    python -m benchmarks.apart [--parts mixed short drain] [--seeds 1 2 3 4 5] [--seconds 60] [--link efa-400g]

    mixed      a tenth of the prompts has 8,000 tokens; the others are chats. Four engines with steps of 2,048 tokens
    short      chats alone, as many as the engines can answer
    drain      one of four engines drains with 64 streams of 10,000 tokens

The sides of *mixed* and *short*:

    together     `routing.apart: false`
    apart        `routing.apart: true`
    fixed N      N engines compute all prompts, and the others make all answers
    pools N      our own `pools`, with N replicas that compute long prompts
    threshold N  as *fixed* for prompts of more than 1,000 tokens, while fewer than three wait there; other prompts stay with their answers

The seed decides all figures. `serve_app/planning/virtual_fleet.py` says what is real, `serve_app/simulated/transfer.py` what a read takes.
*fixed* and *threshold* are ours: they have the rules of fixed pools and of Dynamo's conditional disaggregation, and nothing else of them.
"""

import argparse
import heapq
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.fairness_virtual import print_table, row, spread
from benchmarks.loaded_fleet import LoadedFleet
from loadtest.quantiles import quantile
from serve_app.checkpoints import make_tiny_llama
from serve_app.core.apart import Apart
from serve_app.core.fleet import FleetState
from serve_app.core.least_loaded import rank_of
from serve_app.core.pool_sizes import PoolSizes
from serve_app.core.request import RequestState
from serve_app.core.routing import Choice, Reason, ReplicaState
from serve_app.engine_args import PROCESS_ENVIRONMENT
from serve_app.planning.engines import ENVIRONMENT, clock_of, costs_of, engine_cores
from serve_app.planning.virtual_loads import Asked, Load

PROFILE: dict[str, Any] = {"accelerator": "h100", "model": "llama-8b", "num_accelerators": 2}
ENGINES, PLACES = 4, 128
ENGINE: Mapping[str, Any] = {"profile": PROFILE, "max_model_len": 16384, "max_num_seqs": PLACES, "max_num_batched_tokens": 2048}
CHATS = Load("chat", rate=54.0, own=(32, 400), answer=(100, 300))
LONG = Load("long", rate=6.0, own=(7000, 9000), answer=(50, 150))
GREEDY_CHATS = Load("chat", depth=ENGINES * PLACES, own=(32, 400), answer=(100, 300))
TTFT_S, LONG_TTFT_S, ITL_S = 0.5, 3.0, 0.05
"""Limits of a good answer: its first token, by kind, and the 99th percentile of its other gaps."""
STREAMS = Load("stream", depth=64, own=(9744, 9744), answer=(4000, 4000))
DRAIN_AT_S, DRAIN_S = 45.0, 2.0
Play = Callable[..., LoadedFleet]


class FixedRoles(Apart):
    """Some engines compute all prompts of at least ``least`` tokens and hand the answers over, while not too many prompts wait there."""

    def __init__(self, fleet: FleetState, prefill: Collection[str], least: int = 0, most_waiting: float = float("inf")) -> None:
        assert fleet._apart is not None
        super().__init__(fleet._apart._inner, fleet.order, fleet.hand_overs)
        self._prefill, self._least, self._most_waiting = prefill, least, most_waiting
        fleet._routing = fleet._apart = self

    def is_long(self, tokens: int) -> bool:
        return tokens >= self._least

    def pick(self, request: RequestState, replicas: Mapping[str, ReplicaState]) -> Choice | None:
        able = [replica for replica in replicas.values() if replica.takes(request)]
        prefill = [replica for replica in able if replica.replica_id in self._prefill]
        if request.attempt < 0 and self.is_long(request.prompt_tokens) and prefill:
            best = min(prefill, key=lambda replica: replica.prefill_tokens)
            if sum(bool(each.prefill_tokens) for each in best.held.values()) < self._most_waiting:
                return Choice(best, Reason.PROMPT)
        decode = min(
            (replica for replica in able if replica.replica_id not in self._prefill),
            key=lambda r: rank_of(r, request),
            default=None,
        )
        return None if decode is None else Choice(decode, Reason.LOAD)

    def burdened(self, replicas: Collection[ReplicaState]) -> Sequence[ReplicaState]:
        return []

    def moves(
        self, replica: ReplicaState, replicas: Mapping[str, ReplicaState], now: float, **which: Any
    ) -> Iterator[tuple[RequestState, Choice]]:
        request = which.get("only")
        if request is None or replica.replica_id not in self._prefill:
            return
        decode = [other for other in replicas.values() if other.replica_id not in self._prefill and other.takes(request)]
        for target in heapq.nsmallest(1, decode, key=lambda other: len(other.held) + len(other.coming)):
            yield request, Choice(target, Reason.LOAD)


def fixed(prefill: Collection[str], least: int = 0, most_waiting: float = float("inf")) -> Mapping[str, Any]:
    return {"settings": {"apart": True}, "change": lambda fleet: FixedRoles(fleet, prefill, least, most_waiting)}


def pools(num_prefill: int) -> Mapping[str, Any]:
    sizes = PoolSizes(num_prefill, num_prefill, 1, 1000)  # without a bound of its own for the others
    return {"settings": {"pools": sizes, "ttft_s": LONG_TTFT_S}}


SIDES: Mapping[str, Mapping[str, Any]] = {
    "together": {},
    "apart": {"settings": {"apart": True}},
    "fixed 1": fixed({"0"}),
    "fixed 2": fixed({"0", "1"}),
    "pools 1": pools(1),
    "pools 2": pools(2),
    "threshold 1": fixed({"0"}, 1000, 3),
    "threshold 2": fixed({"0", "1"}, 1000, 3),
}
"""Side -> arguments of `LoadedFleet`."""


def is_good(asked: Asked) -> bool:
    """Return whether a complete answer kept its limits."""
    if not asked.is_complete or asked.begun_at is None:
        return False
    first_s = LONG_TTFT_S if asked.load is LONG else TTFT_S
    return asked.begun_at - asked.at <= first_s and p99(asked.gaps) <= ITL_S


def p99(values: Sequence[float]) -> float:
    return float(quantile(np.sort(np.array(values)), 0.99)) if values else 0.0


def mixed(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    heads = (
        "chats' ITL p99 ms | their TTFT p99 s | long prompts' TTFT p50 s | p99 s | good answers/s | tokens/s | moves/s | results"
    )
    yield f"| side | ingresses | {heads} |"
    for name, ingresses in (*((name, 1) for name in SIDES), ("together", 2), ("apart", 2)):
        fleets = [play([CHATS, LONG], seconds, seed=seed, side=name, ingresses=ingresses) for seed in seeds]
        counted = [[asked for asked in fleet.counted() if asked.at < fleet.monotonic() - 10.0] for fleet in fleets]
        gaps = [[1000 * gap for asked in each if asked.load is CHATS for gap in asked.gaps] for each in counted]
        results = sum((fleet.hand_overs() for fleet in fleets[1:]), fleets[0].hand_overs())
        yield row(
            name,
            ingresses,
            spread([p99(each) for each in gaps], 1),
            spread([p99(fleet.waits_s("chat")) for fleet in fleets], 2),
            spread([statistics.median(fleet.waits_s("long")) for fleet in fleets], 2),
            spread([p99(fleet.waits_s("long")) for fleet in fleets], 2),
            spread([sum(map(is_good, each)) / (seconds - 10.0) for each in counted], 1),
            spread([fleet.tokens.total() / seconds for fleet in fleets], 0),
            spread([fleet.hand_overs().total() / (seconds + 20.0) for fleet in fleets], 1),
            ", ".join(f"{result} {count}" for result, count in sorted(results.items())) or "-",
        )


def short(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield "| side | tokens/s | ITL p99 ms | moves/s |"
    for name in ("together", "apart"):
        fleets = [play([GREEDY_CHATS], seconds, seed=seed, side=name) for seed in seeds]
        yield row(
            name,
            spread([fleet.tokens.total() / seconds for fleet in fleets], 0),
            spread([p99([1000 * gap for asked in fleet.counted() for gap in asked.gaps]) for fleet in fleets], 1),
            spread([fleet.hand_overs().total() / (seconds + 20.0) for fleet in fleets], 2),
        )


def drain(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield "| KV | streams that moved | their gap p50 s | p99 s | first move to last resumed s | tokens computed again |"
    for name in ("moves", "is computed"):
        rows = [_drained(play, seed, with_kv=name == "moves") for seed in seeds]
        yield row(
            name, *(spread(values, digits) for values, digits in zip(zip(*rows, strict=True), (0, 2, 2, 2, 0), strict=True))
        )


def _drained(play: Play, seed: int, *, with_kv: bool) -> tuple[float, ...]:
    """Let one engine have all streams, and then drain in two seconds."""

    def begin(fleet: LoadedFleet) -> None:
        for number in range(1, ENGINES):
            fleet.drain(number, 1e6)
            fleet.at(DRAIN_AT_S - 2.0, fleet.drain, number, None)
        fleet.at(DRAIN_AT_S, fleet.drain, 0, DRAIN_S)

    fleet = play([STREAMS], 40.0, seed=seed, side="together", begin=begin, with_kv=with_kv)
    states = [asked.state for asked in fleet.asked if asked.state is not None]
    moves = [gap for state in states for gap in state.trail.gaps]
    gaps = [end - begin for begin, end in moves]
    spanned = max(end for _, end in moves) - min(begin for begin, _ in moves)
    read = fleet.kv_read()[0]
    computed = sum(state.prompt_tokens for state in states for _ in state.trail.gaps) - read
    return len(moves), statistics.median(gaps), p99(gaps), spanned, max(0, computed)


PARTS: Mapping[str, Callable[[Play, Sequence[int], float], Iterator[str]]] = {"mixed": mixed, "short": short, "drain": drain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--link", type=yaml.safe_load, default="efa-400g", help="a name, or a mapping as in simulated.link")
    arguments = parser.parse_args()
    os.environ |= PROCESS_ENVIRONMENT | ENVIRONMENT
    playing: list[LoadedFleet] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_tiny_llama(Path(folder) / "tiny-llama")
        costs = costs_of(PROFILE)
        cores = engine_cores(checkpoint, ENGINES, clock_of(playing), link=arguments.link, **ENGINE)

        def play(
            loads: Sequence[Load],
            seconds: float,
            *,
            seed: int,
            side: str,
            ingresses: int = 1,
            begin: Callable[[LoadedFleet], None] = lambda fleet: None,
            with_kv: bool = True,
        ) -> LoadedFleet:
            playing[:] = [LoadedFleet(cores, seed=seed, ingresses=ingresses, costs=costs, moves_kv=with_kv, **SIDES[side])]
            begin(playing[-1])
            playing[-1].run(loads, seconds)
            return playing[-1]

        for part in arguments.parts:
            print_table(PARTS[part](play, arguments.seeds, arguments.seconds))
        for core in cores:
            core.shutdown()


if __name__ == "__main__":
    main()
