"""A profile combines an accelerator and a model shape: the hardware that is simulated.

Pure data. Every number has its source beside it; a number without one is called an assumption and can be overridden. Accelerator memory is
the total that the driver reports (`nvidia-smi`), less than the name says: ECC takes a part. Peak FLOP/s are dense (without sparsity),
16-bit, with 32-bit accumulation where the datasheet distinguishes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from serve_app.errors import ConfigError

MIB = 2**20
PATH = "simulated.profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device. The efficiencies are the shares of the datasheet's peaks that a serving engine reaches."""

    name: str = "custom"
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    host_bandwidth_bytes_per_s: float = 31.5e9
    """To and from the host's memory. PCI Express 4.0, x16: 16 lanes of 16 GT/s, of which the encoding leaves 128 bits of 130."""
    bandwidth_efficiency: float = 0.8
    """Assumption: weights and KV are streamed in long runs; hand-written kernels reach 0.9, small models less."""
    compute_efficiency: float = 0.5
    """Assumption: FLOP utilization of a prefill of some thousand tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One dense decoder-only transformer, as its config.json describes it."""

    name: str = "custom"
    num_parameters: int
    lookup_parameters: int = 0
    """Those of ``num_parameters`` that are only looked up by row: token embeddings not shared with the output layer, positions."""
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    bytes_per_parameter: float = 2.0
    """2: bfloat16 or float16. 1: 8-bit weights; 0.5: 4-bit weights."""
    bytes_per_kv_element: int = 2
    """2: bfloat16 or float16. 1: 8-bit KV cache."""

    @property
    def streamed_bytes(self) -> float:
        """Weight bytes that every step reads, however small its batch."""
        return (self.num_parameters - self.lookup_parameters) * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.bytes_per_kv_element


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on one or more accelerators of one node."""

    name: str = "custom"
    accelerator: Accelerator
    model: ModelShape
    num_accelerators: int = 1
    """Tensor parallel size. Memory adds up; so do bandwidth and FLOP/s, times parallel_efficiency if above 1."""
    parallel_efficiency: float = 0.85
    """Assumption: share of the added bandwidth and FLOP/s left after the all-reduces of each layer."""
    memory_utilization: float = 0.92
    """Share of the memory the engine may use. Source: default of vLLM 0.32's gpu_memory_utilization."""
    workspace_bytes: int = 512 * MIB
    """Assumption: activations and graphs on each accelerator, inside the share above."""
    step_overhead_s: float = 0.001
    """Assumption: seconds of every step that overlap with nothing: launch, sampling, copying the token ids out."""

    @property
    def kv_cache_bytes(self) -> int:
        """Memory left for the KV cache: usable memory minus weights minus workspace, at least 0."""
        usable = int(self.accelerator.memory_bytes * self.memory_utilization) - self.workspace_bytes
        weights = int(self.model.num_parameters * self.model.bytes_per_parameter)
        return max(0, usable * self.num_accelerators - weights)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self.kv_cache_bytes // self.model.kv_bytes_per_token


_PCIE_3, _PCIE_5 = 15.75e9, 63.0e9  # x16, as above with 8 and 32 GT/s

