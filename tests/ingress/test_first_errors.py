"""Wrong bodies have a bounded cost: the tests count errors, not the time that they take."""

from collections.abc import Iterable
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError, model_validator
from starlette.testclient import TestClient
from typing_extensions import TypedDict
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from serve_app.ingress.http.first_errors import (
    MAX_GRAMMAR_CHARS,
    MAX_ITEMS,
    MAX_OBJECTS,
    MAX_SEQUENCES,
    MAX_TEMPLATE_KWARGS,
    MAX_VALUES,
    FirstErrors,
    json_validator,
    of_model,
    stop_at_first_errors,
)


class Part(TypedDict):
    type: int
    parts: list[int]


class Inner(BaseModel):
    numbers: set[int]


class Body(BaseModel):
    items: list[Part | Inner | int] | str = ""
    metadata: dict[str, int] = {}
    pairs: tuple[Inner, ...] = ()
    more: Iterable[Any] = ()
    spec: Any = None

    @model_validator(mode="before")
    @classmethod
    def _looks_into_the_spec(cls, values: dict[str, Any]) -> dict[str, Any]:
        (values.get("spec") or {}).get("x")
        return values


MANY = MAX_VALUES * 10
WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"items": ["a"]}, {"items": ["a"] * MANY}),
    ({"items": [{"type": 1, "parts": ["a"]}]}, {"items": [{"type": 1, "parts": ["a"] * MANY}]}),
    ({"items": [{"numbers": ["a"]}]}, {"items": [{"numbers": [f"a{n}" for n in range(MANY)]}]}),
    ({"metadata": {"a": "b"}}, {"metadata": {f"a{n}": "b" for n in range(MANY)}}),
    ({"pairs": [{"numbers": ["a"]}]}, {"pairs": [{"numbers": ["a"]}] * MANY}),
]


def num_errors(validator: FirstErrors | type[BaseModel], value: dict[str, Any]) -> int:
    with pytest.raises(ValidationError) as refused:
        validator.model_validate(value) if isinstance(validator, type) else validator.validate_python(value)
    return refused.value.error_count()


@pytest.mark.parametrize(("one", "many"), WRONG)
def test_many_wrong_elements_cost_no_more_errors_than_one(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert num_errors(of_model(Body), many) == num_errors(Body, one) < num_errors(Body, many)


def test_json_is_validated_likewise() -> None:
    with pytest.raises(ValidationError) as refused:
        json_validator(Body).validate_json(b'{"items": [' + b'"a", ' * MANY + b'"a"]}')
    assert refused.value.error_count() == num_errors(Body, {"items": ["a"]})


def test_the_error_of_a_small_body_lists_all_that_is_wrong() -> None:
    small = {"items": ["a"] * 3, "metadata": {"a": "b", "c": "d"}}
    assert num_errors(of_model(Body), small) == num_errors(Body, small)


def test_a_right_body_becomes_what_the_model_makes_of_it() -> None:
    body = of_model(Body).validate_python({"items": [1, {"type": 2, "parts": [3]}], "metadata": {"a": 4}})
    assert body == Body.model_validate({"items": [1, {"type": 2, "parts": [3]}], "metadata": {"a": 4}})


def test_items_of_responses_have_a_limit_of_their_own_and_texts_to_embed_have_not() -> None:
    with pytest.raises(ValidationError, match=f"input has {MAX_ITEMS + 1} items, limit {MAX_ITEMS}"):
        of_model(Body).validate_python({"input": [{}] * (MAX_ITEMS + 1)})
    of_model(Body).validate_python({"input": [{}] * MAX_ITEMS})
    of_model(Body).validate_python({"input": ["a"] * (MAX_ITEMS + 1)})


@pytest.mark.parametrize("content", [[], [{"type": "refusal", "refusal": "no"}]])
def test_an_earlier_answer_without_a_text_at_its_beginning_is_refused_as_the_clients_mistake(content: list[Any]) -> None:
    answer = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
    text = {"type": "output_text", "text": "hi", "annotations": []}
    with pytest.raises(ValidationError, match="must begin with a text"):
        of_model(ResponsesRequest).validate_python({"input": [answer | {"content": content}]})
    request = of_model(ResponsesRequest).validate_python(
        {"input": [answer | {"content": [text, *content]}, {"role": "user", "content": []}]}
    )
    assert len(request.input) == 2


@pytest.mark.parametrize(
    "more", [[{}] * (MAX_OBJECTS + 1), [[[]] * (MAX_OBJECTS // 2 + 1)] * 2, {"a": [{"b": [{}] * MAX_OBJECTS}]}]
)
def test_more_objects_than_any_request_needs_are_refused_unseen(more: Any) -> None:
    with pytest.raises(ValidationError, match=f"more than {MAX_OBJECTS} objects"):
        of_model(Body).validate_python({"more": more})


def test_as_many_objects_as_allowed_and_any_number_of_plain_values_are_taken() -> None:
    of_model(Body).validate_python({"more": [{}] * MAX_OBJECTS})
    of_model(Body).validate_python({"more": [7] * (MAX_OBJECTS * 2)})


class Prompts(BaseModel):
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    input: Any = None
    n: int | None = None


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * (MAX_SEQUENCES + 1)},
        {"prompt": [[1]] * (MAX_SEQUENCES // 2), "n": 3},
        {"input": ["a"] * (MAX_SEQUENCES + 1)},
        {"prompt": ["a", "b"], "n": MAX_SEQUENCES},
    ],
)
def test_more_sequences_than_one_request_may_become_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"limit {MAX_SEQUENCES}"):
        of_model(Prompts).validate_python(body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [7] * (MAX_SEQUENCES + 1)},
        {"prompt": ["a"] * MAX_SEQUENCES, "n": 1},
        {"prompt": []},
        {"input": [{"role": "user"}]},
    ],
)
def test_a_prompt_of_many_tokens_is_one_sequence(body: dict[str, Any]) -> None:
    assert of_model(Prompts).validate_python(body) == Prompts.model_validate(body)


