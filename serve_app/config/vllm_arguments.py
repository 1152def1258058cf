"""This module checks which of vLLM's arguments a configuration file gives, and their types, as `vllm_source.py` reads them."""

import json
import operator
from collections.abc import Collection, Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from serve_app.config.checks import RAY_PLACES, did_you_mean, nearest, number_hint, refuse, wrong
from serve_app.config.foreign import TOKEN, foreign_hint, plain_name
from serve_app.config.vllm_source import (
    engine_arg_bounds,
    engine_arg_types,
    frontend_arg_types,
    listener_arg_types,
    reasoning_parser_names,
    tool_parser_names,
)

_SPLIT = "an engine is split by tensors and stages alone; use gpus_per_replica, and pipeline_parallel_size for stages"
_NODES = "set nodes beside engine_args; ranks and addresses follow from it"
_MORE_REPLICAS = "each engine is a replica of the fleet; raise replicas.min and replicas.max"
_KV_CONNECTOR = (
    "set models.NAME.kv.transfer: nixl to move running requests with their KV; "
    "for a second cache in the node's memory set models.NAME.kv.offload_gib"
)
_LOGGING = "Ray Serve owns the logging of a replica; vLLM reconfiguring it makes a restarted controller replace every replica"
RESERVED_FRONTEND_ARGS: Mapping[str, str] = {
    "lora_modules": "name them under adapters, beside frontend_args",
    "tool_server": "tools run where the client is; remove it",
    "enable_flash_late_interaction": "query and documents may be in different engines; remove it",
    "sse_keep_alive_interval": "streams of all routes get comments; set timeouts.stream_silence_s",
}
RESERVED_ENGINE_ARGS: Mapping[str, str] = {
    "model": "set `model` beside engine_args",
    "served_model_name": "the model's name is its key under `models`; more names go into `aliases` beside engine_args",
    "prefill_context_parallel_size": _SPLIT,
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "device_ids": RAY_PLACES,
    "enable_elastic_ep": _MORE_REPLICAS,
    "kv_transfer_config": _KV_CONNECTOR,
    "ec_transfer_config": "remove it: requests name no other engine here",
    "allowed_media_domains": "set media.domains beside engine_args",
    "disable_log_stats": "the engine's statistics feed health checks and autoscaling; remove it",
    "logging_config": _LOGGING,
    "log_config_file": _LOGGING,
    "log_level": _LOGGING,
}
"""Engine arguments that serve-app sets itself, each with the way out. All arguments data_parallel_* are reserved, too."""


_KEEPS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
_SIGNS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}

# Arguments of vLLM's own HTTP listener that change answers. The others have no effect: the ingress has a listener of its own.
_LISTENER_ARGS_THAT_COUNT = frozenset({"enable_flash_late_interaction"})
_OTHER_LISTENER = "remove it: it concerns vLLM's own HTTP listener, the ingress has another"
_LISTENER_WAY_OUT: Mapping[str, str] = {
    "host": "set ingress.host",
    "port": "set ingress.port",
    "api_key": "set ingress.tenants_file or ingress.api_keys_file",
    "allowed_origins": "set ingress.cors_origins",
}


def known_frontend_args() -> dict[str, Any]:
    """Return the arguments of vLLM's front end, and the few of its listener that change answers; empty without vLLM."""
    return {
        **frontend_arg_types(),
        **{name: kind for name, kind in listener_arg_types().items() if name in _LISTENER_ARGS_THAT_COUNT},
    }


def argument_hint(key: str) -> str:
    """Return where an argument of vLLM belongs that stands among the file's own keys; "" if vLLM has no such argument."""
    name = plain_name(key)
    if way_out := _way_out_of_reserved(name):
        return way_out
    if name in engine_arg_types():
        return "it is an argument of vLLM's engine: put it under models.NAME.engine_args"
    if name in known_frontend_args():
        return "it is an argument of vLLM's front end: put it under models.NAME.frontend_args"
    if name in listener_arg_types() and name not in ("host", "port"):  # which are keys of several sections here
        return _LISTENER_WAY_OUT.get(name, _OTHER_LISTENER)
    return ""


def misplaced_arguments() -> dict[str, str]:
    """Return what `argument_hint` says of each argument of the installed vLLM."""
    names = {*RESERVED_ENGINE_ARGS, *engine_arg_types(), *known_frontend_args(), *listener_arg_types()}
    return {name: hint for name in sorted(names) if (hint := argument_hint(name))}


def _way_out_of_reserved(name: str) -> str:
    return _MORE_REPLICAS if name.startswith("data_parallel_") else RESERVED_ENGINE_ARGS.get(name, "")


