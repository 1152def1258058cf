"""Which status, headers and body an error of the engine's front end, or of ours, becomes."""

from http import HTTPStatus

import pytest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from serve_app.errors import BadRequest, ModelNotFound, QueueFull
from serve_app.ingress.generate import describe_error

INVALID = "invalid_request_error"


def body(message: str, kind: str, param: str | None, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (BadRequest("n", "is odd"), (400, {}, body("n: is odd", INVALID, "n", "bad_request"))),
        (
            ModelNotFound("a", ("b",)),
            (404, {}, body("the model 'a' does not exist; served here: b", INVALID, None, "model_not_found")),
        ),
        (
            GracefulHTTPError("later", HTTPStatus.TOO_MANY_REQUESTS),
            (429, {}, body("later", INVALID, None, "too_many_requests")),
        ),
        (
            VLLMValidationError("too long", parameter="prompt", value=9),
            (400, {}, body("too long (parameter=prompt, value=9)", INVALID, "prompt", "bad_request")),
        ),
    ],
)
def test_an_error_becomes_a_status_and_openais_body(error: Exception, answer: tuple[object, ...]) -> None:
    assert describe_error(error) == answer


@pytest.mark.parametrize(
    ("cause", "answer"),
    [
        (
            QueueFull(waiting=8, limit=8, retry_after_s=1.25),
            (
                503,
                {"Retry-After": "2"},
                body("8 requests are waiting, limit 8; retry in 1.2 s", "server_error", None, "queue_full"),
            ),
        ),
        (ValueError("needs top_k"), (400, {}, body("needs top_k", INVALID, None, "bad_request"))),
        (
            KeyError("secret"),
            (
                500,
                {},
                body(
                    "the request failed inside the server, whose log has the cause",
                    "server_error",
                    None,
                    "internal_error",
                ),
            ),
        ),
    ],
)
def test_an_error_that_vllm_has_wrapped_is_told_by_its_cause(cause: Exception, answer: tuple[object, ...]) -> None:
    error = EngineGenerateError()
    error.__cause__ = cause
    assert describe_error(error) == answer


def test_the_fleets_error_inside_vllms_graceful_one_keeps_its_retry_after() -> None:
    error = GracefulHTTPError("full", HTTPStatus.SERVICE_UNAVAILABLE)
    error.__cause__ = QueueFull(waiting=1, limit=1, retry_after_s=4.0)
    assert describe_error(error).headers == {"Retry-After": "4"}
