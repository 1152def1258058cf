"""This benchmark measures fairness and admission on two simulated A10Gs of 16 places in virtual time; the seed decides all figures.

    python -m benchmarks.fairness_virtual [--parts noisy weights late] [--seeds 1 2 3 4 5] [--seconds 45]

    noisy      five tenants at half of their share, alone and then beside a sixth that sends ten times its share
    weights    three tenants of weights 1, 2 and 4 want all that they can get, for four times the seconds
    late       tenants send at least three times what the engines answer, and each request has to begin within 10 s or 2 s, for three times
               the seconds

`serve_app/planning/virtual_fleet.py` says what is real. `benchmarks/fairness.py` plays the same on a live fleet.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fairness_figures import RETRY_WITHIN, WEIGHTS, jain
from benchmarks.loaded_fleet import LoadedFleet
from loadtest.quantiles import quantile
from serve_app.checkpoints import make_tiny_llama
from serve_app.engine_args import BATCH_STEP_SHARE
from serve_app.planning.virtual_fleet import BLOCK
from serve_app.planning.virtual_loads import Load

CAPACITY = 26.0
"""Requests a second that two engines of 16 places answer."""
SHARE = CAPACITY / 6
VICTIMS = [Load(f"victim-{number}", rate=0.5 * SHARE) for number in range(5)]
NOISY = {
    "as the others": Load("noisy", rate=10 * SHARE),
    "answers of 150 to 250 tokens": Load("noisy", rate=10 * SHARE, answer=(150, 250)),
    "prompts of 700 to 1,200 further tokens": Load("noisy", rate=10 * SHARE, own=(700, 1200)),
}
GREEDY = [Load(name, depth=48, weight=weight) for name, weight in WEIGHTS.items()]
OVERLOADS = {
    "four equal tenants": [Load(f"t{number}", rate=3 * CAPACITY / 4) for number in range(4)],
    "chats, long answers of weight 2, long prompts of weight 4, a light one": [
        Load("chat", rate=CAPACITY),
        Load("writer", rate=CAPACITY / 4, weight=2.0, own=(16, 48), answer=(96, 160)),
        Load("reader", rate=CAPACITY, weight=4.0, own=(768, 1280), answer=(4, 12)),
        Load("light", rate=1.0),
    ],
    "four light tenants beside a flood": [
        Load("flood", rate=5 * CAPACITY),
        *(Load(f"v{number}", rate=CAPACITY / 8) for number in range(4)),
    ],
}
WITHIN_S = (2.0, 10.0)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
Play = Callable[..., LoadedFleet]


def noisy(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield "| noisy tenant's requests | ingresses | victims' p99 alone s | beside s | ratio | tokens/s beside |"
    for name, load in NOISY.items():
        for ingresses in (1, 2):
            pairs = [
                [play(loads, seconds, seed=seed, ingresses=ingresses) for loads in (VICTIMS, [*VICTIMS, load])] for seed in seeds
            ]
            p99s = [[quantile(np.sort(np.array(fleet.waits_s("victim"))), 0.99) for fleet in pair] for pair in pairs]
            alone, beside = ([pair[which] for pair in p99s] for which in (0, 1))
            ratios = [b / a for a, b in p99s]
            tokens = [beside.tokens.total() / seconds for _, beside in pairs]
            yield row(name, ingresses, spread(alone, 3), spread(beside, 3), spread(ratios, 2), spread(tokens, 0))


def weights(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield "| ingresses | shares of weights 1, 2 and 4 % | worst error of a share % | Jain's index by weight |"
    total = sum(WEIGHTS.values())
    for ingresses in (1, 2, 3):
        found = [play(GREEDY, 4 * seconds, seed=seed, ingresses=ingresses).shares() for seed in seeds]
        errors = [max(abs(share[name] * total / weight - 1) for name, weight in WEIGHTS.items()) for share in found]
        jains = [jain(share[name] / weight for name, weight in WEIGHTS.items()) for share in found]
        shares = ", ".join(f"{100 * statistics.median(share[name] for share in found):.1f}" for name in WEIGHTS)
        yield row(ingresses, shares, spread([100 * error for error in errors], 1), spread(jains, 4))


def late(play: Play, seeds: Sequence[int], seconds: float) -> Iterator[str]:
    yield "| overload | begin within s | admitted | of them late % | places free % | Retry-After right % | without jitter | by mean rate |"
    for name, loads in OVERLOADS.items():
        for within_s in WITHIN_S:
            fleets = [play([replace(load, first_token_s=within_s) for load in loads], 3 * seconds, seed=seed) for seed in seeds]
            admitted = [[asked for asked in fleet.counted() if asked.refused_at is None] for fleet in fleets]
            lates = [100 * sum(asked.is_late for asked in each) / len(each) for each in admitted]
            idle = [100 * fleet.idle() for fleet in fleets]
            rights = zip(*(retry_after_right(fleet, within_s + 1) for fleet in fleets), strict=True)
            yield row(
                name,
                f"{within_s:g}",
                spread([len(each) for each in admitted], 0),
                spread(lates, 1),
                spread(idle, 1),
                *(spread([100 * share for share in right], 0) for right in rights),
            )


def retry_after_right(fleet: LoadedFleet, until_s: float) -> tuple[float, float, float]:
    """Return the share of refused requests that were told within 25 % when all of their tenants have begun that waited then.

    That is for Retry-After as it was sent, without its jitter, and for one who knew how many requests of the tenant begin per second in the
    mean of the run. Requests of the last ``until_s`` do not count: what was admitted before them may not have begun.
    """
    ends_at, right = fleet.monotonic() - until_s, list[tuple[bool, ...]]()
    for load in {asked.load for asked in fleet.asked}:
        admitted = [(asked.at, asked.begun_at) for asked in fleet.asked if asked.load is load and asked.begun_at is not None]
        at, begun_at = np.array(admitted).reshape(-1, 2).T
        refused = [
            asked for asked in fleet.counted() if asked.load is load and asked.refused_at is not None and asked.at < ends_at
        ]
        for asked in refused:
            if (waits := (at < asked.at) & (begun_at > asked.at)).any():
                mean_s = waits.sum() / len(at) * (begun_at.max() - at.min())
                truth_s = begun_at[waits].max() - asked.at
                right.append(tuple(abs(s / truth_s - 1) <= RETRY_WITHIN for s in (asked.retry_after_s, asked.said_s, mean_s)))
    sent, said, mean = np.array(right).mean(axis=0) if right else [float("nan")] * 3
    return float(sent), float(said), float(mean)


PARTS: Mapping[str, Callable[[Play, Sequence[int], float], Iterator[str]]] = {"noisy": noisy, "weights": weights, "late": late}


def print_table(lines: Iterator[str]) -> None:
    """Print a table whose first line is its head."""
    head, *rows = lines
    print("\n".join(["", head, "|" + " --- |" * (head.count("|") - 1), *rows]), flush=True)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median of the seeds, with the least and the greatest in brackets."""
    middle, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({' to '.join(ends)})" if len(values) > 1 else middle