B200 = Accelerator(
    name="b200",
    memory_bytes=183_359 * MIB,  # nvidia-smi, B200 (HGX)
    bandwidth_bytes_per_s=8.0e12,  # NVIDIA DGX B200 datasheet: 64 TB/s for 8 GPUs
    flops_per_s=2250e12,  # NVIDIA Blackwell datasheet, HGX B200: BF16 4.5 PFLOPS with sparsity, half of it dense
    host_bandwidth_bytes_per_s=_PCIE_5,  # NVIDIA B200 datasheet: PCIe Gen5
)
H200 = Accelerator(
    name="h200",
    memory_bytes=143_771 * MIB,  # nvidia-smi, H200 141GB HBM3e
    bandwidth_bytes_per_s=4.8e12,  # NVIDIA H200 datasheet, SXM: 4.8 TB/s
    flops_per_s=989.4e12,  # NVIDIA H200 datasheet, SXM: as the H100
    host_bandwidth_bytes_per_s=_PCIE_5,  # NVIDIA H200 datasheet: PCIe Gen5
)
H100 = Accelerator(
    name="h100",
    memory_bytes=81_559 * MIB,  # nvidia-smi, H100 80GB HBM3
    bandwidth_bytes_per_s=3.35e12,  # NVIDIA H100 datasheet, SXM5: 3.35 TB/s
    flops_per_s=989.4e12,  # NVIDIA H100 datasheet, SXM5: BF16 1,979 TFLOPS with sparsity, half of it dense
    host_bandwidth_bytes_per_s=_PCIE_5,  # NVIDIA H100 datasheet: PCIe Gen5
)
A100_80GB = Accelerator(
    name="a100-80gb",
    memory_bytes=81_920 * MIB,  # nvidia-smi, A100-SXM4-80GB
    bandwidth_bytes_per_s=2.039e12,  # NVIDIA A100 datasheet, 80 GB SXM: 2,039 GB/s
    flops_per_s=312e12,  # NVIDIA A100 datasheet: BF16 312 TFLOPS dense
)
A100_40GB = Accelerator(
    name="a100-40gb",
    memory_bytes=40_960 * MIB,  # nvidia-smi, A100-SXM4-40GB
    bandwidth_bytes_per_s=1.555e12,  # NVIDIA A100 datasheet, 40 GB: 1,555 GB/s
    flops_per_s=312e12,  # NVIDIA A100 datasheet: BF16 312 TFLOPS dense
)
L40S = Accelerator(
    name="l40s",
    memory_bytes=46_068 * MIB,  # nvidia-smi, L40S 48 GB
    bandwidth_bytes_per_s=864e9,  # NVIDIA L40S datasheet: 864 GB/s
    flops_per_s=362.05e12,  # NVIDIA L40S datasheet: BF16 362.05 TFLOPS dense
)
L4 = Accelerator(
    name="l4",
    memory_bytes=23_034 * MIB,  # nvidia-smi, L4 24 GB
    bandwidth_bytes_per_s=300e9,  # NVIDIA L4 datasheet: 300 GB/s
    flops_per_s=121e12,  # NVIDIA L4 datasheet: BF16 242 TFLOPS with sparsity, half of it dense
)
A10G = Accelerator(
    name="a10g",
    memory_bytes=23_028 * MIB,  # nvidia-smi, A10G 24 GB in AWS g5 instances
    bandwidth_bytes_per_s=600e9,  # NVIDIA A10G datasheet: 600 GB/s
    flops_per_s=70e12,  # NVIDIA A10G datasheet: FP16 tensor core 70 TFLOPS dense (the A10 has 125)
)
T4 = Accelerator(
    name="t4",
    memory_bytes=15_360 * MIB,  # nvidia-smi, Tesla T4 16 GB
    bandwidth_bytes_per_s=320e9,  # NVIDIA T4 datasheet: 320 GB/s
    flops_per_s=65e12,  # NVIDIA T4 datasheet: FP16 mixed precision 65 TFLOPS
    host_bandwidth_bytes_per_s=_PCIE_3,  # NVIDIA T4 datasheet: PCIe Gen3 x16
    bandwidth_efficiency=0.69,  # arXiv 1903.07486 (microbenchmarks of the T4): 220 of 320 GB/s measured
    compute_efficiency=0.4,  # assumption: the 70 W limit throttles its clock under matrix multiplication (same paper)
)

LLAMA_8B = ModelShape(
    name="llama-8b",  # Llama 3 and 3.1 8B: model card and config.json
    num_parameters=8_030_261_248,
    lookup_parameters=525_336_576,  # 128,256 x 4,096, not shared with the output layer
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=8,
    head_size=128,
)
LLAMA_7B = ModelShape(
    name="llama-7b",  # Llama 2 7B: model card and config.json
    num_parameters=6_738_415_616,
    lookup_parameters=131_072_000,  # 32,000 x 4,096
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=32,
    head_size=128,
)
LLAMA_13B = ModelShape(
    name="llama-13b",  # Llama 2 13B: model card and config.json
    num_parameters=13_015_864_320,
    lookup_parameters=163_840_000,  # 32,000 x 5,120
    num_layers=40,
    num_attention_heads=40,
    num_kv_heads=40,
    head_size=128,
)
OPT_13B = ModelShape(
    name="opt-13b",  # facebook/opt-13b: config.json
    num_parameters=12_853_473_280,
    lookup_parameters=10_496_000,  # positions, 2,050 x 5,120; token embeddings are shared with the output layer
    num_layers=40,
    num_attention_heads=40,
    num_kv_heads=40,
    head_size=128,
)
GEMMA_2B = ModelShape(
    name="gemma-2b",  # google/gemma-2b: config.json; embeddings are shared with the output layer
    num_parameters=2_506_172_416,
    num_layers=18,
    num_attention_heads=8,
    num_kv_heads=1,
    head_size=256,
)

