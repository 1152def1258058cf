"""The whole configuration: one YAML file, read once at the entry point, then passed down as frozen values.

Units are in the names. Checks of vLLM's argument names and the wording of refusals are in `config_checks.py`.
Besides `cli/`, this is the only file that reads the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from serve_app.config_checks import (
    RESERVED_PORTS,
    checked_absolute,
    checked_engine_args,
    checked_environment,
    checked_frontend_args,
    checked_profile,
    checked_resources,
    did_you_mean,
    engine_arg_names,
    frontend_arg_names,
    is_loopback,
    load_yaml,
    to_config_error,
    wrong,
)
from serve_app.errors import ConfigError

MIN_TOKEN_BYTES = 16  # 128 bits when random: below that, guessing offline from one captured handshake is feasible
DEFAULT_KV_CACHE_GIB = 1.0

# Strict: YAML has numbers, so "10m", "64 MiB" and yes are refused with the unit instead of being guessed at.
Int = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
AbsolutePath = Annotated[Path, AfterValidator(checked_absolute)]


class Section(BaseModel):
    """A mapping in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        """Before the types, so that a misspelt key is reported as such and not as a missing one."""
        for key in values if isinstance(values, Mapping) else ():
            if not isinstance(key, str):
                raise wrong(str(key), f"the key {key!r} is not a string", "put it in quotes")
            if key not in cls.model_fields:
                raise wrong(key, "unknown key", cls._hint_for(key))
        return values

    @classmethod
    def _hint_for(cls, key: str) -> str:
        return did_you_mean(key, cls.model_fields)


class _Bounds(Section):
    min: Int = Field(default=1, ge=0)
    """Replicas that are always there. 0 lets the last one go when idle; the next request waits for a cold start."""
    max: Int = Field(default=1, ge=1)
    """Replicas that the autoscaler may reach. Equal to min: no autoscaling."""

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> Self:
        if self.min > self.max:
            raise wrong("max", f"min is {self.min} and max is {self.max}", f"set max to {self.min} or more")
        return self


class ScalingSettings(_Bounds):
    """How many replicas of a model there are."""

    initial: Int | None = Field(default=None, ge=0)
    """Replicas at the first deployment, between min and max. Default: min."""
    target_outstanding_tokens: Int = Field(default=4096, ge=1)
    """Tokens of unfinished work (prompt + still expected output) per replica that the autoscaler aims at."""

    @model_validator(mode="after")
    def _initial_is_within_bounds(self) -> Self:
        if self.initial is not None and not self.min <= self.initial <= self.max:
            problem = f"initial is {self.initial}, min is {self.min} and max is {self.max}"
            raise wrong("initial", problem, f"set initial from {self.min} to {self.max}, or remove it")
        return self


class IngressScalingSettings(_Bounds):
    """How many ingress replicas there are, and what the autoscaler aims at."""

    min: Int = Field(default=1, ge=1)
    """Replicas that are always there. At least 1: without one nothing listens."""
    target_streams: Int = Field(default=400, ge=1)
    """Open streams per ingress replica that the autoscaler aims at."""


class SimulatedSettings(Section):
    """Replaces the forward pass by a timing model; scheduler, KV cache and API stay vLLM's own."""

    profile: Annotated[str | dict[str, JsonValue], BeforeValidator(checked_profile)]
    """Name of an accelerator profile, or the profile itself as a mapping."""
    time_scale: Real = Field(default=1.0, gt=0)
    """Factor on every simulated time; 2 is half as fast."""
    startup_delay_s: Real = Field(default=0.0, ge=0)
    """Seconds that loading the weights is pretended to take."""
    eos_probability: Real = Field(default=0.0, ge=0, le=1)
    """Chance that a token ends the answer. 0: every answer runs to its max_tokens."""
    seed: Int = 0
    """Seed of the hash that makes up the tokens. Equal seeds and prompts give equal answers."""


