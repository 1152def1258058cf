"""This benchmark measures steps that keep the ITL target (`models.NAME.keep_itl`) beside fixed ones, on a simulated H100 in virtual time.

    python -m benchmarks.steps [--parts rates targets ways chats] [--seeds 1 2 3 4 5] [--seconds 20]

    rates      a tenth of the prompts has 8,000 tokens, the others 200; an ITL target of 50 ms; rising rates
    targets    the same at 16 requests a second, for other targets
    ways       the same at 16 requests a second and 50 ms, for further sides
    chats      short prompts alone, as many as the engine can answer

The sides:

    fixed N      vLLM's own scheduler in order of arrival, with steps of at most N tokens
    priority N   our scheduler without the target, with steps of at most N tokens
    keep_itl     our scheduler with the target, and steps of at most 8,192 tokens
    limit alone  the same without deadlines

The seed decides all figures. `serve_app/planning/virtual_fleet.py` says what is real.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.apart import p99
from benchmarks.fairness_virtual import print_table, row, spread
from benchmarks.loaded_fleet import LoadedFleet
from serve_app.checkpoints import make_tiny_llama
from serve_app.core.step_costs import MeasuredCosts
from serve_app.engine_args import BATCH_STEP_SHARE, ITL_TARGET_S
from serve_app.planning.engines import aim, costs_of
from serve_app.planning.virtual_fleet import BLOCK
from serve_app.planning.virtual_loads import Asked, Load

PROFILE = "h100-llama-8b"
PLACES, WARMUP_S, TAIL_S = 256, 5.0, 5.0
SHORT = Load("short", account="", own=(100, 300), answer=(100, 300))
LONG = Load("long", account="", own=(7500, 8500), answer=(50, 150))
LONG_SHARE = 0.1
GREEDY_CHATS = replace(SHORT, depth=PLACES)
TTFT_S, LONG_TTFT_S, TARGET_S = 0.5, 3.0, 0.05
RATES = (12.0, 16.0, 20.0)
TARGETS_S = (0.025, 0.1, 0.2)
KEPT, LIMIT_ALONE = "keep_itl", "limit alone"
SIDES = ("fixed 512", "fixed 2048", "fixed 8192", KEPT)
MORE_SIDES = ("priority 512", "priority 2048", LIMIT_ALONE)
Play = Callable[[float, float, int, str, float | None], LoadedFleet]
"""Runs requests of a rate, or with 0 chats alone, for so many seconds: seed, side, and the target of sides that have one."""


def mixed(rate: float) -> list[Load]:
    """Return the loads of ``rate`` requests a second together."""
    return [replace(SHORT, rate=(1 - LONG_SHARE) * rate), replace(LONG, rate=LONG_SHARE * rate)]


def target_of(side: str, itl_s: float) -> float | None:
    return itl_s if side in (KEPT, LIMIT_ALONE) else None


def is_good(asked: Asked, itl_s: float) -> bool:
    """Return whether a complete answer kept its limits: of its first token, by kind, and of 99 % of its other gaps."""
    if not asked.is_complete or asked.begun_at is None:
        return False
    first_s = LONG_TTFT_S if asked.load.tenant == "long" else TTFT_S
    return asked.begun_at - asked.at <= first_s and p99(asked.gaps) <= itl_s


def figures(fleets: Sequence[LoadedFleet], seconds: float, itl_s: float) -> list[str]:
    """Return the cells of runs with several seeds. Requests of the last `TAIL_S` seconds do not count: many cannot end in time."""
    good, kept, tokens = list[float](), list[float](), list[float]()
    waits: dict[str, list[float]] = {"short": [], "long": []}
    for fleet in fleets:
        counted = [asked for asked in fleet.counted() if asked.at < fleet.monotonic() - TAIL_S]
        gaps = [gap for asked in fleet.counted() for gap in asked.gaps]
        good.append(sum(is_good(asked, itl_s) for asked in counted) / (seconds - TAIL_S))
        kept.append(100.0 * sum(gap <= itl_s for gap in gaps) / max(1, len(gaps)))
        tokens.append(fleet.tokens.total() / seconds)
        for kind, found in waits.items():
            found.append(p99([asked.begun_at - asked.at for asked in counted if asked.load.tenant == kind and asked.begun_at]))
    cells = [spread(good, 1), spread(kept, 2)]
    return [*cells, *(spread(found, 2) for found in waits.values()), spread(tokens, 0)]


HEADS = "good answers/s | gaps within the target % | short prompts' TTFT p99 s | long prompts' s | tokens/s |"


def rates(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield f"| requests/s | side | {HEADS}"
    for rate in RATES:
        for side in SIDES:
            fleets = [play(rate, seconds, seed, side, target_of(side, TARGET_S)) for seed in seeds]
            yield row(f"{rate:g}", side, *figures(fleets, seconds, TARGET_S))


def targets(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield f"| target ms | side | {HEADS}"
    for itl_s in TARGETS_S:
        for side in SIDES:
            fleets = [play(RATES[1], seconds, seed, side, target_of(side, itl_s)) for seed in seeds]
            yield row(f"{1000 * itl_s:g}", side, *figures(fleets, seconds, itl_s))


def ways(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield f"| side | {HEADS}"
    for side in MORE_SIDES:
        fleets = [play(RATES[1], seconds, seed, side, target_of(side, TARGET_S)) for seed in seeds]
        yield row(side, *figures(fleets, seconds, TARGET_S))


def chats(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield "| side | tokens/s | ITL p99 ms |"
    for side in SIDES:
        fleets = [play(0.0, seconds, seed, side, target_of(side, TARGET_S)) for seed in seeds]
        yield row(
            side,
            spread([fleet.tokens.total() / seconds for fleet in fleets], 0),
            spread([p99([1000 * gap for asked in fleet.counted() for gap in asked.gaps]) for fleet in fleets], 1),
        )


PARTS: Mapping[str, Callable[[Play, Sequence[int], float], Iterator[str]]] = {
    "rates": rates,
    "targets": targets,
    "ways": ways,
    "chats": chats,
}


class Cores:
    """Engine cores of vLLM's on a simulated H100, one for each side and target."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._made: dict[tuple[str, float | None], Any] = {}
        self.costs = costs_of(PROFILE)

    def of(self, side: str, itl_s: float | None) -> Any:
        """Return the core of a side, which knows nothing but what it measured of itself at its start."""
        key = side, itl_s
        if key not in self._made:
            ours = {} if side.startswith("fixed") else {BATCH_STEP_SHARE: 0.1} | ({} if itl_s is None else {ITL_TARGET_S: itl_s})
            self._made[key] = self._make(8192 if itl_s is not None else int(side.split()[1]), ours)
        if itl_s is not None:
            aim_of_side(self._made[key].scheduler, self.costs, has_deadlines=side == KEPT)
        return self._made[key]

    def _make(self, step_tokens: int, ours: Mapping[str, float]) -> Any:
        from vllm.v1.engine.core import EngineCore

        from serve_app.replica.engine_core import engine_config
        from serve_app.replica.scheduler import bounded
        from serve_app.simulated.executor import SimulatedExecutor

        config = engine_config(
            {
                "model": str(self._checkpoint),
                "distributed_executor_backend": "serve_app.simulated.executor.SimulatedExecutor",
                "additional_config": {"simulated": {"profile": PROFILE}, **ours},
                "scheduling_policy": "priority" if ours else "fcfs",
                "max_model_len": 16384,
                "max_num_seqs": PLACES,
                "max_num_batched_tokens": step_tokens,
                "block_size": BLOCK,
                "enforce_eager": True,
            }
        )
        if ours:
            config.scheduler_config.scheduler_cls = bounded(config.scheduler_config.get_scheduler_cls())
        return EngineCore(config, SimulatedExecutor, log_stats=False)

    def shutdown(self) -> None:
        for core in self._made.values():
            core.shutdown()


def aim_of_side(scheduler: Any, costs: MeasuredCosts, *, has_deadlines: bool) -> None:
    """Let a scheduler keep the side's target, and order by deadlines or not."""
    aim(scheduler, costs, scheduler.vllm_config.additional_config[ITL_TARGET_S])
    if not has_deadlines:
        scheduler._prompts.due = lambda request: request.priority


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    with tempfile.TemporaryDirectory() as folder:
        cores = Cores(make_tiny_llama(Path(folder) / "tiny-llama"))

        @functools.cache
        def play(rate: float, seconds: float, seed: int, side: str, itl_s: float | None) -> LoadedFleet:
            fleet = LoadedFleet([cores.of(side, itl_s)], seed=seed, costs=cores.costs)
            fleet.run(mixed(rate) if rate else [GREEDY_CHATS], seconds, warmup_s=WARMUP_S)
            return fleet

        for part in arguments.parts:
            print_table(PARTS[part](play, arguments.seeds, arguments.seconds))
        cores.shutdown()


if __name__ == "__main__":
    main()
