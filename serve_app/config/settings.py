"""`Settings` is the whole file: its sections together, the checks between them, and the ways to read it.

Besides `cli/`, this is the only module that reads the environment.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import did_you_mean, dotted, load_yaml, refuse, to_config_errors, wrong
from serve_app.config.files import EXAMPLE, from_here, read_text
from serve_app.config.foreign import MODELS, foreign_hint
from serve_app.config.health import HealthSettings
from serve_app.config.ingress import IngressSettings
from serve_app.config.kv import port_problems
from serve_app.config.links import MAX_INGRESSES, MembershipSettings, ProtocolSettings
from serve_app.config.logs import LogSettings
from serve_app.config.model import NAME_PATTERN, ModelSettings
from serve_app.config.places import hint_for
from serve_app.config.tracing import TracingSettings
from serve_app.config.ui import UiSettings
from serve_app.config.vllm_arguments import argument_hint
from serve_app.errors import ConfigError

DEFAULT_BATCHED_TOKENS = 2048
"""vLLM's max_num_batched_tokens on cpu, where simulated engines run."""
_NAME, _MAX_NAME = "[a-z]([a-z0-9-]*[a-z0-9])?", 41
MIN_TOKEN_BYTES = 16  # 128 bits when random: below that, guessing offline from one captured handshake is feasible


class TimeoutSettings(Section):
    """Limits on waiting that no other section owns."""

    drain_s: Real = Field(default=600.0, ge=0)
    """Seconds in which a stopping ingress or replica may finish its streams. The longest allowed answer must fit."""
    no_replica_s: Real = Field(default=30.0, ge=0)
    """Seconds for which a request waits for a replica before 503. Scaling from zero needs a cold start within this time."""
    stream_silence_s: Real = Field(default=5.0, gt=0)
    """Seconds without a byte after which a stream gets status 200 and a comment, and a further comment after each such silence; the first
    comment not before the tenant's `first_token_s` (30 s at most). Before the first comment a refusal is a real 503; after it, the stream's
    last event. Answers that are not streamed stay silent."""
    engine_start_s: Real = Field(default=1800.0, gt=0)
    """Seconds that an engine may take to load and warm up."""


class AutoscalingSettings(Section):
    """Limits that all models share."""

    max_gpus: Int | None = Field(default=None, ge=1)
    """Most GPUs of all models together: the cost cap, or the size of the cluster. None: only each model's max counts."""
    max_asleep_gib: Real | None = Field(default=None, ge=0)
    """Most host memory, in GiB, of all sleeping engines together. Beyond it those that save the least end. None: no limit."""


def _named(models: Any) -> Any:
    """Give each model its key as its name."""
    if not isinstance(models, Mapping):
        return models
    return {str(name): {**model, "name": str(name)} if isinstance(model, Mapping) else model for name, model in models.items()}


_NEEDS_PRIORITIES = ("batch", "tenants_file", "api_keys_file")
"""Keys of `ingress` with which engines have to tell requests apart: lines of batches from chats, or tenants from each other."""


def _with_priorities(model: Any) -> Any:
    """Give a model that names no scheduling policy vLLM's priorities. Its engine then orders waiting requests by their `priority`."""
    args = model.get("engine_args", {}) if isinstance(model, Mapping) else None
    if not isinstance(args, Mapping) or any(str(name).replace("-", "_").lstrip("_") == "scheduling_policy" for name in args):
        return model
    return {**model, "engine_args": {**args, "scheduling_policy": "priority"}}


