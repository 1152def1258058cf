"""What is read from vLLM's source is what vLLM itself says."""

import dataclasses
from typing import Any, get_args

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, FrontendArgs

from serve_app.config.vllm_arguments import RESERVED_ENGINE_ARGS, RESERVED_FRONTEND_ARGS, known_frontend_args
from serve_app.config.vllm_source import engine_arg_types, frontend_arg_types, listener_arg_types


def types_of(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind) if not field.name.startswith("_")}


def is_known(kind: Any) -> bool:
    return kind is not Any and all(is_known(part) for part in get_args(kind))


def test_the_names_are_those_vllm_reports() -> None:
    assert set(engine_arg_types()) == set(types_of(AsyncEngineArgs))
    assert set(frontend_arg_types()) == set(types_of(BaseFrontendArgs))
    assert set(frontend_arg_types()) | set(listener_arg_types()) == set(types_of(FrontendArgs))
    assert set(RESERVED_ENGINE_ARGS) <= set(engine_arg_types())
    assert set(RESERVED_FRONTEND_ARGS) <= set(known_frontend_args())


def test_a_type_that_is_told_is_vllms_own_and_most_are() -> None:
    for ours, theirs in ((engine_arg_types(), types_of(AsyncEngineArgs)), (known_frontend_args(), types_of(FrontendArgs))):
        told = {name: kind for name, kind in ours.items() if is_known(kind)}
        assert told == {name: theirs[name] for name in told}
        assert len(told) > 0.75 * len(ours)
