"""This module checks what types cannot, and words refusals: hints, units, duplicate keys."""

import difflib
import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from serve_app.config.bounded_yaml import BoundedLoader
from serve_app.environment import REMOVED
from serve_app.errors import ConfigError

RAY_PLACES = "Ray assigns the GPUs; set gpus_per_replica"
RESERVED_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "set kv_cache_gib beside env",
    "CUDA_VISIBLE_DEVICES": RAY_PLACES,
    "VLLM_TARGET_DEVICE": "set device beside env",
    "VLLM_WORKER_MULTIPROC_METHOD": "workers are always spawned: forked ones would hide the engine's death; remove it",
    **dict.fromkeys(("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"), "set kv.port, and remove it"),
    **{name: f"{reason}; remove it" for name, reason in REMOVED.items()},
}

_MAX_VARIABLE_BYTES = 100_000  # Linux allows 131,072 with the name
_RAYS_OWN_RESOURCES = {"CPU": "set num_cpus", "GPU": "set gpus_per_replica", "memory": "remove it"}

RESERVED_PORTS: Mapping[range, str] = {
    range(6379, 6380): "Ray's GCS",
    range(8000, 8001): "Ray Serve's own proxy",
    range(8076, 8080): "Ray's managers and agents",
    range(8080, 8081): "KubeRay's metrics exporter",
    range(8265, 8266): "Ray's dashboard",
    range(10001, 10002): "Ray's client server",
    range(10002, 11000): "Ray's worker processes",
    range(52365, 52366): "Ray's dashboard agent",
}
"""The owners of ports on a cluster that the chart makes. The chart refuses these ports by a copy (helm/serve-app/files/rules.yaml)."""

_PYTHONS_DIGITS = 4300
"""Most decimal digits of an integer that Python reads or writes; with more it raises ValueError."""
MAX_WRITTEN_REPLICAS = 5000
"""Most replicas that a hint repeats."""
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_gib": "GiB", "_tokens": "tokens"}
_SIZES_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_DURATIONS_S = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def wrong(key: str, problem: str, hint: str = "") -> PydanticCustomError:
    """Return a refusal to raise from inside a validator; ``key`` is relative to the validated value, "" for the value itself."""
    return PydanticCustomError("serve_app", "{problem}", {"key": key, "problem": problem, "hint": hint})


def refuse(problems: Iterable[PydanticCustomError]) -> None:
    """Raise all problems at once, if there are any. Call it inside a validator: they become problems of the validated value.

    Raises:
        ValidationError: There are problems.
    """
    if found := [InitErrorDetails(type=problem, loc=(), input=None) for problem in problems]:
        raise ValidationError.from_exception_data("section", found)


def again(detail: ErrorDetails) -> InitErrorDetails:
    """Return a problem that was found inside a validator, to raise it once more together with others."""
    context = detail.get("ctx", {})
    kind = PydanticCustomError("serve_app", "{problem}", context) if detail["type"] == "serve_app" else detail["type"]
    return InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"], ctx=context)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a hint with the nearest of the ``known`` names, or with all of them if they are few, or ""."""
    return nearest(name, known) or (f"known here: {', '.join(sorted(known))}" if 0 < len(known) <= 16 else "")


