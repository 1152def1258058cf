"""This module counts the replicas that a rate of requests needs, with the step times of the simulated accelerator. Pure.

It has no model of times of its own: `serve_app/simulated/timing.py` times the steps, a replica measures them as it does at its start
(`Hardware.measured`), and the autoscaler's `Capacity` says how many replicas the rate then needs.
"""

from dataclasses import dataclass, replace

from serve_app.autoscaling.capacity import Capacity, Mix, Slo, StepTimes
from serve_app.autoscaling.model_autoscaler import KV_GUARD
from serve_app.autoscaling.simulation.simulated_replica import Hardware, StepModel, steps_of_profile
from serve_app.simulated.profiles import ModelShape, Profile
from serve_app.sizing.architecture import Architecture
from serve_app.sizing.fits import Fit
from serve_app.sizing.kv_memory import kv_bytes_of_request
from serve_app.sizing.stages import stages_of
from serve_app.sizing.weights import ParameterCounts

_UNLIMITED = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests, and the limits within which they are answered."""

    requests_per_s: float
    prompt_tokens: int
    answer_tokens: int
    slo: Slo
    utilization: float
    headroom: float
    """As `replicas.headroom`: the share by which the load may rise at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The replicas that a load needs, and what each of them does then."""

    num: int
    most_per_replica: float
    """Requests per second that one replica answers with its batch full."""
    prompt_s: float
    """Seconds of a step that computes one whole prompt."""
    token_s: float
    """Seconds between two tokens at the batch of this load."""
    batch: float
    """Requests that run at once on a replica, on average."""
    missed: tuple[str, ...]
    """Limits that even a request alone breaks: ttft or itl. More replicas do not help."""


def profile_of(shape: Architecture, counts: ParameterCounts, of: Fit) -> Profile:
    """Return the simulated profile of a model on the GPUs of ``of``. All its parameters are computed, as if it were dense."""
    weights = of.weight_bytes * of.num_gpus
    latent = shape.latent
    model = ModelShape(
        name=shape.family or "custom",
        num_parameters=counts.total,
        lookup_parameters=0 if shape.tied else counts.embeddings,
        num_layers=shape.num_layers - shape.num_stateful_layers,
        num_attention_heads=shape.num_heads,
        num_kv_heads=1 if latent else shape.num_kv_heads,
        head_size=(latent.rank + latent.rope_size) // 2 if latent else shape.head_size,  # keys and values are one vector
        bytes_per_parameter=weights / counts.total,
        bytes_per_kv_element=of.plan.kv_element,
    )
    return Profile(accelerator=of.accelerator, model=model, num_accelerators=of.num_gpus, memory_utilization=of.plan.utilization)


def steps_of(profile: Profile, counts: ParameterCounts) -> StepModel:
    """Return the step times. A mixture of experts computes what a token passes, and reads all its experts at any batch."""
    if counts.active == counts.total:
        return steps_of_profile(profile)
    computed = replace(profile.model, num_parameters=counts.active)
    computes = steps_of_profile(replace(profile, model=computed))
    fast = replace(profile.accelerator, flops_per_s=_UNLIMITED)
    reads = steps_of_profile(replace(profile, accelerator=fast))
    return lambda decodes, kv, prefill: max(computes(decodes, kv, prefill), reads(decodes, kv, prefill))


def hardware_of(shape: Architecture, counts: ParameterCounts, of: Fit, tokens: int) -> Hardware:
    """Return a simulated replica whose KV cache holds as many requests of ``tokens`` as the GPUs of ``of`` do."""
    plan = of.plan
    stage, shared = stages_of(shape, plan.stages)[of.stage - 1], of.num_gpus // plan.stages
    held = kv_bytes_of_request(
        stage, tokens, element=plan.kv_element, num_gpus=shared, step_tokens=plan.step_tokens, stages=plan.stages
    )
    return Hardware(
        step_s=steps_of(profile_of(shape, counts, of), counts),
        kv_tokens=int(of.kv_bytes / held * tokens),
        max_num_seqs=plan.max_seqs,
        max_batched_tokens=plan.step_tokens,
    )


def replicas_for(shape: Architecture, counts: ParameterCounts, of: Fit, load: Load) -> Replicas | None:
    """Return the replicas for a load on GPUs that hold a request of its length; None if the engine's limits hide what a token costs."""
    tokens = load.prompt_tokens + load.answer_tokens
    hardware = hardware_of(shape, counts, of, tokens)
    max_batch = max(1.0, min(of.plan.max_seqs, KV_GUARD * hardware.kv_tokens / tokens))
    measured = hardware.measured()
    if measured is None:
        return None
    times = StepTimes(measured.step_s, measured.output_token_s, measured.prompt_token_s)
    mix = Mix(prompt_tokens=float(load.prompt_tokens), output_tokens=float(load.answer_tokens))
    capacity = Capacity(times=times, mix=mix, max_batch=max_batch, slo=load.slo)
    missed = tuple(name for name, batch in capacity.slo_batches().items() if batch < 1)
    capacity = replace(capacity, left_out=frozenset(missed))
    demand = load.requests_per_s * capacity.work_s
    num = max(1, capacity.replicas_for(demand, load.utilization), capacity.replicas_with_room(demand, load.headroom))
    token_s, batch = _steady(capacity, demand / num)
    return Replicas(
        num=num,
        most_per_replica=capacity.saturation() / capacity.work_s,
        prompt_s=hardware.step_s(0, 0, load.prompt_tokens),
        token_s=token_s,
        batch=batch,
        missed=missed,
    )


def _steady(capacity: Capacity, utilization: float) -> tuple[float, float]:
    """Return seconds between two tokens and the mean batch, of the birth-death process in `serve_app/autoscaling/capacity.py`."""
    per_token_s = capacity.work_s / max(1.0, capacity.mix.output_tokens)
    batch = (capacity.times.step_s / per_token_s + 1) * utilization / (1 - min(utilization, 0.99))
    return capacity.times.step_s + batch * per_token_s, batch