class Settings(Section):
    """The whole file."""

    name: str = Field(default="serve-app", max_length=_MAX_NAME, pattern=f"^{_NAME}$")
    """Name of the application; a DNS label of at most 41 characters, KubeRay's limit."""
    models: Annotated[dict[str, ModelSettings], BeforeValidator(_named)] = Field(
        min_length=1, json_schema_extra={"propertyNames": {"pattern": NAME_PATTERN}}
    )
    """The served models by name. The name is the `model` of requests."""
    ingress: IngressSettings = IngressSettings()
    """The HTTP side."""
    protocol: ProtocolSettings = ProtocolSettings()
    """The links between ingress and replicas."""
    membership: MembershipSettings = MembershipSettings()
    """Leases of the replicas."""
    health: HealthSettings = HealthSettings()
    """When an engine counts as hung."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """Limits on waiting."""
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    """Limits that all models share when replicas are added."""
    logs: LogSettings = LogSettings()
    """The form of log lines."""
    tracing: TracingSettings | None = None
    """Where traces are sent, and which requests are traced. None: no traces are made."""
    ui: UiSettings | None = None
    """Where `serve-app up` serves the chat page. None: nowhere."""

    @model_validator(mode="before")
    @classmethod
    def _engines_order_requests(cls, values: Any) -> Any:
        """Let engines order requests by priority if there are batches or tenants, or if they keep an ITL. In order of arrival, chats would
        wait behind batches, all tenants behind the one that sends the most, and short prompts behind long ones."""
        ingress, models = (values.get(key) if isinstance(values, Mapping) else None for key in ("ingress", "models"))
        if not isinstance(models, Mapping):
            return values
        all_do = isinstance(ingress, Mapping) and any(ingress.get(key) for key in _NEEDS_PRIORITIES)
        ordered = {
            name: _with_priorities(model) if all_do or (isinstance(model, Mapping) and model.get("keep_itl") is True) else model
            for name, model in models.items()
        }
        return {**values, "models": ordered}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        refuse(
            [
                *self._port_problems(self.protocol.port),
                *self._kv_problems(),
                *self._link_problems(),
                *self._gpu_problems(),
                *self._hold_problems(),
                *self._health_problems(),
                *self._canary_problems(),
                *self._ui_problems(),
                *self._adapter_problems(),
            ]
        )
        return self

    @classmethod
    def _problems_as_written(cls, values: Mapping[Any, Any]) -> Iterator[PydanticCustomError]:
        models = values.get("models")
        if isinstance(models, list | tuple):
            names = [model.get("name") for model in models if isinstance(model, Mapping)]
            example = next((name for name in names if isinstance(name, str)), "chat")
            yield wrong(
                "models", "is a list, but should be a mapping by name", f"write `{example}:` in place of `- name: {example}`"
            )
        for name, model in models.items() if isinstance(models, Mapping) else ():
            key = dotted(("models", str(name)))
            if not isinstance(name, str):
                yield wrong(key, f"the name {name!r} is not a string", "put it in quotes")
            elif not re.fullmatch(NAME_PATTERN, name):
                yield wrong(key, f"the name {name!r} does not match {NAME_PATTERN}", "for example my-model")
            elif isinstance(model, Mapping) and "name" in model:
                problem = f"is {model['name']!r}, but the key {name!r} is the model's name already"
                yield wrong(f"{key}.name", problem, "remove it, and rename the key if that is the wrong name")

    def _gpu_problems(self) -> Iterator[PydanticCustomError]:
        """Check that the minimums fit, and that every model can have a replica."""
        if (limit := self.autoscaling.max_gpus) is None:
            return
        if not any(m.gpus_per_replica for m in self.models.values()):
            yield wrong("autoscaling.max_gpus", f"has no effect: it is {limit}, and no model has gpus_per_replica", "remove it")
        least = sum(max(m.replicas.min, m.replicas.initial or 0) * m.gpu_share() for m in self.models.values())
        if least > limit:
            problem = f"is {limit}, and the models' replicas.min (or initial) need {least:g} GPUs"
            yield wrong("autoscaling.max_gpus", problem, f"set it to {math.ceil(least)} or more, or lower a replicas.min")
        least = sum(m.replicas.min * m.gpu_share() for m in self.models.values())
        for name, model in self.models.items():
            for number, window in enumerate(model.replicas.schedule):
                more = max(0, (window.min or 0) - model.replicas.min) * model.gpu_share()
                if least <= limit < least + more:
                    key = f"{dotted(('models', name))}.replicas.schedule[{number}].min"
                    problem = f"is {window.min}, which with the other models' minimums needs {least + more:g} GPUs of {limit}"
                    yield wrong(key, problem, f"lower it, or set autoscaling.max_gpus to {math.ceil(least + more)} or more")
            if model.gpus_per_replica > limit:
                problem = f"is {model.gpus_per_replica} and autoscaling.max_gpus is {limit}: the model could never have a replica"
                yield wrong(dotted(("models", name, "gpus_per_replica")), problem, "raise autoscaling.max_gpus")
            elif model.replicas.min == 0 and least <= limit < least + model.gpu_share():
                problem = f"is {limit}, and the other models' replicas.min take {least:g}: {name} could never have a replica"
                yield wrong("autoscaling.max_gpus", problem, f"set it to {math.ceil(least + model.gpu_share())} or more")

    def _hold_problems(self) -> Iterator[PydanticCustomError]:
        """Check simulated cold starts. Other cold starts are unknown until they are measured; then the ingress reports the same problem."""
        hold_s = self.timeouts.no_replica_s
        for name, model in self.models.items():
            delay_s = model.simulated.startup_delay_s if model.simulated else 0.0
            if model.replicas.min == 0 and self.ingress.max_waiting_requests == 0:
                problem = f"is 0, and {name} starts from zero: a request that wakes it is always refused"
                yield wrong("ingress.max_waiting_requests", problem, "set it to as many requests as may wait for its start")
            if model.replicas.min == 0 and delay_s >= hold_s:
                problem = (
                    f"is {hold_s:g}, and {name} starts from zero in {delay_s:g} s: a request that wakes it is always refused"
                )
                yield wrong("timeouts.no_replica_s", problem, f"set it well above {delay_s:g}")

    def _health_problems(self) -> Iterator[PydanticCustomError]:
        """Check the length of simulated steps: a simulated step sleeps, so a long step looks like a hang."""
        limit_s = self.health.eject_after_s
        for name, model in self.models.items():
            num_tokens = model.engine_args.get("max_num_batched_tokens", DEFAULT_BATCHED_TOKENS)
            if (
                model.simulated
                and isinstance(num_tokens, int)
                and (step_s := model.simulated.prompt_step_s(num_tokens)) >= limit_s
            ):
                problem = f"is {limit_s:g}, and a simulated step of {name} takes up to {step_s:.3g} s: it would be taken for hung"
                yield wrong("health.eject_after_s", problem, f"set it well above {step_s:.3g}, or lower simulated.time_scale")

    def _canary_problems(self) -> Iterator[PydanticCustomError]:
        """Check that each canary is that of another model, and that each model has at most one canary."""
        canaries: dict[str, str] = {}
        for name, model in self.models.items():
            if model.canary is None:
                continue
            key, of = dotted(("models", name, "canary", "of")), model.canary.of
            if of == name:
                yield wrong(key, f"is {of!r}, the model itself", "name the model whose requests it shares")
            elif of not in self.models:
                yield wrong(key, f"is {of!r}, and there is no such model", did_you_mean(of, self.models.keys() - {name}))
            elif self.models[of].canary is not None:
                yield wrong(key, f"is {of!r}, itself a canary", "name the model that has the requests")
            elif of in canaries:
                yield wrong(key, f"is {of!r}, whose canary is {canaries[of]!r} already", "try one release at a time")
            canaries.setdefault(of, name)

    def _ui_problems(self) -> Iterator[PydanticCustomError]:
        if self.ui is not None and self.ui.port == self.ingress.port:
            yield wrong("ui.port", f"is {self.ui.port}, and so is ingress.port", "choose another, for example 8011")

    def _adapter_problems(self) -> Iterator[PydanticCustomError]:
        """Check that a request's `model` can only name one model or one adapter."""
        owners: dict[str, str] = {}
        for name, model in self.models.items():
            aliases = [(alias, dotted(("models", name, "aliases", index))) for index, alias in enumerate(model.aliases)]
            for other, key in [*aliases, *((a, dotted(("models", name, "adapters", a))) for a in model.adapters)]:
                if other in self.models:
                    yield wrong(key, f"the name {other!r} is a model's, too", "choose another name")
                elif other in owners:
                    yield wrong(key, f"the name {other!r} is also that of {owners[other]}", "choose another name")
                owners.setdefault(other, f"an alias or adapter of {name}")

    def _port_problems(self, port: int) -> Iterator[PydanticCustomError]:
        """Check a fixed port of replicas: two replicas on one node cannot share it, and only Ray knows the nodes."""
        if port == 0:
            return
        if port == self.ingress.port:
            yield wrong("protocol.port", f"is {port}, and so is ingress.port", "choose another, for example 8020")
        for name, model in self.models.items():
            if model.nodes > 1:
                if not model.resources:
                    problem = (
                        f"is {model.nodes} and protocol.port is {port}: two parts of replicas on one node would both listen there"
                    )
                    hint = "set protocol.port: 0, or `resources` of which a node offers enough for one part"
                    yield wrong(dotted(("models", name, "nodes")), problem, hint)
            elif model.per_node() != 1:
                problem = (
                    f"is {model.replicas_per_node} and protocol.port is {port}: two replicas on a node could not both have it"
                )
                hint = "set replicas_per_node: 1, or protocol.port: 0"
                yield wrong(dotted(("models", name, "replicas_per_node")), problem, hint)
            if len(self.models) > 1 and not model.resources:
                problem = f"is empty, protocol.port is {port} and there are {len(self.models)} models: two could share a node"
                yield wrong(
                    dotted(("models", name, "resources")), problem, "give each model a Ray resource, or set protocol.port: 0"
                )

    def _kv_problems(self) -> Iterator[PydanticCustomError]:
        listeners = {"ingress.port": self.ingress.port, "protocol.port": self.protocol.port}
        if self.ui is not None:
            listeners["ui.port"] = self.ui.port
        firsts = {dotted(("models", name, "kv", "port")): model.kv.port for name, model in self.models.items() if model.kv.is_on}
        return port_problems(firsts, listeners)

    def _link_problems(self) -> Iterator[PydanticCustomError]:
        """Check the limit of links: an update starts a new ingress for each old one before it stops an old one (`application.py`)."""
        most = 2 * self.ingress.replicas.max
        if most > (limit := self.protocol.max_ingresses):
            problem = (
                f"is {limit}, and ingress.replicas.max is {self.ingress.replicas.max}: an update has up to {most} ingresses at once, "
                "and a replica would refuse the links of the last ones"
            )
            raised = f"set it to {most} or more, or lower ingress.replicas.max"
            way_out = raised if most <= MAX_INGRESSES else f"set ingress.replicas.max to {MAX_INGRESSES // 2} or less"
            yield wrong("protocol.max_ingresses", problem, way_out)