def nearest(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str:
    """Return a hint with the nearest of the ``known`` names, or "" if none is near. ``cutoff`` is difflib's ratio."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else ""


def checked_environment(env: dict[str, str]) -> dict[str, str]:
    refuse(problem for key, value in env.items() for problem in _variable_problems(key, value))
    return env


def _variable_problems(name: str, value: str) -> Iterator[PydanticCustomError]:
    if way_out := RESERVED_ENVIRONMENT.get(name):
        yield wrong(name, f"is {value!r}, but serve-app sets this variable itself", way_out)
    elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield wrong("", f"has {name!r}, which is not a name of a variable", "letters, digits and _ are allowed, no digit first")
    elif "\0" in value or not is_utf8(value):
        yield wrong(name, f"is {value[:20]!r}, which no environment can hold", "remove NUL and bytes that are not UTF-8")
    elif len(value.encode()) > _MAX_VARIABLE_BYTES:
        yield wrong(name, f"has {len(value.encode())} bytes", f"Linux takes {_MAX_VARIABLE_BYTES} at most; put it into a file")


def is_utf8(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8. Python reads other bytes of a command line as lone surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_resources_of_pods(resources: Any) -> Any:
    if isinstance(resources, Mapping) and (found := [key for key in ("requests", "limits") if key in resources]):
        way_out = "set num_cpus and gpus_per_replica; the pod's own are the Helm chart's: modelPods.resources"
        raise wrong(found[0], "is a key of pods, but this section holds custom Ray resources", way_out)
    return resources


def checked_resources(resources: dict[str, float]) -> dict[str, float]:
    refuse(problem for key, amount in resources.items() for problem in _resource_problems(key, amount))
    return resources


def _resource_problems(key: str, amount: float) -> Iterator[PydanticCustomError]:
    if way_out := _RAYS_OWN_RESOURCES.get(key):
        yield wrong(key, f"is {amount}, but is not a custom resource", way_out)
    elif amount <= 0:
        yield wrong(key, f"is {amount}, but should be greater than 0")


def refuse_port_of_ray(port: int, *, way_out: str) -> int:
    for ports, owner in RESERVED_PORTS.items():
        if port in ports:
            raise wrong("", f"is {port}, the port of {owner}", way_out)
    return port


def checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as exc:  # OverflowError: for a{99999999999}
        reason = "its groups are nested too deep" if isinstance(exc, RecursionError) else exc
        way_out = "escape characters that are meant literally: \\( for ("
        raise wrong("", f"is {shown(pattern)}, which is not a regular expression: {reason}", way_out) from None
    return pattern


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_url(path: Any) -> Any:
    """Refuse a URL in place of a path. This check runs before pydantic's, which would show s3://bucket as s3:/bucket."""
    if isinstance(path, str) and _URL.match(path):
        raise wrong("", f"is {shown(path)}, a URL, but should be a path of this machine", "copy the file there; write it from /")
    return path


def checked_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise wrong("", f"is {str(path)!r}, a relative path", "write it from /: replicas have other working directories")
    if "\0" in str(path):
        raise wrong("", f"is {str(path)!r}, and no path has a NUL in it", "remove the NUL")
    return path


def checked_origin(origin: str) -> str:
    if origin != "*" and not re.fullmatch(r"https?://[^/\s*]+", origin):
        raise wrong(
            "", f"is {shown(origin)}, which is no origin", "write scheme and host alone, as https://app.example.com, or *"
        )
    return origin


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``. Names are not looked up: all except localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def to_config_errors(error: ValidationError) -> list[ConfigError]:
    """Return one error for each key that has problems."""
    found: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        context = detail.get("ctx", {})
        if detail["type"] == "too_short" and detail["input"]:
            continue  # its items are wrong, and are reported themselves
        path = dotted(part for part in detail["loc"] if part != "[key]")  # pydantic marks a wrong key by "[key]"
        if detail["type"] == "serve_app":
            path = f"{path}.{context['key']}" if path and context["key"] else path + context["key"]
            problem, hint = context["problem"], context["hint"]
        else:
            problem, hint = _plain_words(detail)
        found.setdefault(path, ConfigError(path, problem, hint))
    return list(found.values())


def dotted(location: Iterable[int | str]) -> str:
    """Return a location as a path: `models["a/b"].schedule[0]` for ("models", "a/b", "schedule", 0)."""
    return "".join(map(_step, location)).removeprefix(".")


def _step(part: int | str) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if re.fullmatch(r"[\w-]+", part) else f'["{part}"]'


def _plain_words(detail: ErrorDetails) -> tuple[str, str]:
    kind, value = detail["type"], detail["input"]
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "missing":
        return "is missing", f"add `{name}:`"
    if value is None:
        return "has no value", "give it one, or remove the key to get the default"
    text = shown(value)
    should = re.sub(r"^\w+ should", "but should", detail["msg"]).partition(" after validation")[0]
    if kind in ("dict_type", "model_type"):
        return f"is {text}, but should be a mapping", _mapping_hint(detail["loc"], value)
    if kind == "tuple_type":
        return f"is {text}, but should be a list", f"write each entry of `{name}:` on a line of its own that starts with `- `"
    if kind == "string_pattern_mismatch":
        return f"is {text}, but should match {detail['ctx']['pattern']}", "for example my-model"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return f"is {text}, {should}", number_hint(name, value)
    if (
        kind == "greater_than_equal"
        and value == 0
        and (detail["loc"][:1] == ("autoscaling",) or "replicas" in detail["loc"][2:3])
    ):
        return f"is {text}, {should}", ZERO_HINTS.get(name, "")
    if kind in ("bool_type", "bool_parsing"):
        return f"is {text}, {should}", "write true or false"
    if kind == "string_type" and isinstance(value, int | float):
        is_whole = isinstance(value, float) or abs(value) < 10**50  # `shown` cuts longer ones
        return f"is {text}, {should}", f'write "{text}" in quotes' if is_whole else "write it in quotes"
    return f"is {text}, {should}", ""


ZERO_HINTS = {
    "max": "for no replicas at times set replicas.min to 0, and min to 1 in the windows of replicas.schedule that need some",
    "max_gpus": "remove it for no limit",
}
"""The way out for a key of a model's `replicas` or of `autoscaling` that is 0 and must not be. The chart's rule max-is-zero has it too."""


def _mapping_hint(location: Sequence[int | str], value: Any) -> str:
    if location[-1:] == ("replicas",):
        count = value if type(value) is int and 0 < value <= MAX_WRITTEN_REPLICAS else 1
        return f"write {{min: {count}, max: {count}}}"
    if location[-2:-1] == ("adapters",) and isinstance(value, str):
        return "write {path: FOLDER}, with the absolute path of the adapter's folder"
    if isinstance(value, str) and (pair := re.fullmatch(r"([a-z_]+):(\S+)", value)):
        return f"write a space after the colon: {pair[1]}: {pair[2]}"
    return "write its keys on lines of their own below, indented"


def shown(value: Any) -> str:
    """Return the value as Python writes it, in 60 characters at most."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than _PYTHONS_DIGITS digits
        return "a number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def number_hint(name: str, text: str) -> str:
    """Return the way out for a string in place of a number, such as "10m" for a field that ends in _s."""
    suffix = next((suffix for suffix in _UNITS if name.endswith(suffix)), None)
    parsed = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    number = float(parsed[1]) if parsed and re.fullmatch(r"\d+(\.\d+)?", parsed[1]) else None
    said = f"the unit is {_UNITS[suffix]}, as the name says" if suffix else "give a plain number without unit"
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


class _Loader(BoundedLoader):
    """Loads YAML without dates (a model may be named 2025-02-28), independent of changes by other libraries to the shared SafeLoader.

    Numbers are those of YAML 1.2. PyYAML's YAML 1.1 would read 010000 as 4096 and 10:00 as 600, which are texts here, and 1e-7 as a text.
    """


_OTHERWISE = {f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "int", "float")}
_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in _OTHERWISE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _bounded_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return an integer of at most 64 bits. A larger one must be a text whose quotes were forgotten; a float cannot hold 400 digits."""
    try:
        value = loader.construct_yaml_int(node)
    except ValueError:
        if len(node.value) < _PYTHONS_DIGITS:
            raise
        value = 1 << 64
    if abs(value) >= 1 << 64:
        problem = "an integer of more than 64 bits; put it in quotes if it is text"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _bounded_int)