class ModelSettings(Section):
    """One served model: what the engine loads and where its replicas run."""

    name: str = Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$")
    """The `model` of requests. Unique in the file."""
    model: str = Field(min_length=1)
    """What to load: `embedded:smollm2-135m-instruct`, an absolute path, or a Hugging Face id."""
    engine_args: Annotated[dict[str, JsonValue], AfterValidator(checked_engine_args)] = Field(default_factory=dict)
    """vLLM's engine arguments by their own names, as in `vllm serve --max-model-len 2048`; dashes or underscores."""
    frontend_args: Annotated[dict[str, JsonValue], AfterValidator(checked_frontend_args)] = Field(default_factory=dict)
    """vLLM's front-end arguments by their own names: chat_template, tool_call_parser, enable_auto_tool_choice, ..."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the engine runs on. A simulated engine runs on cpu."""
    simulated: SimulatedSettings | None = None
    """Simulate an accelerator instead of computing. Default: compute."""
    replicas: ScalingSettings = ScalingSettings()
    """How many engines of this model there are."""
    gpus_per_replica: Int = Field(default=0, ge=0)
    """GPUs of one replica, all in one node; also its tensor parallel size. 0 for cpu and simulated."""
    replicas_per_node: Int | None = Field(default=None, ge=1, le=100)
    """Replicas of this model that one node may hold. Default: 1 on cuda, no limit on cpu."""
    num_cpus: Real = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for one replica."""
    resources: Annotated[dict[str, Real], AfterValidator(checked_resources)] = Field(default_factory=dict)
    """Custom Ray resources of one replica, which bind it to nodes that offer them."""
    env: Annotated[dict[str, str], AfterValidator(checked_environment)] = Field(default_factory=dict)
    """Extra environment of the engine's process."""
    required: bool = Field(default=True, strict=True)
    """Whether the ingress is ready only when this model has a replica."""
    kv_cache_gib: Real = Field(default=DEFAULT_KV_CACHE_GIB, gt=0)
    """KV cache of one replica on cpu in GiB. Elsewhere gpu_memory_utilization or the profile sets it."""

    @classmethod
    def _hint_for(cls, key: str) -> str:
        name = key.replace("-", "_")
        if name in engine_arg_names():
            return "it is an argument of vLLM's engine: put it under engine_args"
        if name in frontend_arg_names():
            return "it is an argument of vLLM's front end: put it under frontend_args"
        return super()._hint_for(key)

    @field_validator("model")
    @classmethod
    def _refuse_relative_paths(cls, model: str) -> str:
        if model.startswith((".", "~")):
            checked_absolute(Path(model))
        return model

    @model_validator(mode="after")
    def _device_fits(self) -> Self:
        gpus = self.gpus_per_replica
        tensor_parallel_size = self.engine_args.get("tensor_parallel_size")
        if tensor_parallel_size is not None:
            problem = f"is {tensor_parallel_size!r} and gpus_per_replica is {gpus}"
            raise wrong("engine_args.tensor_parallel_size", problem, "remove it: gpus_per_replica sets both")
        if self.simulated is not None:
            self._simulation_fits(self.simulated)
        if self.device == "cuda" and gpus == 0:
            raise wrong("gpus_per_replica", "is 0 and device is cuda", "set gpus_per_replica to 1 or more")
        if self.device == "cpu" and gpus > 0:
            raise wrong("gpus_per_replica", f"is {gpus} and device is cpu", "set device: cuda, or gpus_per_replica: 0")
        if self.device == "cuda" and self.kv_cache_gib != DEFAULT_KV_CACHE_GIB:
            problem = f"is {self.kv_cache_gib} and device is cuda"
            raise wrong("kv_cache_gib", problem, "remove it; use engine_args.gpu_memory_utilization")
        if self.device == "cpu" and (size := self.engine_args.get("kv_cache_memory_bytes")) is not None:
            problem = f"is {size!r} and kv_cache_gib is {self.kv_cache_gib}"
            raise wrong("engine_args.kv_cache_memory_bytes", problem, "remove it: on cpu kv_cache_gib sets the cache")
        return self

    def _simulation_fits(self, simulated: SimulatedSettings) -> None:
        if self.device == "cuda":
            problem = f"is cuda and simulated.profile is {simulated.profile!r}"
            raise wrong("device", problem, "set device: cpu to simulate, or remove simulated to compute")
        if self.kv_cache_gib != DEFAULT_KV_CACHE_GIB:
            problem = f"is {self.kv_cache_gib} and simulated.profile is {simulated.profile!r}"
            raise wrong("kv_cache_gib", problem, "remove it: the profile's memory sets the cache")
        backend = self.engine_args.get("distributed_executor_backend")
        if backend is not None:
            problem = f"is {backend!r} and simulated.profile is {simulated.profile!r}"
            raise wrong("engine_args.distributed_executor_backend", problem, "remove it: simulated sets the executor")


