"""Values of vLLM's arguments are checked against vLLM's own types, without importing it."""

from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.functional_validators import AfterValidator

from serve_app.config.checks import to_config_errors
from serve_app.config.vllm_arguments import checked_engine_args, checked_frontend_args

ENGINE: TypeAdapter[Any] = TypeAdapter(Annotated[dict[str, Any], AfterValidator(checked_engine_args)])
FRONTEND: TypeAdapter[Any] = TypeAdapter(Annotated[dict[str, Any], AfterValidator(checked_frontend_args)])


def refusals(adapter: TypeAdapter[Any], **args: Any) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python(args)
    return [str(problem) for problem in to_config_errors(refused.value)]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_model_len": "2048"}, "is '2048', but vLLM takes int; give a plain number without unit: write 2048"),
        ({"max_model_len": "4k"}, "is '4k', but vLLM takes int; give a plain number without unit"),
        ({"max_model_len": 2048.5}, "is 2048.5, but vLLM takes int"),
        ({"seed": True}, "is True, but vLLM takes int"),
        ({"gpu_memory_utilization": "0.9"}, "is '0.9', but vLLM takes float; give a plain number without unit: write 0.9"),
        ({"enforce_eager": "yes"}, "is 'yes', but vLLM takes bool"),
        ({"enable_prefix_caching": 1}, "is 1, but vLLM takes bool"),
        ({"max_num_seqs": [1]}, "is [1], but vLLM takes int"),
        ({"runner": "poling"}, "is 'poling', but vLLM takes one of auto, generate, pooling, draft; did you mean pooling?"),
        ({"dtype": "f8"}, "is 'f8', but vLLM takes one of auto, half, float16, bfloat16, float, float32"),
        ({"runner": "embed"}, "is 'embed', but vLLM takes one of auto, generate, pooling, draft"),
        ({"cudagraph_capture_sizes": [1, "2"]}, "is [1, '2'], but vLLM takes list[int]"),
        ({"limit_mm_per_prompt": {"image": "2"}}, "is {'image': '2'}, but vLLM takes dict[str, int | dict[str, int]]"),
    ],
)
def test_a_value_of_another_type_is_refused_with_vllms_own(args: dict[str, Any], said: str) -> None:
    (name,) = args
    assert refusals(ENGINE, **args) == [f"{name}: {said}"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"gpu_memory_utilization": 90}, "is 90, but vLLM takes a number above 0 and of at most 1"),
        ({"max_loras": 0}, "is 0, but vLLM takes a number of at least 1"),
        ({"max_model_len": -2}, "is -2, but vLLM takes a number of at least -1"),
        ({"max_lora_rank": 20}, "is 20, but vLLM takes one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        ({"reasoning_parser": "quen3"}, "is 'quen3', which is not one of vLLM's parsers; did you mean qwen3?"),
    ],
)
def test_a_value_out_of_vllms_range_is_refused(args: dict[str, Any], said: str) -> None:
    (name,) = args
    assert refusals(ENGINE, **args) == [f"{name}: {said}"]


def test_a_misspelt_tool_parser_is_refused_unless_a_plugin_may_bring_it() -> None:
    (said,) = refusals(FRONTEND, enable_auto_tool_choice=True, tool_call_parser="hermess")
    assert said == "tool_call_parser: is 'hermess', which is not one of vLLM's parsers; did you mean hermes?"
    args = {"tool_call_parser": "hermess", "tool_parser_plugin": "/plugins/hermess.py"}
    assert FRONTEND.validate_python(args) == args


def test_a_token_is_refused_without_being_printed() -> None:
    (said,) = refusals(ENGINE, hf_token="hf_abc")
    assert "hf_abc" not in said
    assert said.startswith("hf_token: is a secret, ")
    assert said.endswith("export HF_TOKEN before serve-app up; the Helm chart takes a Secret: weights.huggingFaceTokenSecret")
    assert ENGINE.validate_python({"hf_token": True}) == {"hf_token": True}  # the machine's own


def test_values_that_vllm_takes_pass() -> None:
    args = {
        "max_model_len": 2048,
        "gpu_memory_utilization": 1,
        "dtype": "float32",
        "cpu_offload_params": ["a"],
        "limit_mm_per_prompt": {"image": 2, "video": {"count": 1}},
        "hf_overrides": {"rope_theta": 1e6},
        "compilation_config": {"level": 3},
        "quantization": "fp8",
    }
    assert ENGINE.validate_python(args) == args


def test_all_wrong_arguments_are_named_at_once() -> None:
    assert refusals(ENGINE, seed="one", max_modl_len=5, model="x") == [
        "seed: is 'one', but vLLM takes int; give a plain number without unit",
        "max_modl_len: unknown argument; did you mean max_model_len?",
        "model: is 'x', but serve-app sets this argument itself; set `model` beside engine_args",
    ]
    assert refusals(FRONTEND, response_role=5, enable_auto_tool_choice=True)[0] == "response_role: is 5, but vLLM takes str"