def test_a_refusal_says_its_words_once() -> None:
    with pytest.raises(ValidationError) as refused:
        of_model(Body).validate_python({"spec": "{x}", "more": [{}] * (MAX_OBJECTS + 1)})
    (error,) = refused.value.errors()
    assert "ctx" not in error


class Constrained(BaseModel):
    structured_outputs: Any = None
    response_format: Any = None
    text: Any = None
    tools: Any = None
    tool_choice: Any = None


LARGE = {"json": {"enum": ["a" * MAX_GRAMMAR_CHARS]}}
LARGE_TOOL = {"type": "function", "function": {"name": "large", "parameters": LARGE}}
STRICT_TOOL = {"type": "function", "function": {"name": "large", "strict": True, "parameters": LARGE}}
TOLD_TOOL = {"type": "function", "function": {"name": "told", "description": "a" * MAX_GRAMMAR_CHARS, "parameters": {}}}
NAMED = {"type": "function", "function": {"name": "large"}}


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": LARGE},
        {"response_format": LARGE},
        {"text": {"format": LARGE}},
        {"tools": [LARGE_TOOL], "tool_choice": "required"},
        {"tools": [LARGE_TOOL], "tool_choice": NAMED},
        {
            "tools": [{"type": "function", "name": "large", "parameters": LARGE}],
            "tool_choice": {"type": "function", "name": "large"},
        },
        {"tools": [STRICT_TOOL]},
        {"tools": [STRICT_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
    ],
)
def test_a_grammar_that_takes_long_to_compile_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"limit {MAX_GRAMMAR_CHARS}"):
        of_model(Constrained).validate_python(body)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [LARGE_TOOL]},
        {"tools": [LARGE_TOOL], "tool_choice": "auto"},
        {"tools": [STRICT_TOOL], "tool_choice": "none"},
        {"tools": [LARGE_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        {"tools": [LARGE_TOOL, TOLD_TOOL], "tool_choice": {"type": "function", "function": {"name": "told"}}},
        {"tools": [TOLD_TOOL], "tool_choice": "required"},
        {"tools": [7, {"function": "x"}, {}], "tool_choice": "required"},
    ],
)
def test_tools_that_constrain_nothing_may_be_as_large_as_the_prompt(body: dict[str, Any]) -> None:
    of_model(Constrained).validate_python(body)


class Templated(BaseModel):
    chat_template_kwargs: dict[str, Any] | None = None
    bad_words: list[str] | None = None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"chat_template_kwargs": {str(number): 1 for number in range(MAX_TEMPLATE_KWARGS + 1)}},
            f"chat_template_kwargs has {MAX_TEMPLATE_KWARGS + 1} keys, limit {MAX_TEMPLATE_KWARGS}; send fewer",
        ),
        ({"bad_words": ["a", "b\ud800"]}, r"bad_words holds '\ud800', half a surrogate pair; leave it out"),
    ],
)
def test_what_vllm_would_stumble_over_after_its_validation_is_refused_by_its_name(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        of_model(Templated).validate_python(body)
    assert [error["msg"] for error in refused.value.errors()] == [said]


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {str(number): 1 for number in range(MAX_TEMPLATE_KWARGS)}, "bad_words": ["a", "\U0001f600"]},
        {"chat_template_kwargs": None, "bad_words": None},
    ],
)
def test_ordinary_values_of_these_fields_are_taken(body: dict[str, Any]) -> None:
    assert of_model(Templated).validate_python(body) == Templated.model_validate(body)


@pytest.mark.parametrize("spec", [7, "a", [1], True])
def test_a_validator_that_stumbles_over_a_type_refuses_the_body(spec: object) -> None:
    with pytest.raises(ValidationError, match="has no attribute 'get'"):
        of_model(Body).validate_python({"spec": spec})


def test_an_apps_routes_validate_so() -> None:
    app = FastAPI()

    @app.post("/")
    async def take(body: Body) -> None: ...

    stop_at_first_errors(app)
    client = TestClient(app)
    one, many = ({"items": ["a"] * num} for num in (1, MANY))
    assert len(client.post("/", json=many).json()["detail"]) == len(client.post("/", json=one).json()["detail"])
    assert client.post("/", json={"spec": 7}).status_code == 422
    assert client.post("/", json={"items": [1]}).status_code == 200