def engine_core(checkpoint: Path, profile: str = "a10g-llama-8b", **arguments: Any) -> Any:
    """Return a core of vLLM's with our scheduler, on a simulated accelerator with 16 places. ``arguments`` go before those here."""
    from vllm.v1.engine.core import EngineCore

    from serve_app.replica.engine_core import engine_config
    from serve_app.replica.scheduler import bounded
    from serve_app.simulated.executor import SimulatedExecutor

    config = engine_config(
        {
            "model": str(checkpoint),
            "distributed_executor_backend": "serve_app.simulated.executor.SimulatedExecutor",
            "additional_config": {"simulated": {"profile": profile}, BATCH_STEP_SHARE: 0.1},
            "scheduling_policy": "priority",
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "block_size": BLOCK,
            "enforce_eager": True,
            **arguments,
        }
    )
    config.scheduler_config.scheduler_cls = bounded(config.scheduler_config.get_scheduler_cls())
    return EngineCore(config, SimulatedExecutor, log_stats=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--seconds", type=float, default=45.0)
    arguments = parser.parse_args()
    if arguments.seconds < 15:
        parser.error("--seconds: at least 15, for limits of 10 s")
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_tiny_llama(Path(folder) / "tiny-llama")
        cores = [engine_core(checkpoint) for _ in range(2)]

        def play(loads: Sequence[Load], seconds: float, *, seed: int, ingresses: int = 1) -> LoadedFleet:
            fleet = LoadedFleet(cores, seed=seed, ingresses=ingresses)
            fleet.run(loads, seconds)
            return fleet

        for part in arguments.parts:
            print_table(PARTS[part](play, arguments.seeds, arguments.seconds))
        for core in cores:
            core.shutdown()


if __name__ == "__main__":
    main()
