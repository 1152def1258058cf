"""`estimate` answers `serve-app fit` for one model: it joins memory, pods, nodes and replicas, and the error of each. Pure."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_app.errors import ConfigError
from serve_app.simulated.profiles import Accelerator
from serve_app.sizing.adapters import COMPARED, DEFAULT_RANK, Places
from serve_app.sizing.architecture import FAMILIES, MOST_TOKENS, Architecture
from serve_app.sizing.fits import (
    DEFAULT_UTILIZATION,
    GIB,
    Fit,
    Plan,
    batch_defaults,
    can_share,
    fit,
    least_fit,
    reserve_error_gib,
    shared_by,
    ways_out,
)
from serve_app.sizing.kv_memory import kv_bytes_of_request, kv_element_bytes
from serve_app.sizing.nodes import Nodes, PodSizes, nodes_for, pod_sizes
from serve_app.sizing.quantization import online_quantization
from serve_app.sizing.rate import Load, Replicas, replicas_for
from serve_app.sizing.weights import ParameterCounts, TensorBytes, element_bytes, parameters_of, weight_bytes

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_MOST = 2**50
_LEFT_OUT = (
    "speculative_config",
    "fully_sharded_loras",
    "lora_target_modules",
    "cpu_offload_gb",
    "hf_overrides",
    "kv_offloading_size",
)
"""Engine arguments that change memory and are not counted."""


_NO_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Families that vLLM computes in 32 bits where there is no bfloat16; others it computes in float16 there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked about a model."""

    accelerator: Accelerator
    num_gpus: int | None = None
    """On all nodes together. None: the fewest on which the context fits."""
    num_nodes: int = 1
    context: int | None = None
    """None: `engine_args.max_model_len`, else what vLLM takes by itself."""
    engine_args: Mapping[str, Any]
    load: Load | None = None
    offload_gib: float = 0.0
    """`kv.offload_gib`."""
    pod: PodSizes | None = None
    """None: as the chart makes it when values say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The answer about one model."""

    shape: Architecture
    counts: ParameterCounts
    weight_bytes: int
    """Bytes in the memory of all GPUs together, before any is held twice."""
    checkpoint_bytes: int
    """Bytes of the files."""
    is_from_files: bool
    fit: Fit
    ways_out: tuple[str, ...]
    """What would make it fit; empty if it fits, or nothing known would."""
    pod: PodSizes
    offload_bytes: int
    """Memory of the pod that keeps KV."""
    load: Load | None
    replicas: Replicas | None
    """The replicas for the load; None without one, or if the model does not fit."""
    nodes: tuple[Nodes, ...]
    """Types of nodes for the replicas, the cheapest first."""
    notes: tuple[str, ...]

    @property
    def offload_tokens(self) -> int:
        """The tokens whose KV the pod's memory keeps, in requests of the context's length."""
        of, plan = self.fit, self.fit.plan
        shared = of.num_gpus // plan.stages
        held = kv_bytes_of_request(
            self.shape,
            of.context,
            element=plan.kv_element,
            num_gpus=shared,
            step_tokens=plan.step_tokens,
            stages=plan.stages,
        )
        return self.offload_bytes * of.context // max(1, held * shared)

    @property
    def weight_error(self) -> str:
        if self.is_from_files:
            return "exact: from the weights' files"
        if self.shape.family not in FAMILIES:
            return "unknown: this architecture is counted like a Llama"
        return "up to 15 %: layers left in 16 bits" if self.shape.quantization else "below 1 %"

    @property
    def adapter_error(self) -> str:
        return "exact" if self.shape.family in COMPARED else "not compared with vLLM's"

    @property
    def kv_error(self) -> str:
        return "up to 15 %" if self.shape.num_sliding_layers or self.shape.num_stateful_layers else "exact"

    @property
    def reserve_error(self) -> str:
        return f"up to {reserve_error_gib(self.shape, self.fit.num_gpus)} GiB"


