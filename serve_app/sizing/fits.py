"""This module puts a model on one or more GPUs of a kind: what is left for the KV cache, and which contexts fit. Pure.

    KV = (memory - HIDDEN_BYTES) x gpu_memory_utilization - weights - adapters - reserve        on each GPU

Of a model in pipeline stages, the stage whose KV cache holds the fewest requests decides.

The reserve is what vLLM measures at its start as activations, CUDA graphs and memory outside of torch. It is estimated here
(`reserve_bytes`), and `reserve_error_gib` says how well.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serve_app.errors import ConfigError
from serve_app.simulated.profiles import ACCELERATORS, MIB, Accelerator
from serve_app.sizing.adapters import Places
from serve_app.sizing.architecture import Architecture
from serve_app.sizing.kv_memory import kv_bytes_of_request, longest_context
from serve_app.sizing.stages import stages_of
from serve_app.sizing.weights import ParameterCounts, bytes_of_stage, bytes_on_each_gpu, parameters_of

GIB = 2**30
HIDDEN_BYTES = 512 * MIB
"""Memory that nvidia-smi counts and CUDA does not give: 0.5 GiB of an A100 of 40 GB, of which a log of vLLM has 39.50, and 0.6 of an
H200, of which it has 139.8."""
NON_TORCH_BYTES, NCCL_BYTES = 256 * MIB, 512 * MIB
"""Memory outside of torch: 0.05 to 0.35 GiB on one GPU in logs of vLLM; more for NCCL where several GPUs share a model."""
GRAPH_BYTES = 768 * MIB
"""CUDA graphs: vLLM reports 0.50 to 0.75 GiB."""
GPU_NUMBERS = (1, 2, 4, 8)
"""GPUs of a replica on each of its nodes; of the fewest that its nodes and stages can share, the multiples."""
NODE_NUMBERS = (2, 4)
DEFAULT_UTILIZATION: float = 0.92
"""As `Profile.memory_utilization`: the default of vLLM 0.32's gpu_memory_utilization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The engine settings that memory depends on."""

    utilization: float = DEFAULT_UTILIZATION
    kv_element: int = 2
    """Bytes of a number in the KV cache."""
    element: int = 2
    """Bytes of an unquantized weight and of an activation."""
    step_tokens: int
    """`max_num_batched_tokens`."""
    max_seqs: int
    has_graphs: bool = True
    kv_bytes: int | None = None
    """`kv_cache_memory_bytes`, which replaces what is left of the utilization."""
    adapters: Places | None = None
    """None: the engine takes no LoRA adapters."""
    stages: int = 1
    """`pipeline_parallel_size`. The GPUs of a stage share each of its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model on ``num_gpus`` GPUs. Bytes are those of each GPU, with several stages of that which decides."""

    accelerator: Accelerator
    num_gpus: int
    num_nodes: int = 1
    """Nodes that share the GPUs evenly."""
    stage: int = 1
    """The pipeline stage that decides, counted from 1."""
    plan: Plan
    context: int
    """Tokens of the longest request that is wanted."""
    weight_bytes: int
    adapter_bytes: int
    """Places for LoRA adapters."""
    reserve_bytes: int
    kv_bytes: int
    """Bytes of the KV cache; 0 if nothing is left."""
    longest_context: int
    request_bytes: int
    """KV of one request of ``context`` tokens."""

    @property
    def fits(self) -> bool:
        """Whether vLLM starts: the cache holds one request of the wanted context."""
        return self.kv_bytes >= self.request_bytes and self.kv_bytes > 0

    @property
    def concurrency(self) -> int:
        """Requests of the whole context that the cache holds at once, at most `Plan.max_seqs`."""
        return min(self.plan.max_seqs, int(self.requests))

    @property
    def requests(self) -> float:
        """Requests of the whole context that the KV cache has room for. A stage of linear attention alone holds no KV."""
        return self.kv_bytes / max(1, self.request_bytes)


