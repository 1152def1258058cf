from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from serve_app.core.request import Resume
from serve_app.ingress.fleet.intake import resume_of

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"seed": 7}


class NewerParams(SamplingParams):  # type: ignore[misc]  # vLLM's is untyped here
    """As a newer vLLM may have it."""

    echo_penalty: float = 0.0
    words: list[str] | None = None
    judge: object | None = None


class NewerRequest(EngineCoreRequest):  # type: ignore[misc]
    draft: str | None = None


def request(sampling_params: SamplingParams | None = None, kind: type = EngineCoreRequest, **fields: Any) -> Any:
    return kind("r", [1, 2], None, sampling_params, None, 0.0, None, None, None, **fields)


def grammar(backend: str | None = "xgrammar") -> StructuredOutputsParams:
    """Return one as vLLM's input processor leaves it."""
    params = StructuredOutputsParams(choice=["x"])
    params._backend = backend
    return params


@pytest.mark.parametrize(
    ("params", "on_v1", "on_v2"),
    [
        (GREEDY, Resume.CONTINUE, Resume.CONTINUE),
        ({}, Resume.CONTINUE, Resume.CONTINUE),
        (SEEDED, Resume.REPLAY, Resume.CONTINUE),
        ({**GREEDY, **SEEDED}, Resume.CONTINUE, Resume.CONTINUE),
        ({"presence_penalty": 0.5}, Resume.CONTINUE, Resume.CONTINUE),
        ({**GREEDY, "presence_penalty": 0.5}, Resume.REPLAY, Resume.REPLAY),
        ({**GREEDY, "presence_penalty": 0}, Resume.CONTINUE, Resume.CONTINUE),
        ({**SEEDED, "frequency_penalty": -0.5}, Resume.REPLAY, Resume.REPLAY),
        ({**GREEDY, "repetition_penalty": 1.5}, Resume.CONTINUE, Resume.CONTINUE),
        ({**GREEDY, "bad_words": ["no"]}, Resume.REPLAY, Resume.REPLAY),
        ({**GREEDY, "bad_words": []}, Resume.CONTINUE, Resume.CONTINUE),
        ({**GREEDY, "thinking_token_budget": 5}, Resume.REPLAY, Resume.REPLAY),
        ({**GREEDY, "thinking_token_budget": 0}, Resume.REPLAY, Resume.REPLAY),
        ({**GREEDY, "watermarking": False}, Resume.CONTINUE, Resume.CONTINUE),
        ({**GREEDY, "watermarking": True}, Resume.REPLAY, Resume.REPLAY),
        (
            {**GREEDY, "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)},
            Resume.REPLAY,
            Resume.REPLAY,
        ),
        ({"structured_outputs": grammar()}, Resume.CONTINUE, Resume.CONTINUE),
        ({**GREEDY, "structured_outputs": grammar("guidance")}, Resume.CONTINUE, Resume.CONTINUE),
        ({**SEEDED, "structured_outputs": grammar()}, Resume.REPLAY, Resume.CONTINUE),
        ({**GREEDY, "structured_outputs": grammar(), "bad_words": ["no"]}, Resume.REPLAY, Resume.REPLAY),
        ({"structured_outputs": grammar("newer")}, Resume.NEVER, Resume.NEVER),
        ({**GREEDY, "structured_outputs": grammar("newer")}, Resume.REPLAY, Resume.REPLAY),
        ({**GREEDY, "trace_decode_token_ids": [5]}, Resume.REPLAY, Resume.REPLAY),
        ({"logprobs": 2, "prompt_logprobs": 1, "min_tokens": 3, "logit_bias": {5: 1.0}}, Resume.CONTINUE, Resume.CONTINUE),
        ({"stop": ["end"], "stop_token_ids": [9], "allowed_token_ids": [5, 9]}, Resume.CONTINUE, Resume.CONTINUE),
        ({"extra_args": {"kv_cache_report_mode": "sum"}}, Resume.CONTINUE, Resume.CONTINUE),
    ],
)
def test_how_a_request_resumes_follows_from_what_the_engine_remembers(
    params: dict[str, Any], on_v1: Resume, on_v2: Resume
) -> None:
    asked = request(SamplingParams(max_tokens=8, **params))
    assert resume_of(asked, replays_seeded=True) is on_v1
    assert resume_of(asked, replays_seeded=False) is on_v2


@pytest.mark.parametrize("unknown", [{"echo_penalty": 0.5}, {"words": ["no"]}, {"judge": object()}, {"extra_args": {"mine": 1}}])
def test_a_parameter_that_the_table_does_not_know_never_continues(unknown: dict[str, Any]) -> None:
    kinds = [
        resume_of(request(params), replays_seeded=False)
        for params in (_newer(**unknown), _newer(**SEEDED, **unknown), _newer(**GREEDY, **unknown), _newer(**GREEDY))
    ]
    assert kinds == [Resume.NEVER, Resume.REPLAY, Resume.REPLAY, Resume.CONTINUE]


def _newer(**params: Any) -> SamplingParams:
    ours = {name: params.pop(name) for name in ("echo_penalty", "words", "judge") if name in params}
    made = NewerParams(**params)
    for name, value in ours.items():
        setattr(made, name, value)
    return made


def test_so_does_an_unknown_field_of_the_request() -> None:
    asked = request(SamplingParams(), NewerRequest, draft="on")
    assert resume_of(asked, replays_seeded=False) is Resume.NEVER
    assert resume_of(request(SamplingParams(), NewerRequest), replays_seeded=False) is Resume.CONTINUE


def test_a_pooling_request_restarts() -> None:
    assert resume_of(request(), replays_seeded=True) is Resume.RESTART


def test_a_prompt_of_embeddings_has_no_ids_to_continue_from() -> None:
    embeds = object()
    assert resume_of(request(SamplingParams(temperature=0.0), prompt_embeds=embeds), replays_seeded=False) is Resume.REPLAY
    assert resume_of(request(SamplingParams(), prompt_embeds=embeds), replays_seeded=False) is Resume.NEVER


def test_what_else_may_come_with_a_request_continues() -> None:
    asked = request(SamplingParams(), priority=3, session_id="s", reasoning_ended=True, trace_headers={"traceparent": "00"})
    assert resume_of(asked, replays_seeded=False) is Resume.CONTINUE