def problems(values: Mapping[str, Any]) -> list[ConfigError]:
    """Return all problems of a mapping. Checks between sections run only if each section is right by itself."""
    try:
        Settings.model_validate(values)
    except ValidationError as exc:
        return _errors_of(exc)
    return []


def _errors_of(error: ValidationError) -> list[ConfigError]:
    """Return every problem. For a key of another section or system the hint names the right key, even if a neighbouring key has a similar
    name."""
    return [_sent_to_its_section(problem) if problem.problem == "unknown key" else problem for problem in to_config_errors(error)]


def _sent_to_its_section(problem: ConfigError) -> ConfigError:
    key = problem.path.rpartition(".")[2]
    # vLLM's argument may have the name of another section's key. A `model` at the top level is no such argument.
    hint = MODELS if problem.path == "model" else ""
    hint = hint or foreign_hint(key) or argument_hint(key) or hint_for(problem.path, Settings) or problem.hint
    return ConfigError(problem.path, problem.problem, hint or "docs/configuration.md has every key")


def parse_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a plain mapping, such as the ``args`` of a RayService application.

    Raises:
        ConfigError: The first problem, with the dotted path of its key.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        raise _errors_of(exc)[0] from None  # the cause would repeat the message in pydantic's words


def load_settings(path: Path) -> Settings:
    """Return the settings of a YAML file.

    Raises:
        ConfigError: `read_text`, `mapping_in` or `parse_settings` refused the file.
    """
    return parse_settings(mapping_in(read_text(path), path))


def mapping_in(text: str, path: Path) -> Mapping[str, Any]:
    """Return the mapping that ``text`` holds as YAML; ``path`` is the source of the text.

    Raises:
        ConfigError: The text is not YAML or not a mapping, or has a key twice.
    """
    values = load_yaml(text)
    if not isinstance(values, Mapping):
        problem = f"{path} is empty" if values is None else f"{path} holds a {type(values).__name__}, not a mapping"
        raise ConfigError("", problem, f"start with `models:`; {from_here(EXAMPLE)} is complete")
    return values


def settings_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors and for the chart."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def cluster_token(settings: Settings) -> bytes:
    """Return the secret of the links, without surrounding whitespace; b"" if no file is configured.

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


def is_application_name(text: str) -> bool:
    """Return whether ``text`` may be `Settings.name`."""
    return len(text) <= _MAX_NAME and re.fullmatch(_NAME, text) is not None


def default_cache_dir() -> Path:
    """Return the folder of fetched checkpoints: $SERVE_APP_CACHE, else ~/.cache/serve-app."""
    return Path(os.environ.get("SERVE_APP_CACHE") or "~/.cache/serve-app").expanduser().absolute()


def inherited_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for the processes that it starts."""
    return dict(os.environ)