def accelerator_named(name: str) -> Accelerator:
    """Return the accelerator of a name such as ``l4``, ``A100-80GB`` or ``a100-80g``.

    Raises:
        ConfigError: It is not known. The hint lists the known ones.
    """
    plain = name.lower().replace("_", "-").removeprefix("nvidia-")
    for known in (plain, f"{plain}b", f"{plain}gb"):
        if known in ACCELERATORS:
            return ACCELERATORS[known]
    raise ConfigError("--gpu", f"{name!r} is not known", f"known are {', '.join(sorted(ACCELERATORS))}")


def batch_defaults(accelerator: Accelerator) -> tuple[int, int]:
    """Return the `max_num_batched_tokens` and `max_num_seqs` that vLLM 0.32 takes on this accelerator (docs/models.md)."""
    visible = accelerator.memory_bytes - HIDDEN_BYTES
    if visible >= 160 * GIB:
        return 16384, 1024
    if visible >= 70 * GIB and not accelerator.name.startswith("a100"):
        return 8192, 1024
    return 2048, 256


def reserve_bytes(shape: Architecture, plan: Plan, num_gpus: int) -> int:
    """Return the memory of each GPU that neither weights nor KV take: activations of the longest step, logits, graphs and the rest."""
    inner = 2 * shape.intermediate_size // num_gpus
    if (moe := shape.experts) is not None:  # each token is copied once for each of its experts
        inner = moe.per_token * (shape.hidden_size + 2 * moe.size // num_gpus) + 2 * moe.shared_size // num_gpus
    activations = plan.step_tokens * (6 * shape.hidden_size + inner) * plan.element
    logits = min(plan.max_seqs, plan.step_tokens) * shape.vocab_size * 8  # as 32-bit floats, and a copy of them for sampling
    logits = logits if shape.is_last and not shape.is_encoder else 0
    fixed = NON_TORCH_BYTES + (GRAPH_BYTES if plan.has_graphs else 0) + (NCCL_BYTES if num_gpus * plan.stages > 1 else 0)
    return activations + logits + fixed


def reserve_error_gib(shape: Architecture, num_gpus: int) -> int:
    """Return the largest error of `reserve_bytes` seen on a GPU. Source: the logs of vLLM in tests/sizing/test_published_logs.py."""
    if shape.experts is not None:
        return 6
    return 1 if num_gpus == 1 else 3


def can_share(shape: Architecture, num_gpus: int) -> bool:
    """Return whether vLLM splits the model over so many GPUs: it divides attention heads evenly."""
    kv = shape.num_kv_heads
    return shape.num_heads % num_gpus == 0 and (shape.latent is not None or kv % num_gpus == 0 or num_gpus % kv == 0)


def fit(
    shape: Architecture,
    counts: ParameterCounts,
    weights: int,
    accelerator: Accelerator,
    num_gpus: int,
    context: int,
    plan: Plan,
    num_nodes: int = 1,
) -> Fit:
    """Return how a model of ``weights`` bytes lies on ``num_gpus`` GPUs, of all its nodes and stages together."""
    found = []
    for number, stage in enumerate(stages_of(shape, plan.stages), start=1):
        part, own = counts, weights
        if plan.stages > 1:
            part = parameters_of(stage)
            own = bytes_of_stage(part, counts, weights, plan.element)
        of_stage = _fit_of_stage(stage, part, own, accelerator, num_gpus // plan.stages, context, plan)
        found.append(replace(of_stage, num_gpus=num_gpus, num_nodes=num_nodes, stage=number))
    return replace(min(found, key=lambda each: each.requests), longest_context=min(each.longest_context for each in found))


def _fit_of_stage(
    shape: Architecture,
    counts: ParameterCounts,
    weights: int,
    accelerator: Accelerator,
    num_gpus: int,
    context: int,
    plan: Plan,
) -> Fit:
    own = bytes_on_each_gpu(shape, counts, weights, num_gpus)
    reserve = reserve_bytes(shape, plan, num_gpus)
    adapters = plan.adapters.bytes_on_each_gpu(shape, plan.element, num_gpus) if plan.adapters else 0
    taken = own + adapters + reserve
    left = int((accelerator.memory_bytes - HIDDEN_BYTES) * plan.utilization) - taken
    if plan.kv_bytes is not None:
        left = plan.kv_bytes if taken + plan.kv_bytes <= accelerator.memory_bytes - HIDDEN_BYTES else 0
    kv = max(0, left)
    of = {"element": plan.kv_element, "num_gpus": num_gpus, "step_tokens": plan.step_tokens, "stages": plan.stages}
    return Fit(
        accelerator=accelerator,
        num_gpus=num_gpus,
        plan=plan,
        context=context,
        weight_bytes=own,
        adapter_bytes=adapters,
        reserve_bytes=reserve,
        kv_bytes=kv,
        longest_context=longest_context(shape, kv, **of),
        request_bytes=kv_bytes_of_request(shape, context, **of),
    )


def least_fit(
    shape: Architecture,
    counts: ParameterCounts,
    weights: int,
    accelerator: Accelerator,
    context: int,
    plan: Plan,
    num_nodes: int = 1,
) -> Fit | None:
    """Return the fit on the fewest GPUs that hold a request of ``context`` tokens; None if 8 on each node do not."""
    tries = (
        fit(shape, counts, weights, accelerator, n, context, plan, num_nodes) for n in shared_by(shape, num_nodes, plan.stages)
    )
    return next((found for found in tries if found.fits), None)


def shared_by(shape: Architecture, num_nodes: int = 1, stages: int = 1) -> list[int]:
    """Return the numbers of GPUs on so many nodes that can share the model in so many stages, in ascending order."""
    least = math.lcm(num_nodes, stages)
    most = max(least, GPU_NUMBERS[-1] * num_nodes)
    return [number for n in GPU_NUMBERS if (number := n * least) <= most and can_share(shape, number // stages)]


def ways_out(shape: Architecture, counts: ParameterCounts, weights: int, of: Fit) -> Iterator[str]:
    """Yield what would make a model fit that does not: a shorter context, more GPUs, fewer bits, another kind of GPU."""
    if of.longest_context and not shape.is_encoder:
        yield f"a context of {of.longest_context:,} tokens"
    if more := least_fit(shape, counts, weights, of.accelerator, of.context, of.plan):
        yield f"{more.num_gpus} x {of.accelerator.name}"
    else:
        tries = (
            least_fit(shape, counts, weights, of.accelerator, of.context, of.plan, n) for n in NODE_NUMBERS if n > of.num_nodes
        )
        if wide := next(filter(None, tries), None):
            yield f"{wide.num_gpus} x {of.accelerator.name} on {wide.num_nodes} nodes"
    if of.plan.kv_element > 1:
        smaller = replace(of.plan, kv_element=1)
        if fit(shape, counts, weights, of.accelerator, of.num_gpus, of.context, smaller).fits:
            yield "kv_cache_dtype: fp8"
    if shape.quantization is None:
        for name, share in (("FP8", 8 / 16), ("4-bit (AWQ, GPTQ)", 4.15 / 16)):
            fewer = weights - int(counts.linear * of.plan.element * (1 - share))
            if fewer < weights and fit(shape, counts, fewer, of.accelerator, of.num_gpus, of.context, of.plan).fits:
                yield f"{name} weights"
                break
    larger = [other for other in ACCELERATORS.values() if other.memory_bytes > of.accelerator.memory_bytes]
    fitting = [found for other in larger if (found := least_fit(shape, counts, weights, other, of.context, of.plan))]
    if fitting:
        best = min(fitting, key=lambda found: (found.num_gpus, found.accelerator.memory_bytes))
        yield f"{best.num_gpus} x {best.accelerator.name}"
