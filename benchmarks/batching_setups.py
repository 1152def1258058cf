"""The setups list the batching benchmark's runs: Anyscale's study (2023) in its own size on simulated accelerators, an eighth on CPU.

Pure. All tokens, rates and seconds are in the setup's units; on a simulated accelerator real time is ``time_scale`` times as long.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.static_batching.batches import Form, largest_batch, num_steps, step_ends_s
from loadtest.plan.scenario import Scenario, parse_scenario
from serve_app.simulated.profiles import PROFILES, Profile

MODEL = "embedded:smollm2-135m-instruct"
SEED = 0xCADE
"""The study's seed."""
PAPER_BATCH = {32: 16, 128: 12, 512: 8, 1536: 4}
"""The study's batch size for each cap of the output length."""
STATIC = ("naive", "paper static", "fair static")
CONTINUOUS = "continuous"
SYSTEMS = (*STATIC, CONTINUOUS)
_FOREVER_S = 7200.0
_FILL_S = 0.2
"""Real seconds that an idle static server waits for the first requests of a burst, so that its first batch is as full as the others."""


@dataclass(frozen=True)
class Setup:
    """One model on one machine, and its amount of work."""

    name: str
    profile: Profile | None
    """Accelerator profile; None: SmolLM2-135M on one CPU thread, in float32."""
    divisor: int
    """The study's lengths are divided by this number."""
    num_burst: int
    """Requests of a burst; 0: no bursts."""
    num_latency: int
    caps: tuple[int, ...] = tuple(PAPER_BATCH)
    """Caps in the study's tokens, like ``PAPER_BATCH``."""
    time_scale: float = 1.0
    """Time scale of the fleet; a static server's is chosen for each run to last about ``static_run_s``."""
    static_run_s: float = 15.0
    qps: tuple[float, ...] = (1.0, 4.0)
    rates: tuple[float, ...] = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0)
    """Offered rates in requests per second. On the CPU they are eighths of its capacity; the study's capacity was about 8."""
    static_rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Rates of a static server, as shares of its own capacity."""
    seed: int = SEED
    """Seed of all lengths and prompts."""
    window_s: float = 45.0
    """Length of a run at a rate. For a static server it is longer: at least 6 batches or, simulated, 15 batches and 60 requests."""

    @property
    def kv_tokens(self) -> int:
        """Return the KV memory in tokens, the same for both kinds of servers; on the CPU it is divided like the lengths."""
        return self.profile.kv_cache_tokens if self.profile else PROFILES["a100-40gb-llama-13b"].kv_cache_tokens // self.divisor

    @property
    def input_tokens(self) -> int:
        return 512 // self.divisor

    @property
    def mean_tokens(self) -> float:
        return 128 / self.divisor

    def cap(self, cap: int) -> int:
        return cap // self.divisor

    def batch_size(self, system: str, cap: int) -> int:
        """Return the system's batch size: 1, the study's, or the most that memory can reserve."""
        if system == "naive":
            return 1
        return PAPER_BATCH[cap] if system == "paper static" else largest_batch(self.kv_tokens, self.input_tokens + self.cap(cap))


SETUPS = {
    s.name: s
    for s in (
        Setup(
            "smollm2-135m-cpu", None, 8, num_burst=48, num_latency=24, rates=(4.0, 8.0, 12.0), static_rates=(2.0,), window_s=30.0
        ),
        Setup("a100-40gb-llama-13b", PROFILES["a100-40gb-llama-13b"], 1, num_burst=1000, num_latency=100, time_scale=0.33),
        Setup(
            "a10g-llama-7b",
            PROFILES["a10g-llama-7b"],
            1,
            num_burst=200,
            num_latency=100,
            time_scale=0.33,
            static_run_s=10.0,
            rates=(1.0, 4.0),
            static_rates=(2.0,),
        ),
    )
}


def quick(setup: Setup) -> Setup:
    """Return a setup for a quick run: two caps, few requests, one rate."""
    few = {"num_burst": 24, "num_latency": 12} if setup.profile is None else {"num_burst": 100, "num_latency": 30}
    return replace(setup, **few, caps=(32, 512), qps=(4.0,), rates=(), static_rates=(), static_run_s=6.0)  # type: ignore[arg-type]


def of_round(setup: Setup, number: int) -> Setup:
    """Return the setup of a round, counted from 1. Each round has its own lengths and arrivals; the first has the study's seed."""
    return replace(setup, seed=SEED + number - 1)


