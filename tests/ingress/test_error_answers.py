"""Errors of vLLM's front end, and of ours, become answers with a status, headers and a body."""

import json
from dataclasses import replace
from http import HTTPStatus

import httpx
import pytest
from openai import OpenAI
from vllm.exceptions import GenerationError, GracefulHTTPError, RetryableRequestError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from serve_app.errors import BadRequest, BodyTooSlow, ModelNotFound, NoReplica, QueueFull, RequestTooLarge, ServingError
from serve_app.ingress.http.error_answers import (
    MAX_ERROR_BYTES,
    MAX_TEXT_CHARS,
    FleetError,
    answer_of,
    describe_error,
    shortened,
)
from tests.ingress.fake_fronts import error as body

FULL = QueueFull(waiting=8, limit=8, retry_after_s=1.25)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (BadRequest("n", "is odd"), (400, {}, body("n: is odd", "BadRequestError", 400, "n"))),
        (
            ModelNotFound("a", ("b",)),
            (404, {}, body("the model 'a' does not exist; served here: b", "NotFoundError", 404, "model")),
        ),
        (
            RequestTooLarge(size_bytes=9, limit_bytes=8),
            (413, {}, body("the request has at least 9 bytes, limit 8", "request_too_large", 413)),
        ),
        (
            FULL,
            (
                503,
                {"Retry-After": "1", "Retry-After-Ms": "1250"},
                body(
                    "8 requests are waiting, limit 8 (ingress.max_waiting_requests); retry in 1.2 s",
                    "queue_full",
                    503,
                    retry_after_s=1,
                ),
            ),
        ),
        (
            BodyTooSlow(limit_s=2.0),
            (408, {"Connection": "close"}, body("the request body was not complete within 2 s", "body_too_slow", 408)),
        ),
    ],
)
def test_an_error_of_ours_has_vllms_word_where_it_has_one_and_by_its_code_elsewhere(
    error: ServingError, answer: tuple[object, ...]
) -> None:
    assert answer_of(error) == describe_error(error) == describe_error(FleetError(error)) == answer


@pytest.mark.parametrize(
    ("retry_after_s", "told", "told_ms"), [(0.0, 1, 1), (0.2, 1, 200), (1.0, 1, 1000), (4.01, 5, 4010), (4.0001, 5, 4001)]
)
def test_no_client_is_asked_to_retry_before_a_retry_may_help(retry_after_s: float, told: int, told_ms: int) -> None:
    answer = answer_of(NoReplica(model="tiny", waited_s=30.0, retry_after_s=retry_after_s))
    assert answer.headers == {"Retry-After": str(told), "Retry-After-Ms": str(told_ms)}
    assert answer.body["error"]["retry_after_s"] == told


@pytest.mark.parametrize(("retry_after_s", "told"), [(0.4, "1"), (1.4, "1"), (1.6, "2"), (2.4, "2"), (30.7, "31")])
def test_an_estimated_wait_is_told_in_the_nearest_whole_seconds_and_at_least_one(retry_after_s: float, told: str) -> None:
    assert answer_of(replace(FULL, retry_after_s=retry_after_s)).headers["Retry-After"] == told


def test_openais_client_waits_for_the_milliseconds() -> None:
    headers = answer_of(FULL).headers
    assert OpenAI(api_key="key")._parse_retry_after_header(httpx.Headers(headers)) == 1.25  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (GracefulHTTPError("later", HTTPStatus.TOO_MANY_REQUESTS), (429, {}, body("later", "Too Many Requests", 429))),
        (
            VLLMValidationError("too long", parameter="prompt", value=9),
            (400, {}, body("too long (parameter=prompt, value=9)", "BadRequestError", 400, "prompt")),
        ),
        (GenerationError("broken"), (500, {}, body("broken", "InternalServerError", 500))),
        (RetryableRequestError("again"), (503, {}, body("again", "ServiceUnavailableError", 503))),
        (
            KeyError("secret"),
            (500, {}, body("the request failed inside the server, whose log has the cause", "InternalServerError", 500)),
        ),
    ],
)
def test_an_error_of_vllms_is_reported_as_by_vllm_and_an_unforeseen_one_not_at_all(
    error: Exception, answer: tuple[object, ...]
) -> None:
    assert describe_error(error) == answer


@pytest.mark.parametrize(
    ("cause", "answer"),
    [
        (ValueError("needs top_k"), (400, {}, body("needs top_k", "BadRequestError", 400))),
        (
            KeyError("secret"),
            (500, {}, body("the request failed inside the server, whose log has the cause", "InternalServerError", 500)),
        ),
    ],
)
def test_an_error_that_vllm_has_wrapped_is_reported_by_its_cause(cause: Exception, answer: tuple[object, ...]) -> None:
    error = EngineGenerateError()
    error.__cause__ = cause
    assert describe_error(error) == answer


def test_a_body_that_quotes_half_a_character_can_be_sent() -> None:
    response = answer_of(BadRequest("stop", "has \ud800")).response()
    assert b"stop: has \\ud800" in response.body


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"data: ", b"\n\n"), (b"event: error\ndata: ", b"\n\n")])
def test_a_long_text_of_an_error_is_cut_and_says_so(before: bytes, after: bytes) -> None:
    long = json.dumps(body("a" * 1_000_000, "BadRequestError", 400, "stop")).encode()
    told = shortened(before + long + after)
    cut = "a" * MAX_TEXT_CHARS + "... (1000000 characters in all)"
    assert (told[: len(before)], told[len(told) - len(after) :]) == (before, after)
    assert json.loads(told[len(before) : len(told) - len(after)]) == body(cut, "BadRequestError", 400, "stop")


def test_what_is_no_json_is_cut_at_the_limit() -> None:
    assert shortened(b"a" * (MAX_ERROR_BYTES * 2)) == b"a" * MAX_ERROR_BYTES


def test_our_own_errors_repeat_no_more() -> None:
    message = answer_of(ModelNotFound("a" * 1_000_000, ("b",))).body["error"]["message"]
    assert len(message) < MAX_TEXT_CHARS + 50
