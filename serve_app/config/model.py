"""`ModelSettings` is one served model: what the engine loads, the number of replicas, and where they run."""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from serve_app.config.adapters import AdapterSettings
from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import (
    checked_environment,
    checked_regex,
    checked_resources,
    dotted,
    refuse,
    refuse_resources_of_pods,
    wrong,
)
from serve_app.config.kv import KvSettings, kv_problems
from serve_app.config.nodes import node_problems, stage_problems
from serve_app.config.pools import PoolsSettings, pool_problems
from serve_app.config.routing import RoutingSettings
from serve_app.config.scaling import ScalingSettings
from serve_app.config.simulated import SimulatedSettings
from serve_app.config.sleep import SleepSettings, sleep_problems
from serve_app.config.vllm_arguments import checked_engine_args, checked_frontend_args
from serve_app.config.weight_places import checked_model

DEFAULT_KV_CACHE_GIB = 1.0
DEFAULT_BATCH_STEP_SHARE = 0.1
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}$"
"""The pattern of the keys of `models`."""


class GoldenPrompt(Section):
    """A prompt with a known answer. A replica whose engine answers otherwise, or too late, takes no requests and fails to start."""

    prompt: str = Field(min_length=1)
    """Plain text; no chat template is applied to it."""
    expect: Annotated[str, AfterValidator(checked_regex)] = Field(min_length=1)
    """Regular expression, in Python's syntax, that must be found in the answer. Tokens are chosen greedily."""
    max_tokens: Int = Field(default=32, ge=1, le=4096)
    """Most tokens of the answer."""
    within_s: Real = Field(default=60.0, gt=0)
    """Seconds within which the whole answer must be complete."""


