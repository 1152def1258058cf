"""This benchmark measures in virtual time what tenants with long and with short contexts get of two simulated H100s of 16 places.

    python -m benchmarks.fairness_contexts [--seeds 1 2 3] [--seconds 120] [--warmup 120]

Both always have 40 requests open, with answers of 400 to 600 tokens. Prompts of the one are 300 tokens, of the other 28,700, of which the
prefix cache has all but 64. They are charged by costs that were measured without and with a long context. GPU time is that of the simulated
accelerator: the keys and values that a request reads in a step, and of the rest of the step a part by its tokens in it. The warm-up is long
because all 80 requests come at once, before the cost of an answer is known.
"""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fairness_virtual import ENVIRONMENT, engine_core, print_table, row, spread
from benchmarks.loaded_fleet import LoadedFleet
from serve_app.checkpoints import make_tiny_llama
from serve_app.planning.engines import costs_of
from serve_app.planning.virtual_loads import Load
from serve_app.simulated.profiles import PROFILES

PROFILE = PROFILES["h100-llama-8b"]
LOADS = [Load("short", depth=40, answer=(400, 600)), Load("long", depth=40, shared=28_672, answer=(400, 600))]
MODEL_LEN = 32_768


class GpuTime:
    """Counts the seconds of each tenant's requests in the steps of engine cores."""

    def __init__(self, cores: Sequence[Any]) -> None:
        self.seconds: Counter[str] = Counter()
        self.fleet: LoadedFleet | None = None
        self.counts_from = 0.0
        accelerator = PROFILE.accelerator
        self._kv_token_s = PROFILE.model.kv_bytes_per_token / (
            accelerator.bandwidth_bytes_per_s * accelerator.bandwidth_efficiency
        )
        for core in cores:
            self._follow(core)

    def _follow(self, core: Any) -> None:
        inner = core.model_executor._step

        def step(planned: Any) -> Any:
            made, step_s = inner(planned)
            if self.fleet is not None and self.fleet.monotonic() >= self.counts_from:
                self._count(core.scheduler.requests, planned.num_scheduled_tokens, step_s)
            return made, step_s

        core.model_executor._step = step

    def _count(self, requests: Any, tokens: dict[str, int], step_s: float) -> None:
        reads_s = {name: requests[name].num_computed_tokens * self._kv_token_s for name in tokens}
        rest_s = max(0.0, step_s - sum(reads_s.values())) / sum(tokens.values())
        for name, num in tokens.items():
            self.seconds[name.rpartition("-")[0]] += reads_s[name] + num * rest_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warmup", type=float, default=120.0, help="seconds before those that count")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_tiny_llama(Path(folder) / "tiny-llama")
        longer = {
            "max_model_len": MODEL_LEN,
            "max_num_batched_tokens": 2048,
            "hf_overrides": {"max_position_embeddings": MODEL_LEN},
        }
        cores = [engine_core(checkpoint, PROFILE.name, **longer) for _ in range(2)]
        gpu_time = GpuTime(cores)
        rows = []
        measured = costs_of(PROFILE.name)
        for costs in (replace(measured, context_token_s=0.0), measured):
            times, tokens = list[float](), list[float]()
            for seed in arguments.seeds:
                gpu_time.seconds.clear()
                gpu_time.fleet = fleet = LoadedFleet(cores, seed=seed, costs=costs)
                gpu_time.counts_from = fleet.monotonic() + arguments.warmup
                fleet.run(LOADS, arguments.seconds, warmup_s=arguments.warmup)
                times.append(100 * gpu_time.seconds["long"] / gpu_time.seconds.total())
                tokens.append(100 * fleet.shares()["long"])
            rows.append(row("counts" if costs is measured else "does not count", spread(times, 0), spread(tokens, 0)))
        print_table(iter(["| context | GPU time of the long one % | its tokens % |", *rows]))
        for core in cores:
            core.shutdown()


if __name__ == "__main__":
    main()