class IngressSettings(Section):
    """The HTTP side: vLLM's OpenAI front end on a listener of its own."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. 0.0.0.0 lets other hosts in."""
    port: Int = Field(default=8010, ge=1024, le=65535)
    """Port to listen on; replicas on one host share it by SO_REUSEPORT."""
    replicas: IngressScalingSettings = IngressScalingSettings()
    """How many ingress replicas there are."""
    num_cpus: Real = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for one ingress replica."""
    max_body_bytes: Int = Field(default=10 << 20, ge=1)
    """Largest accepted request body; a larger one is answered with 413."""
    max_waiting_requests: Int = Field(default=1000, ge=0)
    """Requests per model and ingress that may wait for a replica; one more is answered with 503."""
    keep_alive_s: Real = Field(default=65.0, gt=0)
    """Seconds a connection without a request stays open, rounded up to whole ones. 65 exceeds the 60 s of many load balancers."""
    unready_s: Real = Field(default=1.0, ge=0, le=120)
    """Seconds a stopping ingress still accepts while /readyz says 503, so that load balancers turn away first."""

    @field_validator("port")
    @classmethod
    def _refuse_ports_of_ray(cls, port: int) -> int:
        if owner := RESERVED_PORTS.get(port):
            raise wrong("", f"is {port}, the port of {owner}", "choose another, for example 8010")
        return port


class TlsSettings(Section):
    """TLS of the links between ingress and replicas, verified on both sides."""

    cert_file: AbsolutePath
    """Certificate chain (PEM) that both sides present."""
    key_file: AbsolutePath
    """Private key (PEM) of the certificate."""
    ca_file: AbsolutePath
    """Certificate authority (PEM) that signed the peers' certificates."""


class ProtocolSettings(Section):
    """The links between ingress and replicas: who may connect, how much may wait, when one counts as lost."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address a replica listens on. 0.0.0.0 on a cluster, which needs cluster_token_file."""
    cluster_token_file: AbsolutePath | None = None
    """File with the secret that both sides prove to know, 16 bytes or more. None: loopback only."""
    max_frame_bytes: Int = Field(default=64 << 20, ge=1 << 20)
    """Largest frame; a longer one closes the link before it is read. Large requests are multimodal or very long."""
    heartbeat_interval_s: Real = Field(default=1.0, gt=0)
    """Seconds between two heartbeats of a replica."""
    heartbeat_timeout_s: Real = Field(default=5.0, gt=0)
    """Seconds of silence after which a link counts as lost. More than 2 x heartbeat_interval_s."""
    handshake_timeout_s: Real = Field(default=5.0, gt=0)
    """Seconds a peer may take from connecting to an open link."""
    max_ingresses: Int = Field(default=64, ge=1, le=1024)
    """Links a replica accepts, one for each ingress replica of the model. Connections without the token take none."""
    credit: Int = Field(default=2048, ge=1)
    """Unfinished attempts that one ingress may have on one replica."""
    send_buffer_bytes: Int = Field(default=64 << 20, ge=1 << 20)
    """Bytes that may wait for a slow peer before its link is closed. At least max_frame_bytes."""
    tls: TlsSettings | None = None
    """Encrypts the links. Default: none."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        interval_s, timeout_s = self.heartbeat_interval_s, self.heartbeat_timeout_s
        if timeout_s <= 2 * interval_s:
            problem = f"is {timeout_s} and heartbeat_interval_s is {interval_s}: one late heartbeat would cut the link"
            raise wrong("heartbeat_timeout_s", problem, f"set it above {2 * interval_s}")
        if self.send_buffer_bytes < self.max_frame_bytes:
            problem = f"is {self.send_buffer_bytes} and max_frame_bytes is {self.max_frame_bytes}"
            raise wrong("send_buffer_bytes", problem, f"set it to {self.max_frame_bytes} or more")
        if self.cluster_token_file is None and not is_loopback(self.host):
            problem = f"is {self.host!r} and cluster_token_file is not set: anyone who reaches the port could send work"
            raise wrong("host", problem, "set cluster_token_file, or host: 127.0.0.1")
        return self


class MembershipSettings(Section):
    """Leases by which ingresses learn of replicas."""

    renew_s: Real = Field(default=2.0, gt=0)
    """Seconds between two renewals of a replica's lease."""
    expiry_s: Real = Field(default=6.0, gt=0)
    """Seconds after the last renewal at which a lease ends. More than 2 x renew_s."""

    @model_validator(mode="after")
    def _survives_one_late_renewal(self) -> Self:
        if self.expiry_s <= 2 * self.renew_s:
            problem = f"is {self.expiry_s} and renew_s is {self.renew_s}: one late renewal would end the lease"
            raise wrong("expiry_s", problem, f"set it above {2 * self.renew_s}")
        return self