def load_yaml(text: str) -> Any:
    """Return the only document in ``text``.

    Raises:
        ConfigError: The text is not YAML (the path is "line L, column C"), is nested too deep, holds too many values, or a
            mapping has a key twice (the path is the key's).
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicate_keys(node, (), set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as exc:
        lacks_colon = exc.problem == "could not find expected ':'"  # noticed in a later line; the context is where the key begins
        mark = exc.context_mark if lacks_colon else exc.problem_mark or exc.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = "write a colon and a space after the key" if lacks_colon else ""
        hint = "give keys of one mapping the same indent" if "expected <block end>" in str(exc.problem) else hint
        hint = "indent with spaces" if "'\\t'" in str(exc) else hint
        raise ConfigError(where, f"not valid YAML: {exc.problem or exc.context}", hint) from exc
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a number by its form only, such as 0b_
        raise ConfigError("", f"not valid YAML: {str(exc).splitlines()[0]}") from exc
    except (LookupError, AttributeError) as exc:  # PyYAML's, for example of `!!bool maybe`
        raise ConfigError("", "not valid YAML: a value does not fit its tag", "remove tags such as !!bool") from exc
    except RecursionError:
        raise too_deep() from None


def too_deep() -> ConfigError:
    """Return the error for YAML at which PyYAML raises RecursionError."""
    return ConfigError("", "the YAML is nested too deep", "remove unneeded brackets or levels")


def _refuse_duplicate_keys(node: yaml.Node, location: tuple[int | str, ...], seen: set[int]) -> None:
    if id(node) in seen:  # an alias, perhaps to its own ancestor
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
