"""What `config.py` checks beyond types, and how a refusal is worded: argument names, hints, units, duplicate keys.

vLLM's argument names are read from its source with `ast`: importing vLLM takes 8 s, `serve-app check` has 2 s.
`tests/test_config.py` compares them with the names that vLLM itself reports.
"""

import ast
import difflib
import importlib.util
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from serve_app.errors import ConfigError
from serve_app.simulated.profiles import PATH, profile_from

_ONE_NODE = "an engine lives inside one node; use gpus_per_replica for tensor parallelism"
_MORE_REPLICAS = "each engine is a replica of the fleet; raise replicas.min and replicas.max"
_RAY_PLACES = "Ray assigns the GPUs; set gpus_per_replica"
_LOGGING = "Ray Serve owns the logging of a replica; vLLM reconfiguring it makes a restarted controller replace every replica"
RESERVED_FRONTEND_ARGS: Mapping[str, str] = {
    "lora_modules": "adapters must be on every replica; merge them into a checkpoint of their own",
    "tool_server": "tools run where the client is; remove it",
}
RESERVED_ENGINE_ARGS: Mapping[str, str] = {
    "model": "set `model` beside engine_args",
    "served_model_name": "set `name` beside engine_args",
    "pipeline_parallel_size": _ONE_NODE,
    "prefill_context_parallel_size": _ONE_NODE,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "device_ids": _RAY_PLACES,
    "enable_elastic_ep": _MORE_REPLICAS,
    "disable_log_stats": "the engine's statistics feed health checks and autoscaling; remove it",
    "logging_config": _LOGGING,
    "log_config_file": _LOGGING,
    "log_level": _LOGGING,
}
"""Engine arguments that serve-app sets itself, each with the way out. All of data_parallel_* is reserved too."""

RESERVED_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "set kv_cache_gib beside env",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "pickle from the wire would let a peer run code; remove it",
    "CUDA_VISIBLE_DEVICES": _RAY_PLACES,
}

_RAYS_OWN_RESOURCES = {"CPU": "set num_cpus", "GPU": "set gpus_per_replica", "memory": "remove it"}

RESERVED_PORTS: Mapping[int, str] = {
    6379: "Ray's GCS",
    8000: "Ray Serve's own proxy",
    8080: "KubeRay's metrics exporter",
    8265: "Ray's dashboard",
    10001: "Ray's client server",
    52365: "Ray's dashboard agent",
}

# Arguments of vLLM's own HTTP listener. The ingress has its own, so only those that change answers are left.
_LISTENER_ARGS_THAT_COUNT = frozenset({"enable_flash_late_interaction"})
_LISTENER_WAY_OUT: Mapping[str, str] = {
    "host": "set ingress.host",
    "port": "set ingress.port",
    "api_key": "set ingress.api_keys_file",
}

_UNITS = {"_s": "seconds", "_bytes": "bytes", "_gib": "GiB", "_tokens": "tokens"}
_SIZES_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_DURATIONS_S = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def wrong(key: str, problem: str, hint: str = "") -> PydanticCustomError:
    """A refusal from inside a validator; ``key`` is relative to the validated value, "" for the value itself."""
    return PydanticCustomError("serve_app", "{problem}", {"key": key, "problem": problem, "hint": hint})


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint with the nearest of ``known`` names, else with all of them when they are few, else ""."""
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"did you mean {near[0]}?"
    return f"known here: {', '.join(sorted(known))}" if 0 < len(known) <= 16 else ""


@lru_cache(maxsize=1)
def engine_arg_names() -> frozenset[str]:
    """Public field names of vLLM's AsyncEngineArgs; empty when vLLM is not installed."""
    fields = _fields_in_source("engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")
    return frozenset(name for name in fields if not name.startswith("_"))


@lru_cache(maxsize=1)
def frontend_arg_names() -> frozenset[str]:
    """Field names of vLLM's BaseFrontendArgs and the few of its listener's that change answers; empty without vLLM."""
    listener = _fields_in_source("entrypoints/launchers/cli_args.py", "FrontendArgs")
    return _fields_in_source("entrypoints/launchers/cli_args.py", "BaseFrontendArgs") | (listener & _LISTENER_ARGS_THAT_COUNT)


