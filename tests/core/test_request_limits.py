"""Each limit of a request passes its largest value and refuses the next one by the name of the field. vLLM's own structs."""

from typing import Any

import pytest
from vllm.pooling_params import LateInteractionParams, PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from serve_app.core import request_limits as limits
from serve_app.core.request_limits import problem_of, problem_of_params

VOCABULARY = 1024


def tokenized(num_words: int, num_tokens: int) -> SamplingParams:
    """Return parameters whose bad words became so many sequences, which have so many tokens together."""
    params = SamplingParams(bad_words=[f"w{i}" for i in range(num_words)])
    params._bad_words_token_ids = [[5] for _ in range(num_words - 1)] + [[5] * (num_tokens - num_words + 1)]
    return params


def repetition(longest: int, shortest: int, count: int) -> SamplingParams:
    detection = RepetitionDetectionParams(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    return SamplingParams(repetition_detection=detection)


CASES: dict[str, tuple[str, SamplingParams | PoolingParams, SamplingParams | PoolingParams]] = {
    "entries of logit_bias": (
        "logit_bias",
        SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)),
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
    ),
    "a bias": ("logit_bias", SamplingParams(logit_bias={1: -100.0}), SamplingParams(logit_bias={1: float("nan")})),
    "allowed tokens": (
        "allowed_token_ids",
        SamplingParams(allowed_token_ids=[*range(1024)]),
        SamplingParams(allowed_token_ids=[*range(1025)]),
    ),
    "stop tokens": (
        "stop_token_ids",
        SamplingParams(stop_token_ids=[*range(1024)]),
        SamplingParams(stop_token_ids=[*range(1025)]),
    ),
    "stop tokens beside min_tokens": (
        "stop_token_ids",
        SamplingParams(min_tokens=1, stop_token_ids=[*range(128)]),
        SamplingParams(min_tokens=1, stop_token_ids=[*range(129)]),
    ),
    "bad words": ("bad_words", tokenized(128, 128), tokenized(129, 129)),
    "tokens of bad words": ("bad_words", tokenized(100, 1024), tokenized(100, 1025)),
    "characters of bad words": ("bad_words", SamplingParams(bad_words=["x" * 16_384]), SamplingParams(bad_words=["x" * 16_385])),
    "comparisons for repetitions": ("repetition_detection", repetition(64, 1, 8), repetition(64, 1, 9)),
    "a pattern without an end": ("repetition_detection", repetition(20, 3, 4), repetition(10**9, 1, 2)),
    "seed": ("seed", SamplingParams(seed=2**63 - 1), SamplingParams(seed=2**63)),
    "max_tokens": ("max_tokens", SamplingParams(max_tokens=2**30 - 1), SamplingParams(max_tokens=2**30)),
    "top_k": ("top_k", SamplingParams(top_k=2**63 - 1), SamplingParams(top_k=2**63)),
    "stop texts": ("stop", SamplingParams(stop=["x"] * 64), SamplingParams(stop=["x"] * 65)),
    "characters of stop texts": ("stop", SamplingParams(stop=["x" * 16_384]), SamplingParams(stop=["x" * 16_384, "y"])),
    "values of vllm_xargs": (
        "vllm_xargs",
        SamplingParams(extra_args={"a": [1] * 997}),
        SamplingParams(extra_args={"a": [1] * 1000}),
    ),
    "characters of vllm_xargs": (
        "vllm_xargs",
        SamplingParams(extra_args={"a": "x" * 65_535}),
        SamplingParams(extra_args={"a": "x" * 65_536}),
    ),
    "a transfer of KV": (
        "kv_transfer_params",
        SamplingParams(extra_args={"kv_transfer_params": None}),
        SamplingParams(extra_args={"kv_transfer_params": {"do_remote_prefill": True}}),
    ),
    "a transfer of encoder outputs": (
        "ec_transfer_params",
        SamplingParams(extra_args={"mine": 1}),
        SamplingParams(extra_args={"ec_transfer_params": {"a": 1}}),
    ),
    "late interaction": (
        "late_interaction_params",
        PoolingParams(),
        PoolingParams(late_interaction_params=LateInteractionParams("score_doc", "key")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_largest_value_passes_and_the_next_is_refused_by_its_name(case: str) -> None:
    name, largest, next_one = CASES[case]
    assert problem_of_params(largest) is None
    refused = problem_of_params(next_one)
    assert refused is not None
    assert refused[0] == name


def request(**fields: Any) -> EngineCoreRequest:
    beside = {
        "cache_salt": None,
        "data_parallel_rank": None,
        "sampling_params": SamplingParams(),
        "pooling_params": None,
        **fields,
    }
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], mm_features=None, arrival_time=0.0, lora_request=None, **beside
    )


@pytest.mark.parametrize(
    ("fine", "refused"),
    [
        ({"cache_salt": "x" * 1024}, {"cache_salt": "x" * 1025}),
        ({"session_id": "x" * 1024}, {"session_id": "x" * 1025}),
        ({"priority": -(2**63)}, {"priority": 2**63}),
        ({"data_parallel_rank": 0}, {"data_parallel_rank": 1}),
        ({"resumable": False}, {"resumable": True}),
        ({"abort_immediately": False}, {"abort_immediately": True}),
        ({"kv_hints": None}, {"kv_hints": object()}),
        ({}, {"sampling_params": SamplingParams(seed=2**63)}),
        ({"sampling_params": None, "pooling_params": PoolingParams()}, {"sampling_params": SamplingParams(top_k=2**70)}),
    ],
)
def test_fields_beside_the_parameters_have_limits_too(fine: dict[str, Any], refused: dict[str, Any]) -> None:
    assert problem_of(request(**fine), VOCABULARY) is None
    assert problem_of(request(**refused), VOCABULARY) is not None


def test_a_bad_word_of_a_token_beyond_the_models_vocabulary_is_refused() -> None:
    """CVE-2026-93989: the tokenizer of a model with images may have more tokens than the model has logits."""
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [[5], [VOCABULARY - 1, 7]]
    assert problem_of(request(sampling_params=params), VOCABULARY) is None
    params._bad_words_token_ids = [[5], [7, VOCABULARY]]
    assert problem_of(request(sampling_params=params), VOCABULARY) == (
        "bad_words",
        f"has a token beyond the model's vocabulary of {VOCABULARY}",
    )


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    params = SamplingParams(max_tokens=5, min_tokens=5)
    assert problem_of_params(params) is None
    params.max_tokens = 4
    assert problem_of_params(params) == ("min_tokens", "is 5, more than max_tokens, 4")


def test_a_problem_says_what_there_is_and_what_the_limit_is() -> None:
    assert problem_of_params(SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))) == (
        "logit_bias",
        "has 1025 entries, limit 1024",
    )
    assert problem_of_params(SamplingParams(min_tokens=1, stop_token_ids=[*range(129)])) == (
        "stop_token_ids",
        "has 129 tokens with those that end the model's answers, limit 128 beside min_tokens",
    )


def test_every_limit_of_the_table_has_a_case_here() -> None:
    checked = {name for struct in limits.LIMITS for name, rule in limits.LIMITS[struct].items() if not isinstance(rule, str)}
    cases = {name for name, _, _ in CASES.values()} | {"min_tokens", "extra_kwargs"}
    beside = {"cache_salt", "session_id", "priority", "data_parallel_rank", "resumable", "abort_immediately", "kv_hints"}
    assert checked - cases - beside == set()