class MediaSettings(Section):
    """The hosts from which the ingress fetches images, sounds and videos that requests name by URL. Redirects are not followed."""

    domains: tuple[Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")], ...] = ()
    """Names of hosts, such as `images.example.com`. Empty: none, and requests bring media as `data:` URLs."""
    private_addresses: bool = Field(default=False, strict=True)
    """Whether these hosts may have private, loopback or link-local addresses, such as a store inside the cluster. The metadata services of
    clouds have such addresses."""


class CanarySettings(Section):
    """Makes a model the canary of another model: under that model's name it answers a share of the requests, until it does worse."""

    of: str = Field(min_length=1)
    """Name of the model whose requests the canary shares."""
    share: Real = Field(default=0.05, gt=0, le=0.5)
    """Share of those requests. The canary needs at least this share of all replicas of both models."""
    requests: Int = Field(default=200, ge=20)
    """Requests that each ingress judges before it calls the canary good."""
    slow_factor: Real = Field(default=2.0, gt=1)
    """The canary counts as slow at this multiple of the model's median time to a first token, or between two tokens."""


_FROM_ZERO: dict[str, JsonValue] = {
    "if": {
        "required": ["replicas"],
        "properties": {"replicas": {"type": "object", "required": ["min"], "properties": {"min": {"const": 0}}}},
    },
    "then": {"required": ["required"], "properties": {"required": {"const": False}}},
}
"""The check of `ModelSettings._scaling_problems`, for the JSON schema."""


class ModelSettings(Section):
    """One served model: what the engine loads and where its replicas run."""

    model_config = ConfigDict(json_schema_extra=_FROM_ZERO)

    name: SkipJsonSchema[str] = Field(exclude=True)
    """The `model` of requests. In the file it is the key of this mapping, and not one of the mapping's own keys."""
    model: Annotated[str, AfterValidator(checked_model)] = Field(min_length=1)
    """The weights to load: `embedded:smollm2-135m-instruct`, an absolute path, or a Hugging Face id."""
    engine_args: Annotated[dict[str, JsonValue], AfterValidator(checked_engine_args)] = Field(default_factory=dict)
    """vLLM's engine arguments by their own names, as in `vllm serve --max-model-len 2048`; dashes or underscores."""
    frontend_args: Annotated[dict[str, JsonValue], AfterValidator(checked_frontend_args)] = Field(default_factory=dict)
    """vLLM's front-end arguments by their own names: chat_template, tool_call_parser, enable_auto_tool_choice, ..."""
    aliases: tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...] = ()
    """More names by which requests may ask for the model, for clients with a fixed name. Answers carry the model's own name. A canary of
    the model gets none of these requests."""
    adapters: dict[str, AdapterSettings] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}}
    )
    """LoRA adapters by name. A request for an adapter has this name as its `model`. Every replica loads all adapters before it takes
    requests."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device of the engine. A simulated engine runs on cpu."""
    simulated: SimulatedSettings | None = None
    """Simulate an accelerator instead of computing. Default: compute."""
    replicas: ScalingSettings = ScalingSettings()
    """The number of engines of this model."""
    gpus_per_replica: Int = Field(default=0, ge=0, le=1024)  # 64 nodes, and no cloud sells a node with more than 16 GPUs
    """GPUs of one replica, on all its nodes: tensor parallel size times stages. 0 for cpu. A simulated engine only reserves them."""
    nodes: Int = Field(default=1, ge=1, le=64)
    """Nodes of one replica. Each holds the same share of `gpus_per_replica`, and `num_cpus` and `resources` of its own."""
    replicas_per_node: Int | None = Field(default=None, ge=1, le=100)
    """Most replicas of this model on one node. Default: 1 on cuda, no limit on cpu and with `nodes` above 1."""
    num_cpus: Real = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for one replica."""
    resources: Annotated[dict[str, Real], BeforeValidator(refuse_resources_of_pods), AfterValidator(checked_resources)] = Field(
        default_factory=dict
    )
    """Custom Ray resources of one replica, which bind it to nodes that offer them."""
    env: Annotated[dict[str, str], AfterValidator(checked_environment)] = Field(default_factory=dict)
    """Extra environment of the engine's process."""
    warm_start: bool = Field(default=False, strict=True)
    """Whether engines start as forks of a process that has imported vLLM and stays on the node for the next one: docs/models.md."""
    golden: tuple[GoldenPrompt, ...] = ()
    """Prompts that every replica has to answer before it takes requests; for models that generate text."""
    routing: RoutingSettings = RoutingSettings()
    """How requests are assigned to the replicas of this model."""
    media: MediaSettings = MediaSettings()
    """Hosts of images, sounds and videos that requests name by URL. Default: none."""
    batch_step_share: Real = Field(default=DEFAULT_BATCH_STEP_SHARE, gt=0, le=10)
    """Share by which requests of batches, and prompts of tenants ahead of their shares, may lengthen an engine step while other requests
    run: docs/batch.md, docs/tenants.md. It only has an effect with `engine_args.scheduling_policy: priority`."""
    keep_itl: bool = Field(default=False, strict=True)
    """Whether steps hold only so many prompt tokens that running answers keep `replicas.itl_slo_s`: docs/models.md."""
    kv: KvSettings = KvSettings()
    """Whether requests take their KV cache along when their replica drains."""
    pools: PoolsSettings | None = None
    """Which replicas compute long prompts, and which make answers: docs/kv.md. Default: each does both."""
    sleep: SleepSettings | None = None
    """Whether and when the engine sleeps. Default: never. Only on cuda, or simulated."""
    canary: CanarySettings | None = None
    """Makes this model the canary of another model. Default: the model is no canary."""
    required: bool = Field(default=True, strict=True)
    """Whether the ingress is only ready while this model has a replica."""
    kv_cache_gib: Real = Field(default=DEFAULT_KV_CACHE_GIB, gt=0)
    """KV cache of one replica on cpu in GiB. On cuda gpu_memory_utilization sets it; for a simulated accelerator, its profile does."""

    def per_node(self) -> int | None:
        """Return the most replicas on one node; None for any number."""
        return self.replicas_per_node or (1 if self.device == "cuda" and self.nodes == 1 else None)

    def gpu_share(self) -> float:
        """Return the GPUs that Ray reserves for one replica: with `sleep.replicas_per_gpu` a part of one, in Ray's steps of 0.0001."""
        sharing = self.num_sharing()
        return self.gpus_per_replica if sharing == 1 else int(self.gpus_per_replica * 10_000 / sharing) / 10_000

    def num_sharing(self) -> int:
        """Return how many replicas, of all models, may be on this model's GPU."""
        return 1 if self.sleep is None else self.sleep.replicas_per_gpu

    def gpus_per_node(self) -> int:
        """Return the GPUs that one replica holds on each of its nodes."""
        return self.gpus_per_replica // self.nodes

    def stages(self) -> int:
        """Return the pipeline stages of one engine, each on the same number of its GPUs."""
        return int(str(self.engine_args.get("pipeline_parallel_size", 1)))

    def has_shards(self) -> bool:
        """Return whether an engine has processes on more than one node. A simulated engine only reserves GPUs there."""
        return self.nodes > 1 and self.simulated is None

    def surge(self) -> int:
        """Return the number of extra replicas while an update replaces the replicas."""
        if self.replicas.surge is not None:
            return self.replicas.surge
        return 0 if self.gpus_per_replica else 1  # all GPUs may be in use, and the update would wait for a free one for ever

    def yields_to_chats(self) -> bool:
        """Return whether the model's engines limit what batches add to a step. They recognize batches by vLLM's priorities."""
        return self.engine_args.get("scheduling_policy") == "priority"

    def needs_nixl(self) -> bool:
        """Return whether the model's engines load NIXL: simulated ones move no bytes."""
        return self.kv.is_on and self.simulated is None

    def release(self) -> str:
        """Return the identity of this release of the model: a digest of all settings that its replicas use."""
        unused = set() if self.yields_to_chats() else {"batch_step_share"}
        settings = self.model_dump(
            mode="json", exclude={"replicas", "canary", "required", "routing", "pools", "aliases", "media"} | unused
        )
        if self.keep_itl:
            settings["itl_slo_s"] = self.replicas.itl_slo_s
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        simulation = self._simulation_problems(self.simulated) if self.simulated else ()
        own = (*self._device_problems(), *self._scaling_problems(), *self._adapter_problems())
        places = (*node_problems(self), *stage_problems(self))
        refuse([*simulation, *own, *places, *sleep_problems(self), *kv_problems(self), *pool_problems(self)])
        return self

    def _device_problems(self) -> Iterator[PydanticCustomError]:
        gpus = self.gpus_per_replica
        if (size := self.engine_args.get("tensor_parallel_size")) is not None:
            problem = f"is {size!r} and gpus_per_replica is {gpus}"
            yield wrong("engine_args.tensor_parallel_size", problem, "remove it: gpus_per_replica sets both")
        if self.device == "cuda" and gpus == 0:
            yield wrong("gpus_per_replica", "is 0 and device is cuda", "set gpus_per_replica to 1 or more")
        if self.device == "cpu" and gpus > 0 and self.simulated is None:
            yield wrong("gpus_per_replica", f"is {gpus} and device is cpu", "set device: cuda, or gpus_per_replica: 0")
        if self.device == "cuda" and self.simulated is None and self.kv_cache_gib != DEFAULT_KV_CACHE_GIB:
            problem = f"is {self.kv_cache_gib} and device is cuda"
            yield wrong("kv_cache_gib", problem, "remove it; use engine_args.gpu_memory_utilization")
        if self.batch_step_share != DEFAULT_BATCH_STEP_SHARE and not self.yields_to_chats():
            policy = self.engine_args.get("scheduling_policy", "fcfs")
            problem = f"is {self.batch_step_share:g} and engine_args.scheduling_policy is {policy!r}: the engine treats all requests alike"
            yield wrong("batch_step_share", problem, "set engine_args.scheduling_policy: priority, or remove it")
        if self.keep_itl and not self.yields_to_chats():
            problem = f"is true and engine_args.scheduling_policy is {self.engine_args.get('scheduling_policy', 'fcfs')!r}"
            yield wrong("keep_itl", problem, "remove the policy, or keep_itl: its engines have an order of their own")
        for name, value in (("enable_chunked_prefill", False), ("disable_chunked_mm_input", True)):
            if self.keep_itl and self.engine_args.get(name) is value:
                problem = f"is true and engine_args.{name} is {value}: its engines compute prompts in parts"
                yield wrong("keep_itl", problem, "remove one of the two")
        backend = self.engine_args.get("distributed_executor_backend")
        if self.device == "cuda" and backend not in (None, "mp", "uni"):
            problem = f"is {backend!r}, whose workers would not end with their engine"
            yield wrong("engine_args.distributed_executor_backend", problem, "remove it: vLLM takes mp for several GPUs")
        if self.device == "cpu" and (cache := self.engine_args.get("kv_cache_memory_bytes")) is not None:
            problem = f"is {cache!r} and kv_cache_gib is {self.kv_cache_gib}"
            yield wrong("engine_args.kv_cache_memory_bytes", problem, "remove it: on cpu kv_cache_gib sets the cache")

    def _scaling_problems(self) -> Iterator[PydanticCustomError]:
        if self.replicas.min == 0 and self.required:
            why = "without a replica no ingress is ready, and no balancer sends the request that would start one"
            yield wrong("replicas.min", f"is 0 and required is true: {why}", "set required: false, or replicas.min: 1")
        if self.replicas.min == 0 and self.canary is not None:
            yield wrong(
                "replicas.min", "is 0, and a canary without a replica gets no request", "set replicas.min: 1, or remove it"
            )

    def _adapter_problems(self) -> Iterator[PydanticCustomError]:
        for name in self.adapters:
            if not re.fullmatch(NAME_PATTERN, name):
                yield wrong(
                    dotted(("adapters", name)), f"the name {name!r} does not match {NAME_PATTERN}", "for example my-adapter"
                )
        if self.adapters and self.canary is not None:
            problem = f"is {', '.join(self.adapters)}, and a canary has no requests for adapters"
            yield wrong(
                "adapters", problem, "remove it: requests for an adapter stay with the model whose requests this one shares"
            )
        if self.adapters and self.engine_args.get("enable_lora") is False:
            yield wrong("engine_args.enable_lora", "is false, and adapters is not empty", "remove it: adapters sets it")
        if (
            self.adapters
            and self.device == "cpu"
            and not self.simulated
            and (places := self.engine_args.get("max_loras")) is not None
        ):
            problem = (
                f"is {places!r} and device is cpu: there each adapter has a place of its own, and one more place stays empty"
            )
            yield wrong("engine_args.max_loras", problem, "remove it: adapters sets it")

    def _simulation_problems(self, simulated: SimulatedSettings) -> Iterator[PydanticCustomError]:
        there = f"and simulated.profile is {simulated.profile!r}"
        if self.device == "cuda":
            yield wrong("device", f"is cuda {there}", "set device: cpu to simulate, or remove simulated to compute")
        if self.kv_cache_gib != DEFAULT_KV_CACHE_GIB:
            problem = f"is {self.kv_cache_gib} {there}"
            yield wrong("kv_cache_gib", problem, "remove it: the profile's memory sets the cache")
        if (backend := self.engine_args.get("distributed_executor_backend")) is not None:
            problem = f"is {backend!r} {there}"
            yield wrong("engine_args.distributed_executor_backend", problem, "remove it: simulated sets the executor")
        if simulated.calls_tools and (parser := self.frontend_args.get("tool_call_parser")) != "hermes":
            problem = f"is True and frontend_args.tool_call_parser is {parser!r}: calls would be text"
            yield wrong("simulated.calls_tools", problem, "set tool_call_parser: hermes and enable_auto_tool_choice: true")
        step_s, replicas = simulated.least_step_s(), self.replicas
        for key, limit_s in (("itl_slo_s", replicas.itl_slo_s), ("ttft_slo_s", replicas.ttft_slo_s)):
            if replicas.min != replicas.max and limit_s <= step_s:
                problem = (
                    f"is {limit_s:g} and a step takes {step_s:.3g} s even for one request {there}: no number of replicas keeps it"
                )
                yield wrong(f"replicas.{key}", problem, "set it above the step")
