"""`engine_cores` makes the engine cores of a `VirtualFleet`: vLLM's, with our scheduler, on simulated accelerators.

The caller puts `ENVIRONMENT` into the process's environment before anything imports vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app.autoscaling.simulation.simulated_replica import Hardware, steps_of_profile
from serve_app.config.model import ModelSettings
from serve_app.core.step_costs import SEQUENCES, MeasuredCosts
from serve_app.engine_args import BATCH_STEP_SHARE, engine_core_args
from serve_app.planning.virtual_fleet import BLOCK, VirtualFleet
from serve_app.simulated.profiles import profile_from

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the checkpoint is a tiny one with a short context
    "VLLM_CPU_KVCACHE_SPACE": "1",  # the profile gives the size of the cache; without this variable vLLM warns
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_TARGET_DEVICE": "cpu",  # vLLM's CUDA build would look for GPUs
}


def costs_of(settings: str | Mapping[str, Any]) -> MeasuredCosts:
    """Return what a replica of the profile would measure of its own steps."""
    profile = profile_from(settings)
    costs = Hardware(step_s=steps_of_profile(profile), kv_tokens=profile.kv_cache_tokens, max_num_seqs=max(SEQUENCES)).measured()
    assert costs is not None
    return costs


def clock_of(playing: Sequence[VirtualFleet]) -> Callable[[], float]:
    """Return the clock of the links between the engines: that of the fleet which plays, the last one."""
    return lambda: playing[-1].monotonic() if playing else 0.0


def engine_cores(
    checkpoint: Path,
    count: int,
    clock: Callable[[], float],
    *,
    profile: str | Mapping[str, Any],
    link: str,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    scheduling_policy: str = "fcfs",
) -> list[Any]:
    """Return engine cores with the arguments and schedulers of replicas with ``kv.transfer``, in the order of a `VirtualFleet`.

    They read each other's KV over ``link``.

    Args:
        checkpoint: A tiny model, of which only the configuration is read.
        clock: The time of reads.
        scheduling_policy: vLLM's. Engines with ``priority``, as of fleets with API keys, have our order of requests.
    Raises:
        ConfigError: The profile has no room for a request of ``max_model_len`` tokens.
    """
    from vllm.v1.engine.core import EngineCore

    from serve_app.replica.engine_core import engine_config
    from serve_app.replica.hand_over import handing_over
    from serve_app.replica.scheduler import bounded
    from serve_app.simulated.exchange import MemoryExchange
    from serve_app.simulated.executor import SimulatedExecutor
    from serve_app.simulated.kv_executor import in_virtual_time

    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    model = ModelSettings.model_validate(
        {
            "name": "planned",
            "model": str(checkpoint),
            "simulated": {"profile": profile, "link": link},
            "kv": {"transfer": "nixl"},
            "engine_args": {**limits, "block_size": BLOCK, "scheduling_policy": scheduling_policy},
        }
    )
    executor, cores = in_virtual_time(SimulatedExecutor, clock, MemoryExchange()), []
    for _ in range(count):
        config = engine_config(engine_core_args(model, str(checkpoint)))
        if BATCH_STEP_SHARE in config.additional_config:
            config.scheduler_config.scheduler_cls = bounded(config.scheduler_config.get_scheduler_cls())
        config.scheduler_config.scheduler_cls = handing_over(config.scheduler_config.get_scheduler_cls())
        cores.append(EngineCore(config, executor, log_stats=False))
    return cores


def aim(scheduler: Any, costs: MeasuredCosts, itl_s: float | None) -> None:
    """Let a scheduler keep a target of ITL, from the costs that its engine measured at its start.

    Args:
        costs: What its engine measured at its start.
        itl_s: The target of `keep_itl`; None to keep none.
    """
    from serve_app.replica.prompt_steps import PromptSteps

    scheduler._prompts = None if itl_s is None else PromptSteps(scheduler, itl_s)
    scheduler.start_from(costs)