def tokens_of(text: str | int, where: str) -> int:
    """Return a number of tokens, written as vLLM takes it: 16384, 16k (16,000) or 16K (16,384).

    Raises:
        ConfigError: It is no such number, or outside of 1 to 2**30.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kmKM]?)", str(text))
    tokens = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise ConfigError(where, f"is {str(text)[:40]!r}", "give tokens such as 16384, 16k (16,000) or 16K (16,384)")
    return tokens


def estimate(shape: Architecture, files: TensorBytes | None, wish: Wish) -> Estimate:
    """Return the answer for a model of this shape.

    Args:
        files: What the weights' files hold; None if they are not there.

    Raises:
        ConfigError: A value of the wish is wrong: the context is longer than the model allows, or the number of GPUs does not divide its
            heads, or an engine argument has a type whose size is unknown.
    """
    args, accelerator = wish.engine_args, wish.accelerator
    context = _context(shape, wish)
    if context > shape.max_tokens:
        note = f"the file allows {shape.max_tokens:,} tokens: whether hf_overrides allow more is not checked"
        shape = replace(shape, max_tokens=context, notes=(*shape.notes, note))
    counts = parameters_of(shape)
    plan = _plan(shape, accelerator, args, context)
    online = online_quantization(str(args.get("quantization") or ""))
    weights = weight_bytes(shape, counts, element=plan.element, files=files, online=online)
    stages = plan.stages
    if wish.num_gpus is not None:
        check_gpus(shape, wish.num_gpus, wish.num_nodes, stages)
        found = fit(shape, counts, weights, accelerator, wish.num_gpus, context, plan, wish.num_nodes)
    else:
        check_gpus(shape, math.lcm(wish.num_nodes, stages), wish.num_nodes, stages)
        most = max(shared_by(shape, wish.num_nodes, stages))
        least = least_fit(shape, counts, weights, accelerator, context, plan, wish.num_nodes)
        found = least or fit(shape, counts, weights, accelerator, most, context, plan, wish.num_nodes)
    if _is_to_memory(wish) and 0 < found.longest_context < context:
        found = fit(shape, counts, weights, accelerator, found.num_gpus, found.longest_context, plan, wish.num_nodes)
    if (
        not shape.is_encoder
        and wish.load is not None
        and (tokens := wish.load.prompt_tokens + wish.load.answer_tokens) > found.context
    ):
        problem = f"prompt and answer are {tokens} tokens, and the longest request has {found.context}"
        raise ConfigError("--prompt", problem, "lower --prompt or --answer, or raise --context")
    replicas = None
    if wish.load is not None and found.fits and not shape.is_encoder:
        replicas = replicas_for(shape, counts, found, wish.load)
    per_pod = found.num_gpus // found.num_nodes
    pod = wish.pod or pod_sizes(per_pod, wish.offload_gib)
    stored = files.file_bytes if files is not None else weight_bytes(shape, counts, element=4 if shape.dtype == "float32" else 2)
    return Estimate(
        shape=shape,
        counts=counts,
        weight_bytes=weights,
        checkpoint_bytes=stored,
        is_from_files=files is not None,
        fit=found,
        ways_out=() if found.fits else tuple(ways_out(shape, counts, weights, found)),
        pod=pod,
        offload_bytes=int(wish.offload_gib * GIB),
        load=wish.load,
        replicas=replicas,
        nodes=tuple(nodes_for(accelerator.name, per_pod, pod, replicas.num if replicas else 1, nodes_each=found.num_nodes)),
        notes=(*shape.notes, *_notes(shape, wish, found, replicas)),
    )


def _is_to_memory(wish: Wish) -> bool:
    """Return whether vLLM shortens the context to what its memory holds."""
    return wish.context is None and wish.engine_args.get("max_model_len") in (-1, "-1", "auto")


def _context(shape: Architecture, wish: Wish) -> int:
    context, where = wish.context, "--context"
    if context is None:
        given = wish.engine_args.get("max_model_len")
        where = "engine_args.max_model_len"
        context = shape.default_tokens if given is None or _is_to_memory(wish) else tokens_of(str(given), where)
    if context > shape.max_tokens and not wish.engine_args.get("hf_overrides"):
        raise ConfigError(where, f"is {context}, and the model's config.json allows {shape.max_tokens}", "give at most that")
    return context


def check_gpus(shape: Architecture, num_gpus: int, num_nodes: int, stages: int = 1) -> None:
    """Refuse a number of GPUs that cannot share the model.

    Raises:
        ConfigError: The nodes or stages do not divide the GPUs, a stage has no layer, or its GPUs do not divide the model's heads.
    """
    if stages > shape.num_layers:
        problem = f"is {stages}, and the model has {shape.num_layers} layers"
        raise ConfigError("engine_args.pipeline_parallel_size", problem, "give each stage a layer or more")
    if num_gpus % num_nodes:
        problem = f"is {num_gpus} on {num_nodes} nodes"
        raise ConfigError("--gpus, or gpus_per_replica", problem, "each node holds the same number: give a multiple of the nodes")
    if num_gpus % stages:
        problem = f"is {num_gpus} and pipeline_parallel_size is {stages}"
        raise ConfigError("--gpus, or gpus_per_replica", problem, "each stage has the same number: give a multiple of the stages")
    if not can_share(shape, num_gpus // stages):
        possible = ", ".join(str(stages * n) for n in sorted({*shared_by(shape), *shared_by(shape, num_nodes)}))
        problem = f"is {num_gpus}, and the model has {shape.num_heads} attention heads and {shape.num_kv_heads} KV heads"
        raise ConfigError("--gpus, or gpus_per_replica", problem, f"vLLM splits them evenly: possible are {possible}")


def _plan(shape: Architecture, accelerator: Accelerator, args: Mapping[str, Any], context: int) -> Plan:
    step_tokens, max_seqs = batch_defaults(accelerator)
    dtype = str(args.get("dtype") or "auto")
    if dtype == "auto" and accelerator.name == "t4" and shape.family in _NO_FLOAT16:
        dtype = "float32"
    element = element_bytes(dtype)
    utilization = args.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0 < utilization <= 1:
        raise ConfigError("engine_args.gpu_memory_utilization", f"is {utilization!r}", "give a share above 0, at most 1")
    return Plan(
        utilization=float(utilization),
        kv_element=kv_element_bytes(shape, element, str(args.get("kv_cache_dtype") or "auto")),
        element=element,
        step_tokens=_step_tokens(shape, args, context, step_tokens),
        max_seqs=_whole(args, "max_num_seqs") or max_seqs,
        has_graphs=not args.get("enforce_eager"),
        kv_bytes=_whole(args, "kv_cache_memory_bytes"),
        adapters=_places(args) if args.get("enable_lora") else None,
        stages=_whole(args, "pipeline_parallel_size") or 1,
    )


def _step_tokens(shape: Architecture, args: Mapping[str, Any], context: int, default: int) -> int:
    given = _whole(args, "max_num_batched_tokens")
    if not shape.is_encoder:
        return given or default
    if given is not None and given < context:  # vLLM computes a text of an encoder in one step, and refuses this
        problem = f"is {given}, and a text of {context} tokens is computed in one step"
        raise ConfigError("engine_args.max_num_batched_tokens", problem, f"give at least {context}, or a shorter context")
    return given or max(default, context)


def _places(args: Mapping[str, Any]) -> Places:
    return Places(
        num=_whole(args, "max_loras") or 1,
        rank=_whole(args, "max_lora_rank") or DEFAULT_RANK,
        experts_apart=bool(args.get("enable_expert_parallel")),
    )


def _whole(args: Mapping[str, Any], name: str) -> int | None:
    """Return an engine argument that is a number of things, None if it is not given; anything else is a ConfigError."""
    value = args.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST):
        raise ConfigError(f"engine_args.{name}", f"is {str(value)[:40]!r}", "give a whole number above 0")
    return value


def _notes(shape: Architecture, wish: Wish, found: Fit, replicas: Replicas | None) -> Iterator[str]:
    spare = found.kv_bytes - (0 if _is_to_memory(wish) else found.request_bytes)
    if found.fits and spare < reserve_error_gib(shape, found.num_gpus) * GIB:
        yield "it fits by less than the error of the reserve: measure it before you rely on it"
    if left := [name for name in _LEFT_OUT if wish.engine_args.get(name)]:
        yield f"left out: {', '.join(left)}"
    method = str(wish.engine_args.get("quantization") or "")
    if method and shape.quantization is None and online_quantization(method) is None:
        yield f"quantization {method} counts only if the checkpoint is quantized already"
    if wish.accelerator.name == "t4" and str(wish.engine_args.get("dtype")).lower() == "bfloat16":
        yield "a T4 does not run bfloat16: leave dtype out"
    if found.num_nodes > 1:
        yield f"no engine over {found.num_nodes} nodes was measured: reserve and times leave out the network between them"
    if replicas is not None and (stages := found.plan.stages) > 1:
        yield f"times are those of GPUs that share every layer: in {stages} stages a token takes up to {stages} times longer"
    if shape.is_encoder and wish.load is not None:
        yield "the rate is not computed for an encoder: measure one replica (docs/loadtest.md)"
    elif wish.load is not None and found.fits and replicas is None:
        yield "replicas: the limits of the engine leave too few batches to tell its costs apart"
    if replicas is not None and replicas.missed:
        yield f"even one request alone breaks the limit of {', '.join(replicas.missed)}: more replicas do not help"