def checked_engine_args(args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the arguments with underscores in their names, without nulls: vLLM's own defaults are not always None.

    Raises:
        ValidationError: There are names that vLLM does not know, that belong elsewhere or that serve-app sets itself, or values of a wrong
            type.
    """
    result = _with_underscores(args)
    problems = [problem for name, value in result.items() for problem in _engine_arg_problems(name, value)]
    if not result.get("reasoning_parser_plugin"):
        problems += _parser_problems("reasoning_parser", result, reasoning_parser_names())
    refuse(problems)
    return {name: value for name, value in result.items() if value is not None}


def _engine_arg_problems(name: str, value: JsonValue) -> Iterator[PydanticCustomError]:
    if way_out := _way_out_of_reserved(name):
        yield wrong(name, f"is {value!r}, but serve-app sets this argument itself", way_out)
    elif name == "hf_token" and isinstance(value, str):
        yield wrong(name, "is a secret, and dashboards show the configuration", TOKEN)  # the message does not show the value
    elif engine_arg_types() and name not in engine_arg_types():
        if name in known_frontend_args():
            yield wrong(name, "is an argument of vLLM's front end", "put it under frontend_args")
        else:
            yield _unknown_argument(name, engine_arg_types())
    else:
        wrong_type = [*_type_problems(name, value, engine_arg_types().get(name, Any))]
        yield from wrong_type or _range_problems(name, value)


def _range_problems(name: str, value: JsonValue) -> Iterator[PydanticCustomError]:
    bounds = engine_arg_bounds().get(name, {})
    if isinstance(value, int | float) and not all(_KEEPS[kind](value, bound) for kind, bound in bounds.items()):
        allowed = " and ".join(f"{_SIGNS[kind]} {bound:g}" for kind, bound in bounds.items())
        yield wrong(name, f"is {value!r}, but vLLM takes a number {allowed}")


def _parser_problems(name: str, args: Mapping[str, JsonValue], known: Collection[str]) -> Iterator[PydanticCustomError]:
    parser = args.get(name)
    if isinstance(parser, str) and parser and known and parser not in known:
        hint = did_you_mean(parser, known) or f"vLLM has {', '.join(sorted(known))}"
        yield wrong(name, f"is {parser!r}, which is not one of vLLM's parsers", hint)


def checked_frontend_args(args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the arguments of vLLM's OpenAI front end, checked as `checked_engine_args` does."""
    result = _with_underscores(args)
    problems = [problem for name, value in result.items() for problem in _frontend_arg_problems(name, value)]
    parser = result.get("tool_call_parser")
    if result.get("enable_auto_tool_choice") and not parser:
        problem = f"is {result['enable_auto_tool_choice']!r} and tool_call_parser is {parser!r}"
        hint = "set tool_call_parser, for example to hermes, or remove enable_auto_tool_choice"
        problems.append(wrong("enable_auto_tool_choice", problem, hint))
    if not result.get("tool_parser_plugin"):
        problems += _parser_problems("tool_call_parser", result, tool_parser_names())
    refuse(problems)
    return {name: value for name, value in result.items() if value is not None}


def _frontend_arg_problems(name: str, value: JsonValue) -> Iterator[PydanticCustomError]:
    known = known_frontend_args()
    if way_out := RESERVED_FRONTEND_ARGS.get(name):
        yield wrong(name, f"is {value!r}, which serve-app does not serve", way_out)
    elif known and name not in known:
        if name in engine_arg_types():
            yield wrong(name, "is an argument of vLLM's engine", "put it under engine_args")
        else:
            yield _unknown_argument(name, known)
    else:
        yield from _type_problems(name, value, known.get(name, Any))


def _type_problems(name: str, value: JsonValue, kind: Any) -> Iterator[PydanticCustomError]:
    """Check the type strictly, as JSON: vLLM takes these values as they are, except that it takes a list as a set or a tuple."""
    if value is None:
        return  # null counts as not given
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        hint = number_hint(name, value) if isinstance(value, str) and {int, float} & {kind, *get_args(kind)} else ""
        options = [o for part in (kind, *get_args(kind)) if get_origin(part) is Literal for o in get_args(part)]
        if isinstance(value, str) and options:
            hint = nearest(value, [o for o in options if isinstance(o, str)])  # _words lists them all
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        yield wrong(name, f"is {shown}, but vLLM takes {_words(kind)}", hint)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if isinstance(kind, type) or get_origin(kind) in (list, dict, set, tuple):
        return str(kind) if get_origin(kind) else str(kind.__name__)
    return " or ".join(_words(part) for part in get_args(kind) if part is not NoneType)


def _with_underscores(args: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    result: dict[str, JsonValue] = {}
    for written, value in args.items():
        name = written.lstrip("-").replace("-", "_")
        if name in result:
            raise wrong(written, f"is given twice: {result[name]!r} and {value!r}", f"keep one {name}")
        result[name] = value
    return result


def _unknown_argument(name: str, known: Collection[str]) -> PydanticCustomError:
    if name in listener_arg_types():
        hint = _LISTENER_WAY_OUT.get(name, _OTHER_LISTENER)
        return wrong(name, "has no effect here", hint)  # the message does not show the value: api_key is a secret
    if name.startswith("no_") and name[3:] in known:
        return wrong(name, "unknown argument", f"write {name[3:]}: false")
    return wrong(name, "unknown argument", foreign_hint(name) or did_you_mean(name, known))
