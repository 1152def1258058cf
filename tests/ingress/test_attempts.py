from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from serve_app.core.instructions import DeliverOutputs, StartAttempt
from serve_app.ingress.fleet.attempts import attempt_request, drop_what_belongs_to_swallowed, refused_by_engines


def request(prompt_embeds: Any = None, sampling_params: SamplingParams | None = None, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        "r", [1, 2], None, sampling_params, None, 0.0, None, None, None, prompt_embeds=prompt_embeds, **fields
    )


@pytest.mark.parametrize(("stop_reason", "refused"), [(None, ["r"]), ("replica", [])])
def test_only_a_failure_of_vllms_own_before_the_first_token_is_laid_to_the_grammar(
    stop_reason: str | None, refused: list[str]
) -> None:
    asked = request(sampling_params=SamplingParams(structured_outputs=StructuredOutputsParams(json={})))
    failed = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, stop_reason=stop_reason)
    assert list(refused_by_engines([failed], {"r": asked}, {"r": SimpleNamespace(is_prefilling=True)})) == refused


def test_a_refusal_of_the_replica_names_the_value() -> None:
    asked = request(sampling_params=SamplingParams())
    failed = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, stop_reason="refused prompt: has 9 tokens: too many")
    (error,) = refused_by_engines([failed], {"r": asked}, {}).values()
    assert (error.param, error.problem) == ("prompt", "has 9 tokens: too many")


def test_a_first_attempt_is_the_request_under_its_own_id() -> None:
    original = request(sampling_params=SamplingParams(max_tokens=8, prompt_logprobs=1), client_index=3)
    attempt = attempt_request(original, StartAttempt("r", "r@0", "a", (), 0))
    assert (attempt.request_id, attempt.client_index) == ("r@0", 0)
    assert attempt.sampling_params is original.sampling_params
    assert (original.request_id, original.client_index) == ("r", 3)


def test_a_continued_attempt_asks_only_for_what_is_left_and_leaves_the_original_alone() -> None:
    params = SamplingParams(
        max_tokens=8,
        min_tokens=1,
        prompt_logprobs=1,
        logprobs=2,
        extra_args={"other": 2},
        stop_token_ids=[9],
    )
    before = repr(params)
    original = request(sampling_params=params, reasoning_ended=True)
    attempt = attempt_request(original, StartAttempt("r", "r@1", "a", (5, 6), 2))
    asked = attempt.sampling_params
    assert attempt.prompt_token_ids == [1, 2, 5, 6]
    assert attempt.reasoning_ended is True
    assert (asked.max_tokens, asked.min_tokens, asked.prompt_logprobs, asked.logprobs) == (6, 0, None, 2)
    assert asked.extra_args == {"other": 2}
    assert asked.all_stop_token_ids == {9}
    assert original.prompt_token_ids == [1, 2]
    assert repr(params) == before


def test_a_replayed_attempt_asks_for_everything_again_but_prompt_logprobs() -> None:
    params = SamplingParams(max_tokens=8, min_tokens=3, prompt_logprobs=1, prompt_logprob_start=1)
    original = request(sampling_params=params)
    attempt = attempt_request(original, StartAttempt("r", "r@1", "a", (), 2))
    asked = attempt.sampling_params
    assert attempt.prompt_token_ids == [1, 2]
    assert (asked.max_tokens, asked.min_tokens, asked.prompt_logprobs, asked.prompt_logprob_start) == (8, 3, None, None)


def test_a_restarted_pooling_request_is_the_request_again() -> None:
    original = request()
    assert attempt_request(original, StartAttempt("r", "r@2", "a", (), 0)).sampling_params is None


def test_log_probabilities_of_swallowed_tokens_are_dropped_with_them() -> None:
    lists = LogprobsLists(np.arange(6).reshape(3, 2), np.arange(6.0).reshape(3, 2), np.arange(3))
    whole = EngineCoreOutput("a", [4, 5, 6], new_logprobs=lists)
    seam = EngineCoreOutput("b", [6], new_logprobs=lists)
    plain = EngineCoreOutput("c", [7])
    drop_what_belongs_to_swallowed(DeliverOutputs([whole, seam, plain], ((1, 2), (2, 1))))
    assert whole.new_logprobs is lists
    assert seam.new_logprobs is not None
    assert [part.tolist() for part in seam.new_logprobs[:3]] == [[[4, 5]], [[4.0, 5.0]], [2]]
    assert plain.new_logprobs is None


def test_sampling_masks_of_swallowed_tokens_are_dropped_with_them() -> None:
    mask = SamplingMaskLists(np.array([10, 11, 20, 30, 31, 32]), np.array([0, 2, 3, 6]))
    assert mask.to_nested_list() == [[10, 11], [20], [30, 31, 32]]
    two_left = EngineCoreOutput("a", [5, 6], new_sampling_mask=mask)
    one_left = EngineCoreOutput("b", [6], new_sampling_mask=mask)
    whole = EngineCoreOutput("c", [4, 5, 6], new_sampling_mask=mask)
    drop_what_belongs_to_swallowed(DeliverOutputs([two_left, one_left, whole], ((0, 1), (1, 2))))
    kept = [o.new_sampling_mask.to_nested_list() for o in (two_left, one_left, whole) if o.new_sampling_mask is not None]
    assert kept == [[[20], [30, 31, 32]], [[30, 31, 32]], [[10, 11], [20], [30, 31, 32]]]
