"""vLLM itself confirms what is read from its source."""

import dataclasses
import importlib
from typing import Any, get_args

from vllm.config import CacheConfig, LoRAConfig, ModelConfig, MultiModalConfig, ParallelConfig, SchedulerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from serve_app.config.vllm_arguments import RESERVED_ENGINE_ARGS, RESERVED_FRONTEND_ARGS, known_frontend_args
from serve_app.config.vllm_source import (
    engine_arg_bounds,
    engine_arg_types,
    frontend_arg_types,
    listener_arg_types,
    reasoning_parser_names,
    server_arguments_module,
    takes_media,
    tool_parser_names,
    vllm_version,
)
from tests.contracts.tables import INSTALLED

SERVER: Any = importlib.import_module(server_arguments_module())

CONFIGS: tuple[Any, ...] = (CacheConfig, LoRAConfig, ParallelConfig, SchedulerConfig, ModelConfig, MultiModalConfig)
"""A later one has the last word: what an earlier one only takes over has no range there."""


def types_of(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind) if not field.name.startswith("_")}


def bounds_of(metadata: Any) -> dict[str, float]:
    """What a mark of annotated_types bounds, such as Ge(ge=0)."""
    return {kind: getattr(metadata, kind) for kind in ("gt", "ge", "lt", "le") if hasattr(metadata, kind)}


def is_known(kind: Any) -> bool:
    return kind is not Any and all(is_known(part) for part in get_args(kind))


def test_the_names_are_those_vllm_reports() -> None:
    assert set(engine_arg_types()) == set(types_of(AsyncEngineArgs))
    assert set(frontend_arg_types()) == set(types_of(SERVER.BaseFrontendArgs))
    assert set(frontend_arg_types()) | set(listener_arg_types()) == set(types_of(SERVER.FrontendArgs))
    assert set(RESERVED_ENGINE_ARGS) <= set(engine_arg_types())
    assert set(RESERVED_FRONTEND_ARGS) <= set(known_frontend_args())


def test_a_type_that_is_told_is_vllms_own_and_most_are() -> None:
    for ours, theirs in ((engine_arg_types(), types_of(AsyncEngineArgs)), (known_frontend_args(), types_of(SERVER.FrontendArgs))):
        told = {name: kind for name, kind in ours.items() if is_known(kind)}
        assert told == {name: theirs[name] for name in told}
        assert len(told) > 0.75 * len(ours)


def test_the_range_of_a_number_is_the_one_that_vllms_configuration_gives_it() -> None:
    bounds = engine_arg_bounds()
    assert bounds["gpu_memory_utilization"] == {"gt": 0, "le": 1}
    assert bounds["max_loras"] == {"ge": 1}
    fields = {name: field for config in CONFIGS for name, field in config.__pydantic_fields__.items()}
    theirs = {name: {k: v for m in fields[name].metadata for k, v in bounds_of(m).items()} for name in bounds if name in fields}
    assert len(theirs) > 20
    assert {name: bounds[name] for name in theirs} == theirs


def test_the_names_of_parsers_are_those_vllm_registers() -> None:
    assert tool_parser_names() == set(ToolParserManager.list_registered())
    assert reasoning_parser_names() == set(ReasoningParserManager.list_registered())


def test_the_models_that_take_media_are_those_that_vllm_registers_with_a_processor() -> None:
    """`tests/cuda/test_media.py` compares all tables."""
    assert all(takes_media(name) for name in registry._MULTIMODAL_MODELS)
    found = {name for name in registry._LATE_INTERACTION_MODELS | registry._REWARD_MODELS if takes_media(name)}
    assert found == {
        *("ColModernVBertForRetrieval", "ColPaliForRetrieval", "ColQwen3", "ColQwen3_5", "OpsColQwen3Model"),
        "Qwen3VLNemotronEmbedModel",
    }
    assert not any(takes_media(name) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Unknown"))


def test_of_models_with_a_class_for_each_platform_those_that_take_media_are_found() -> None:
    """Their code imports kernels for GPUs, so that vLLM cannot be asked here. Its tables tell, but for Inkling."""
    tables = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    of_a_platform = {name for name, (module, _) in tables.items() if module.startswith("vllm.models.")}
    found = {name for name in of_a_platform if takes_media(name)}
    assert found == {"InklingForConditionalGeneration"} | (of_a_platform & registry._MULTIMODAL_MODELS.keys())


def test_the_version_is_the_one_of_the_installed_packages() -> None:
    assert vllm_version() == INSTALLED
