"""The ingress reads some fields of a body itself; tests use the whole application if the answer matters."""

import json
from typing import Any, cast

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from serve_app.errors import BadRequest
from serve_app.ingress.http import body_fields
from serve_app.ingress.http.body_fields import MAX_KEYS, MAX_VALUES, BodyFields, check_num_values, parse_fields
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.ingress.fake_fronts import error, front, ingress, name_of_big, post

TOO_LONG = ("x" * 129, "has 129 characters, limit 128")
UNPRINTABLE = ("a\tb", "has characters that cannot be printed")


def to_model_big(body: bytes) -> Any:
    """Return the answer of two models, of which "big" is the second and answers with its name."""
    return post(ingress(front("tiny"), front("big", name_of_big)), "/v1/completions", content=body).json()


@pytest.mark.parametrize(
    "field",
    [
        b'"background": "no"',
        b'"request_id": 5',
        b'"previous_response_id": 5',
        b'"temperature": NaN',
        b'"stop": "\\ud800"',
        b'"max_tokens": ' + b"9" * 30,
    ],
)
def test_a_body_with_a_bad_field_goes_to_the_model_it_names(field: bytes) -> None:
    assert to_model_big(b'{"model": "big", ' + field + b"}") == "big"


def test_what_vllm_parses_is_parsed() -> None:
    assert parse_fields(b'\xef\xbb\xbf{"model": "big"}') == BodyFields(model="big")
    assert parse_fields(b'{"model": "\\ud800"}') == BodyFields(model="\ud800")
    assert parse_fields(b'[{"model": NaN}]') is None
    assert parse_fields(b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}") is None
    assert parse_fields(b'{"model": ' + b"9" * 5000 + b"}") is None


def test_numbers_and_truth_values_are_what_vllm_reads() -> None:
    body = b'{"stream": "true", "use_beam_search": "no", "max_tokens": "20", "max_completion_tokens": 20.0, "max_output_tokens": 2.5}'
    expected = BodyFields(stream=True, use_beam_search=False, max_tokens=20, max_completion_tokens=20, max_output_tokens=2.5)
    assert parse_fields(body) == expected, "vLLM refuses 2.5"


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
def test_vllm_reads_the_same(kind: type[BaseModel]) -> None:
    names = {"stream", "use_beam_search", "max_tokens", "max_completion_tokens", "max_output_tokens"}
    values: list[Any] = ["20", " 20 ", "2e1", 20.0, 20.5, 1, 0, True, "true", "off", "", [], None]
    for name in names & kind.model_fields.keys():
        vllms: Any = TypeAdapter(cast("Any", kind.model_fields[name].annotation))
        for value in values:
            fields = parse_fields(json.dumps({name: value}).encode())
            assert fields is not None
            try:
                expected = vllms.validate_python(value)
            except ValidationError:
                expected = value
            assert (type(getattr(fields, name)), getattr(fields, name)) == (type(expected), expected)


@pytest.mark.parametrize("value", [False, 0, [], {}])
def test_a_model_that_is_no_text_is_for_vllm_to_refuse(value: object) -> None:
    body = json.dumps({"model": value}).encode()
    assert post(ingress(front("tiny", name_of_big), front("big")), content=body).json() == "big"


@pytest.mark.parametrize("field", ['"previous_response_id": "resp_1"', '"previous_response_id": 5'])
@pytest.mark.parametrize("rest", ["", ', "temperature": NaN'])
def test_a_response_that_follows_another_is_refused(field: str, rest: str) -> None:
    assert_needs_a_store(f'{{"model": "tiny", {field}{rest}}}')


@pytest.mark.parametrize("value", ["true", '"yes"', "1"])
def test_a_response_in_the_background_is_refused_however_true_is_written(value: str) -> None:
    assert_needs_a_store(f'{{"model": "tiny", "background": {value}}}')


def assert_needs_a_store(body: str) -> None:
    response = post(ingress(), "/v1/responses", content=body)
    assert response.status_code == 400
    assert "keeps no responses between requests" in response.json()["error"]["message"]
    assert post(ingress(), "/v1/completions", content=body).status_code == 200