def only(setup: Setup, parts: Collection[str]) -> Setup:
    """Return the setup with only the loads in ``parts``: bursts, latencies, rates.

    Raises:
        ValueError: The bursts are left out on the CPU, whose rates follow from them.
    """
    if setup.profile is None and "bursts" not in parts:
        raise ValueError(f"{setup.name} has no rates without its bursts, which measure what it can do; give bursts too")
    if "bursts" not in parts:
        setup = replace(setup, num_burst=0)
    if "latencies" not in parts:
        setup = replace(setup, qps=())
    return setup if "rates" in parts else replace(setup, rates=(), static_rates=())


def burst(setup: Setup, cap: int, num: int, *, latency_inputs: bool = False) -> Scenario:
    """Return a load of ``num`` requests at once."""
    return _scenario(setup, {"law": "burst", "max_requests": num}, cap, latency_inputs=latency_inputs, drain_s=_FOREVER_S)


def alone(setup: Setup, cap: int, num: int) -> Scenario:
    """Return a load of one request after the other, which shows the engines' speed without batching."""
    return _scenario(
        setup, {"law": "closed", "concurrency": 1, "max_requests": num}, cap, latency_inputs=False, drain_s=_FOREVER_S
    )


def poisson(setup: Setup, rate: float, duration_s: float, *, time_scale: float, drain: bool) -> Scenario:
    """Return Poisson arrivals at ``rate`` with the study's latency lengths: any input up to 512, output up to 1,536."""
    arrival = {"law": "poisson", "rate": rate / time_scale}
    drain_s = _FOREVER_S if drain else 0.5
    return _scenario(setup, arrival, 1536, latency_inputs=True, duration_s=duration_s * time_scale, drain_s=drain_s)


def _scenario(setup: Setup, arrival: dict[str, Any], cap: int, *, latency_inputs: bool, **times: float) -> Scenario:
    size = setup.input_tokens
    inputs = {"dist": "uniform", "min": 1, "max": size} if latency_inputs else {"mean": size, "max": size}
    outputs = {"dist": "exponential", "mean": setup.mean_tokens, "max": setup.cap(cap)}
    request = {"token_ids": (10, 40_000), "input_tokens": inputs, "output_tokens": outputs}
    values = {"name": "batching", "model": setup.name, "seed": setup.seed, "arrival": arrival, "requests": [request], **times}
    return parse_scenario({**values, "warmup_s": 0.0, "timeout_s": _FOREVER_S, "keep_text": False})


def static_values(setup: Setup, system: str, cap: int, global_max: int, time_scale: float) -> dict[str, Any]:
    """Return the static server's settings for one run. ``paper static`` decodes every batch to ``global_max``."""
    form: Form = "paper" if system == "paper static" else "fair"
    values: dict[str, Any] = {
        "name": setup.name,
        "model": MODEL,
        "form": form,
        "max_batch_size": setup.batch_size(system, cap),
        "max_prompt_tokens": setup.input_tokens,
        "max_output_tokens": global_max if form == "paper" else setup.cap(cap),
        "batch_wait_s": round(_FILL_S / time_scale, 3),
    }
    if setup.profile:
        values["simulated"] = {"profile": setup.profile.name, "time_scale": time_scale}
    return values


def fleet_model(setup: Setup) -> dict[str, Any]:
    """Return the model of the fleet's configuration: the same KV memory, no prefix cache."""
    block = 16 if setup.profile else 32
    engine = {"max_model_len": 2048 // setup.divisor, "max_num_seqs": 256, "enable_prefix_caching": False, "block_size": block}
    engine["max_num_batched_tokens"] = 2048 // setup.divisor
    model: dict[str, Any] = {"name": setup.name, "model": MODEL, "engine_args": engine}
    if setup.profile:
        return {**model, "simulated": {"profile": setup.profile.name, "time_scale": setup.time_scale}}
    bytes_per_token = 2 * 30 * 3 * 64 * 4  # SmolLM2-135M's config.json: layers, KV heads, head size; float32
    # The engine reserves one block for itself.
    return {**model, "kv_cache_gib": (setup.kv_tokens + block) * bytes_per_token / 2**30}


def static_run_s(profile: Profile, lengths: Sequence[tuple[int, int]], *, form: Form, batch_size: int, global_max: int) -> float:
    """Return the seconds that a static server takes for requests of (input, output) tokens that all wait: batches in their order."""
    total = 0.0
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        steps = num_steps(form, [output for _, output in batch], global_max)
        total += step_ends_s(profile, [size for size, _ in batch], steps)[-1]
    return total