@lru_cache(maxsize=1)
def listener_arg_names() -> frozenset[str]:
    """Field names that concern only vLLM's own HTTP listener, which is not used here; empty without vLLM."""
    return _fields_in_source("entrypoints/launchers/cli_args.py", "FrontendArgs") - _LISTENER_ARGS_THAT_COUNT


def _fields_in_source(module: str, *classes: str) -> frozenset[str]:
    spec = importlib.util.find_spec("vllm")  # the top-level package only: a submodule's spec would import its parents
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    tree = ast.parse(Path(spec.submodule_search_locations[0], module).read_text(encoding="utf-8"))
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes}
    return frozenset(
        statement.target.id
        for name in classes
        for statement in bodies[name]
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def checked_engine_args(args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """``args`` with underscores in their names.

    Raises:
        PydanticCustomError: A name that vLLM does not know, that belongs elsewhere, or that serve-app sets itself.
    """
    result = _with_underscores(args)
    for name, value in result.items():
        way_out = _MORE_REPLICAS if name.startswith("data_parallel_") else RESERVED_ENGINE_ARGS.get(name)
        if way_out:
            raise wrong(name, f"is {value!r}, but serve-app sets this argument itself", way_out)
        if engine_arg_names() and name not in engine_arg_names():
            if name in frontend_arg_names():
                raise wrong(name, "is an argument of vLLM's front end", "put it under frontend_args")
            raise _unknown_argument(name, engine_arg_names())
    return result


def checked_frontend_args(args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """As `checked_engine_args`, for the arguments of vLLM's OpenAI front end."""
    result = _with_underscores(args)
    for name, value in result.items():
        if way_out := RESERVED_FRONTEND_ARGS.get(name):
            raise wrong(name, f"is {value!r}, which serve-app does not serve", way_out)
        if frontend_arg_names() and name not in frontend_arg_names():
            if name in engine_arg_names():
                raise wrong(name, "is an argument of vLLM's engine", "put it under engine_args")
            raise _unknown_argument(name, frontend_arg_names())
    if result.get("enable_auto_tool_choice") and not result.get("tool_call_parser"):
        parser = result.get("tool_call_parser")
        raise wrong(
            "enable_auto_tool_choice",
            f"is {result['enable_auto_tool_choice']!r} and tool_call_parser is {parser!r}",
            "set tool_call_parser, for example to hermes, or remove enable_auto_tool_choice",
        )
    return result


def checked_environment(env: dict[str, str]) -> dict[str, str]:
    for key, value in env.items():
        if way_out := RESERVED_ENVIRONMENT.get(key):
            raise wrong(key, f"is {value!r}, but serve-app sets this variable itself", way_out)
    return env


def checked_resources(resources: dict[str, float]) -> dict[str, float]:
    for key, amount in resources.items():
        if way_out := _RAYS_OWN_RESOURCES.get(key):
            raise wrong(key, f"is {amount}, but is not a custom resource", way_out)
        if amount <= 0:
            raise wrong(key, f"is {amount}, but should be greater than 0")
    return resources


def refuse_port_of_ray(port: int, *, way_out: str) -> int:
    if owner := RESERVED_PORTS.get(port):
        raise wrong("", f"is {port}, the port of {owner}", way_out)
    return port


def checked_profile(profile: Any) -> Any:
    """Runs before the types are checked: pydantic words the failure of a union as two failures."""
    if not isinstance(profile, str | Mapping):
        raise wrong("", f"is {profile!r}, neither a name nor a mapping", "name a profile, for example a10g-llama-8b")
    try:
        profile_from(profile)
    except ConfigError as exc:
        raise wrong(exc.path.removeprefix(PATH).removeprefix("."), exc.problem, exc.hint) from None
    return profile


def checked_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise wrong("", f"is {str(path)!r}, a relative path", "write it from /: replicas have other working directories")
    return path


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. Names are not looked up: all but localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_underscores(args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    result: dict[str, JsonValue] = {}
    for written, value in args.items():
        name = written.lstrip("-").replace("-", "_")
        if name in result:
            raise wrong(written, f"is given twice: {result[name]!r} and {value!r}", f"keep one {name}")
        result[name] = value
    return result


def _unknown_argument(name: str, known: Collection[str]) -> PydanticCustomError:
    if name in listener_arg_names():
        hint = _LISTENER_WAY_OUT.get(name, "remove it: it concerns vLLM's own HTTP listener, the ingress has another")
        return wrong(name, "has no effect here", hint)  # without its value: api_key is a secret
    if name.startswith("no_") and name[3:] in known:
        return wrong(name, "unknown argument", f"write {name[3:]}: false")
    return wrong(name, "unknown argument", did_you_mean(name, known))


def to_config_error(error: ValidationError) -> ConfigError:
    """The first problem as one message with the dotted path of its key."""
    detail = error.errors(include_url=False)[0]
    context = detail.get("ctx", {})
    if detail["type"] == "serve_app":
        location = (*detail["loc"], *([context["key"]] if context["key"] else []))
        return ConfigError(path=dotted(location), problem=context["problem"], hint=context["hint"])
    problem, hint = _plain_words(detail)
    return ConfigError(path=dotted(detail["loc"]), problem=problem, hint=hint)


def dotted(location: Iterable[int | str]) -> str:
    """`models[0].engine_args` from ("models", 0, "engine_args")."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")


def _plain_words(detail: ErrorDetails) -> tuple[str, str]:
    kind, value = detail["type"], detail["input"]
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "missing":
        return "is missing", f"add `{name}:`"
    if value is None:
        return "has no value", "give it one, or remove the key to get the default"
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    should = re.sub(r"^\w+ should", "but should", detail["msg"])
    if kind in ("dict_type", "model_type"):
        count = value if isinstance(value, int) and value > 0 else 1
        return f"is {shown}, but should be a mapping", f"write {{min: {count}, max: {count}}}" if name == "replicas" else ""
    if kind == "tuple_type":
        return f"is {shown}, but should be a list", f"write each entry of `{name}:` on a line of its own that starts with `- `"
    if kind == "string_pattern_mismatch":
        return f"is {shown}, but should match {detail['ctx']['pattern']}", "for example my-model"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return f"is {shown}, {should}", _number_hint(name, value)
    if kind == "string_type" and isinstance(value, int | float):
        return f"is {shown}, {should}", f'write "{value}" in quotes'
    return f"is {shown}, {should}", ""


def _number_hint(name: str, text: str) -> str:
    """The way out for a string where a number belongs, such as "10m" for a field that ends in _s."""
    suffix = next((suffix for suffix in _UNITS if name.endswith(suffix)), None)
    parsed = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    number = float(parsed[1]) if parsed and re.fullmatch(r"\d+(\.\d+)?", parsed[1]) else None
    said = f"the unit is {_UNITS[suffix]}, as the name says" if suffix else "a plain number without unit is wanted"
    if parsed is None or number is None:
        return said
    factor = _factor(suffix or "", parsed[2].lower())
    return f"{said}: write {number * factor:.12g}" if factor is not None else said


def _factor(suffix: str, unit: str) -> float | None:
    if not unit:
        return 1
    if suffix == "_s":
        return _DURATIONS_S.get(unit)
    size_bytes = _SIZES_BYTES.get(unit.removesuffix("b"))
    if size_bytes is None or suffix not in ("_bytes", "_gib"):
        return None
    return size_bytes if suffix == "_bytes" else size_bytes / (1 << 30)


class _Loader(yaml.SafeLoader):
    """YAML without dates (a model may be named 2025-02-28), whatever other libraries do to the shared SafeLoader."""


_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str) -> Any:
    """The one document in ``text``.

    Raises:
        ConfigError: Not YAML (the path is "line L, column C"), or a mapping has a key twice (the path is the key's).
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicate_keys(node, (), set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "indent with spaces" if "'\\t'" in str(exc) else ""
        raise ConfigError(where, f"not valid YAML: {exc.problem or exc.context}", hint) from exc
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a number in form only, such as 0b_
        raise ConfigError("", f"not valid YAML: {str(exc).splitlines()[0]}") from exc


def _refuse_duplicate_keys(node: yaml.Node, location: tuple[int | str, ...], seen: set[int]) -> None:
    if id(node) in seen:  # an alias, possibly to its own ancestor
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_duplicate_keys(item, (*location, index), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                problem = f"is given twice, in lines {lines[name]} and {line}"
                raise ConfigError(path=dotted((*location, name)), problem=problem, hint="keep one of them")
            lines[name] = line
            _refuse_duplicate_keys(value, (*location, name), seen)
