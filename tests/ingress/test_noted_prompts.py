"""The prompts of an HTTP request are noted when vLLM's routes make its generations, before one of them starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.quotas import Prompt
from serve_app.core.tenants import Tenant
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.front_end.noted_prompts import note_beam_search, note_beam_searches, note_prompts
from tests.ingress.helpers import answering
from tests.ingress.tenants import caller


class Engine:
    """The parts of vLLM's engine and app that make generations. They return their arguments."""

    model_config = SimpleNamespace(max_model_len=100)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        return prompt, sampling_params, request_id

    def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> Any:
        return prompt, pooling_params, request_id

    def beam_search(self, prompt: Any, request_id: str, params: Any) -> Any:
        return prompt, request_id, params


def tokens(number: int) -> dict[str, Any]:
    return {"prompt_token_ids": [5] * number}


def asks(n: int, max_tokens: int | None) -> Any:
    return SimpleNamespace(n=n, max_tokens=max_tokens)


def noted(tenant: Tenant | None, *calls: Any) -> list[Prompt]:
    """Return what is noted of a request whose route makes these calls of an engine."""
    engine: Any = Engine()
    note_prompts(engine)
    exchange = Exchange("/v1/completions", None if tenant is None else caller(tenant))
    with answering(exchange):
        for call in calls:
            call(engine)
    return exchange.prompts


@pytest.mark.parametrize(
    ("tenant", "max_tokens", "expected"),
    [
        (Tenant("a"), 7, 7),
        (Tenant("a"), None, 90),
        (Tenant("a"), 1000, 90),
        (Tenant("a", max_tokens=5), None, 5),
        (Tenant("a", max_context=12), 50, 2),
        (Tenant("a", max_context=9), 50, 1),
    ],
)
def test_an_answer_is_as_long_as_request_tenant_and_context_allow(tenant: Tenant, max_tokens: int | None, expected: int) -> None:
    assert noted(tenant, lambda engine: engine.generate(tokens(10), asks(3, max_tokens), "id")) == [Prompt(10, 3, expected)]


def test_each_prompt_of_a_list_is_noted_and_a_text_to_embed_has_no_answer() -> None:
    decoder = {"type": "enc_dec", "encoder_prompt": tokens(9), "decoder_prompt": tokens(1)}
    calls = [
        lambda engine: engine.generate(tokens(2), asks(1, 4), "id-0"),
        lambda engine: engine.generate(prompt=decoder, sampling_params=asks(2, 4), request_id="id-1"),
        lambda engine: engine.encode(prompt=tokens(3), pooling_params=None, request_id="id-2"),
        lambda engine: engine.encode("a text", None, "id-3"),
    ]
    assert noted(Tenant("a"), *calls) == [Prompt(2, 1, 4), Prompt(1, 2, 4), Prompt(3, 0, 1), Prompt(0, 0, 1)]


def test_a_beam_search_is_noted_as_a_whole_and_its_steps_are_not() -> None:
    state = SimpleNamespace(openai_serving_chat=Engine(), openai_serving_completion=None)
    note_beam_searches(state, 100)
    params = SimpleNamespace(beam_width=4, max_tokens=30)
    calls = [
        lambda _: state.openai_serving_chat.beam_search(prompt=tokens(2), request_id="id", params=params),
        lambda engine: engine.generate(tokens(2), asks(1, 1), "id-beam-0"),
        lambda _: note_beam_search(tokens(90), 2, 30, 100),
    ]
    assert noted(Tenant("a"), *calls) == [Prompt(2, 4, 30, is_beam_search=True), Prompt(90, 2, 10, is_beam_search=True)]


def test_without_tenants_only_beam_searches_are_noted() -> None:
    assert noted(None, lambda engine: engine.generate(tokens(2), asks(1, 4), "id")) == []
    assert noted(None, lambda _: note_beam_search(tokens(90), 2, 30, 100)) == [Prompt(90, 2, 10, is_beam_search=True)]


def test_an_engine_outside_of_a_request_works_as_before() -> None:
    engine: Any = Engine()
    note_prompts(engine)
    assert engine.generate("p", asks(1, None), "id") == ("p", asks(1, None), "id")
    assert engine.encode("p", None, request_id="id") == ("p", None, "id")