ACCELERATORS = {a.name: a for a in (B200, H200, H100, A100_80GB, A100_40GB, L40S, A10G, L4, T4)}
MODELS = {m.name: m for m in (LLAMA_8B, LLAMA_7B, LLAMA_13B, OPT_13B, GEMMA_2B)}
PROFILES = {
    f"{accelerator.name}-{model.name}": Profile(name=f"{accelerator.name}-{model.name}", accelerator=accelerator, model=model)
    for accelerator, model in (
        (H100, LLAMA_8B),
        (A10G, LLAMA_8B),
        (A10G, LLAMA_7B),
        (A100_40GB, OPT_13B),  # the setting of Anyscale's continuous batching study
        (A100_40GB, LLAMA_13B),
        (T4, GEMMA_2B),
    )
}

_SHARES = {"bandwidth_efficiency", "compute_efficiency", "parallel_efficiency", "memory_utilization"}
_NUMBER = "give a number; with an exponent YAML needs a dot and a sign, as in 3.0e+11"
_MAY_BE_ZERO = {"lookup_parameters", "workspace_bytes", "step_overhead_s", "latency_us"}


def profile_from(value: str | Mapping[str, Any]) -> Profile:
    """Return a named profile, or a profile built from a mapping.

    A mapping has the fields of `Profile`; ``accelerator`` and ``model`` are names or mappings of their own fields.

    Raises:
        ConfigError: An unknown name or field, a value outside its range, or weights that leave no room for KV.
    """
    if isinstance(value, str):
        return named(PROFILES, value, PATH)
    parts = dict(value)
    for key, known, kind in (("accelerator", ACCELERATORS, Accelerator), ("model", MODELS, ModelShape)):
        part = parts.get(key)
        if isinstance(part, str):
            parts[key] = named(known, part, f"{PATH}.{key}")
        elif part is not None:
            parts[key] = built(kind, part, f"{PATH}.{key}")
    profile: Profile = built(Profile, parts, PATH)
    if profile.kv_cache_tokens == 0:
        problem = f"the weights of {profile.model.name} leave no memory for the KV cache on {profile.accelerator.name}"
        raise ConfigError(PATH, problem, "raise num_accelerators or lower model.bytes_per_parameter")
    return profile


def named(known: Mapping[str, Any], name: str, path: str) -> Any:
    """Return the entry of that name; ConfigError names the known ones."""
    if name not in known:
        raise ConfigError(path, f"unknown name {name!r}", f"known are {', '.join(sorted(known))}, or give a mapping")
    return known[name]


def built(kind: type[Any], values: object, path: str) -> Any:
    """Return ``kind(**values)`` after checking names, types and ranges of the fields, which are numbers, texts or given objects.

    Raises:
        ConfigError: A field is unknown, missing or out of its range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(path, f"is {values!r}", "give a name or a mapping")
    types = {f.name: f.type for f in fields(kind)}
    for name, value in values.items():
        if name not in types:
            raise ConfigError(f"{path}.{name}", "unknown field", f"known are {', '.join(types)}")
        _check(name, value, types[name], f"{path}.{name}")
    try:
        return kind(**values)
    except TypeError as exc:  # names and types are checked, so that only a missing field is left
        raise ConfigError(path, str(exc).partition("() ")[2], f"fields are {', '.join(types)}") from exc


def _check(name: str, value: object, kind: object, path: str) -> None:
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            raise ConfigError(path, f"is {value!r}", "give a whole number" if kind is int else _NUMBER)
        if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            raise ConfigError(path, f"is {value!r}", "must not be negative" if value else "must be above 0")
        if not value < float("inf") or (name in _SHARES and value > 1):
            raise ConfigError(path, f"is {value!r}", "give a share, at most 1" if name in _SHARES else "must be finite")
        if name == "bytes_per_kv_element" and value not in (1, 2):
            raise ConfigError(path, f"is {value!r}", "give 1 or 2")
    elif isinstance(kind, type) and not isinstance(value, kind):
        raise ConfigError(path, f"is {value!r}", f"give a {kind.__name__.lower()}")