class TimeoutSettings(Section):
    """Limits on waiting that no other section owns."""

    drain_s: Real = Field(default=600.0, ge=0)
    """Seconds a stopping ingress or replica may finish its streams. The longest allowed answer must fit."""
    no_replica_s: Real = Field(default=30.0, ge=0)
    """Seconds a request waits for a replica before 503. Scaling from zero needs a cold start within it."""
    engine_start_s: Real = Field(default=1800.0, gt=0)
    """Seconds an engine may take to load and warm up."""


class Settings(Section):
    """The whole file."""

    name: str = Field(default="serve-app", max_length=41, pattern=r"^[a-z]([a-z0-9-]*[a-z0-9])?$")
    """Name of the application; a DNS label of at most 41 characters, KubeRay's limit."""
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    """The served models."""
    ingress: IngressSettings = IngressSettings()
    """The HTTP side."""
    protocol: ProtocolSettings = ProtocolSettings()
    """The links between ingress and replicas."""
    membership: MembershipSettings = MembershipSettings()
    """Leases of the replicas."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """Limits on waiting."""

    @model_validator(mode="after")
    def _model_names_are_unique(self) -> Self:
        first: dict[str, int] = {}
        for index, model in enumerate(self.models):
            if (other := first.setdefault(model.name, index)) != index:
                problem = f"is {model.name!r}, and so is models[{other}].name"
                raise wrong(f"models[{index}].name", problem, "give each model its own name")
        return self


def parse_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from a plain mapping, such as the ``args`` of a RayService application.

    Raises:
        ConfigError: The first problem, with the dotted path of its key.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        raise to_config_error(exc) from None  # the cause would repeat the message in pydantic's words


def load_settings(path: Path) -> Settings:
    """Settings from a YAML file.

    Raises:
        ConfigError: No readable file, not YAML, a key given twice, or what `parse_settings` refuses.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else f"not UTF-8 at byte {exc.start}"
        raise ConfigError(path="", problem=f"{path} cannot be read: {reason}") from exc
    values = load_yaml(text)
    if not isinstance(values, Mapping):
        problem = f"{path} is empty" if values is None else f"{path} holds a {type(values).__name__}, not a mapping"
        raise ConfigError("", problem, "start with `models:`; examples/cpu.yaml is complete")
    return parse_settings(values)


def settings_json_schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors and for the chart."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def cluster_token(settings: Settings) -> bytes:
    """The secret of the links, without surrounding whitespace; b"" when no file is configured.

    Raises:
        ConfigError: The file cannot be read or holds fewer than MIN_TOKEN_BYTES bytes.
    """
    if (path := settings.protocol.cluster_token_file) is None:
        return b""
    key = "protocol.cluster_token_file"
    try:
        token = path.read_bytes().strip()
    except OSError as exc:
        hint = "create it on every node, for example: openssl rand -hex 32"
        raise ConfigError(path=key, problem=f"{path} cannot be read: {exc.strerror}", hint=hint) from exc
    if len(token) < MIN_TOKEN_BYTES:
        problem = f"{path} holds {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed"
        raise ConfigError(path=key, problem=problem, hint="for example: openssl rand -hex 32")
    return token


def default_cache_dir() -> Path:
    """Where fetched checkpoints are kept: $SERVE_APP_CACHE, else ~/.cache/serve-app."""
    return Path(os.environ.get("SERVE_APP_CACHE") or "~/.cache/serve-app").expanduser().absolute()


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, for the processes it starts."""
    return dict(os.environ)