@pytest.mark.parametrize("value", ["null", "false"])
def test_a_response_in_the_foreground_is_not(value: str) -> None:
    assert post(ingress(), "/v1/responses", content=f'{{"background": {value}}}').status_code == 200


@pytest.mark.parametrize(("request_id", "problem"), [TOO_LONG, UNPRINTABLE])
def test_a_request_id_that_no_log_could_hold_is_refused_in_the_head(request_id: str, problem: str) -> None:
    response = post(ingress(), content=b"{}", headers={"X-Request-Id": request_id})
    expected = error(f"X-Request-Id: {problem}", "BadRequestError", 400, "X-Request-Id")
    assert (response.status_code, response.json()) == (400, expected)


@pytest.mark.parametrize(("request_id", "problem"), [TOO_LONG, UNPRINTABLE, ("\ud800", UNPRINTABLE[1])])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_a_request_id_that_no_log_could_hold_is_refused_in_the_body(path: str, request_id: str, problem: str) -> None:
    response = post(ingress(), path, content=json.dumps({"request_id": request_id}))
    expected = error(f"request_id: {problem}", "BadRequestError", 400, "request_id")
    assert (response.status_code, response.json()) == (400, expected)


def test_a_request_id_of_the_longest_length_is_taken() -> None:
    body = json.dumps({"request_id": "x" * 128})
    assert post(ingress(), content=body, headers={"X-Request-Id": "x" * 128}).status_code == 200


@pytest.mark.parametrize("value", [b"1", b'"a"', b'"\\""', b"[]"])
def test_more_values_than_any_context_has_room_for_are_refused_unparsed(value: bytes) -> None:
    body = b'{"prompt": [' + b",".join([value] * (MAX_VALUES + 2)) + b"]}"
    with pytest.raises(BadRequest, match=f"limit {MAX_VALUES}; divide it"):
        check_num_values(body, max_model_len=MAX_VALUES // 4)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_values_cannot_hide_in_another_encoding(encoding: str) -> None:
    """There an escaped quote takes more than two bytes, so that the values behind it would count as text."""
    body = '{"user": "\\"", "prompt": [' + "1," * MAX_VALUES + "1, 1]}"
    with pytest.raises(BadRequest, match=f"holds {MAX_VALUES + 2} values, limit {MAX_VALUES}; divide it"):
        check_num_values(body.encode(encoding), max_model_len=2048)


def test_as_many_values_as_allowed_and_any_number_of_commas_in_texts_pass() -> None:
    check_num_values(b'{"prompt": [' + b",".join([b"1"] * MAX_VALUES) + b"]}", max_model_len=2048)
    check_num_values(b'{"prompt": [' + b",".join([b"1"] * MAX_VALUES * 2) + b"]}", max_model_len=MAX_VALUES)
    check_num_values(b'{"prompt": "' + b'a\\",' * (MAX_VALUES * 2) + b'"}', max_model_len=2048)


def test_more_keys_than_any_request_needs_are_refused_and_any_number_of_colons_in_texts_pass() -> None:
    keys = b"{" + b",".join(b'"%d":1' % number for number in range(MAX_KEYS)) + b"}"
    check_num_values(keys, max_model_len=2048)
    with pytest.raises(BadRequest, match=f"holds {MAX_KEYS + 1} keys, limit {MAX_KEYS}; divide it"):
        check_num_values(b'{"more":' + keys + b"}", max_model_len=2048)
    check_num_values(b'{"prompt": "' + b"12:30:00, " * MAX_KEYS + b'"}', max_model_len=2048)


def test_a_route_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_fields, "MAX_VALUES", 4)
    app = IngressApp({"tiny": front("tiny")}, AppLimits(1 << 20), version={})
    response = post(app, content=b'{"prompt": [' + b"1," * 5000 + b"1]}")
    expected = error("body: holds 5000 values, limit 4096; divide it", "BadRequestError", 400, "body")
    assert (response.status_code, response.json()) == (400, expected)
