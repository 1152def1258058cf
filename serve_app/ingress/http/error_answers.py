"""Error answers have one body on every route, before a stream has begun and within a stream.

The body is that of vLLM's `/v1` routes. `type` is vLLM's word where vLLM has such an error (its own errors, 400 and 404). For an error that
only a fleet has, `type` is its `code` in `serve_app/errors`: no_replica, queue_full, replica_lost, ... `code` is the HTTP status, as in
vLLM. `retry_after_s`, where the error has it, repeats the header Retry-After, because a stream that has begun can send no header any more.
"""

import json
import logging
import math
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.responses import Response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError, VLLMServerError

from serve_app.errors import (
    BodyTooSlow,
    CannotStartInTime,
    DeadlinePassed,
    InvalidApiKey,
    InvalidToken,
    ModelNotFound,
    QueueFull,
    QuotaExceeded,
    ServingError,
)

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES = 8 << 10
"""Errors of vLLM that are no longer than this are sent unchanged."""

MAX_TEXT_CHARS = 2048
"""The longest text in a longer error of vLLM, and the longest message of an error of ours."""

_TYPES_OF_VLLM = {400: "BadRequestError", 404: "NotFoundError"}
_TYPES_OF_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"
"""The beginning of the routes of Anthropic's Messages."""
_INTERNAL = "the request failed inside the server, whose log has the cause"


class FleetError(GracefulHTTPError):
    """An error of ours on its way through vLLM's front end, which passes it to the ingress or answers with its status and text."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(str(error), HTTPStatus(error.http_status))
        self.error = error


class ErrorAnswer(NamedTuple):
    """The answer that an HTTP client gets for an error."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]

    def response(self) -> Response:
        # ASCII: a text that quotes a lone surrogate from the client cannot be UTF-8.
        return Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")


def answer_of(error: ServingError, path: str = "") -> ErrorAnswer:
    """Return the answer for an error of ours on a route. Retry-After is in whole seconds; OpenAI's clients prefer Retry-After-Ms."""
    param = "model" if isinstance(error, ModelNotFound) else getattr(error, "param", None)
    kind = _TYPES_OF_VLLM.get(error.http_status, error.code)
    body = error_body(str(error), kind, error.http_status, param)
    headers = error.headers.copy() if isinstance(error, QuotaExceeded) else {}
    if error.retry_after_s is not None:
        # Estimates are rounded to the nearest second: rounded up, nine of ten are off by over 25 % at waits of 2 s.
        whole = round if isinstance(error, CannotStartInTime | QueueFull) else math.ceil
        body["error"]["retry_after_s"] = retry_after_s = max(1, whole(error.retry_after_s))
        headers["Retry-After"] = str(retry_after_s)
        headers["Retry-After-Ms"] = str(max(1, math.ceil(1000 * error.retry_after_s)))
    if isinstance(error, BodyTooSlow | DeadlinePassed):
        headers["Connection"] = "close"  # or the rest of the body would be read and dropped for as long as it comes
    if isinstance(error, InvalidApiKey):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, InvalidToken):
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'  # RFC 6750
    return ErrorAnswer(error.http_status, headers, in_form_of(path, body))


def in_form_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error's body in the form of the route's API: Anthropic's for its Messages, else OpenAI's, as given."""
    if not path.startswith(MESSAGES):
        return body
    fields = body["error"]
    own = {"type": _TYPES_OF_ANTHROPIC.get(fields["code"], "api_error"), "message": fields["message"]}
    wait = {name: fields[name] for name in ("retry_after_s",) if name in fields}
    return {"type": "error", "error": own | wait}


def describe_error(error: BaseException) -> ErrorAnswer:
    """Map an error of vLLM's front end or of ours to its answer. The text of any other error is logged and not sent to the client."""
    if isinstance(error, VLLMServerError) and isinstance(error.__cause__, ValueError):
        error = error.__cause__  # AsyncLLM wraps all but vLLM's own client errors
    match error:
        case FleetError():
            return answer_of(error.error)
        case ServingError():
            return answer_of(error)
        case GracefulHTTPError() | VLLMClientError() | GenerationError() | ValueError():
            response = create_error_response(error)
            return ErrorAnswer(response.error.code, {}, response.model_dump())
    logger.error("a request failed", exc_info=error)
    return ErrorAnswer(500, {}, error_body(_INTERNAL, "InternalServerError", 500))


def behind(error: Exception) -> Exception:
    """Return the error that Starlette wrapped, because a head was sent or was held by `HeldAnswer`; return any other error as it is."""
    wrapped = isinstance(error, RuntimeError) and str(error).startswith("Caught handled exception")
    return error.__cause__ if wrapped and isinstance(error.__cause__, Exception) else error


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": _cut(message), "type": kind, "param": param, "code": status}}


def shortened(body: bytes) -> bytes:
    """Return an error of vLLM, which is the body of an answer or an event of a stream, with each text cut at `MAX_TEXT_CHARS`.

    vLLM quotes the value that it refuses: a million `stop_token_ids` made an answer of 15.8 MB.
    """
    begin = body.find(b"{")
    end = body.rfind(b"}") + 1
    try:
        value = json.loads(body[begin:end])
    except (ValueError, RecursionError):
        return body[:MAX_ERROR_BYTES]
    return body[:begin] + json.dumps(_cut(value)).encode() + body[end:]


def _cut(value: Any) -> Any:
    match value:
        case str() if len(value) > MAX_TEXT_CHARS:
            return f"{value[:MAX_TEXT_CHARS]}... ({len(value)} characters in all)"
        case dict():
            return {name: _cut(part) for name, part in value.items()}
        case list():
            return [_cut(part) for part in value]
    return value


def not_found(path: str, said: str = "") -> Response:
    where = "; the API is below /v1" if path == "/" else ""
    body = error_body(said or f"{path[:200]} does not exist here{where}", "NotFoundError", 404)
    return ErrorAnswer(404, {}, in_form_of(path, body)).response()


def method_not_allowed(allowed: str) -> Response:
    body = error_body(f"allowed methods: {allowed}", HTTPStatus.METHOD_NOT_ALLOWED.phrase, 405)
    return ErrorAnswer(405, {"Allow": allowed}, body).response()


def stream_event(error: ServingError) -> bytes:
    """Return the server-sent event that ends a stream of completions or chat."""
    return b"data: %s\n\n" % json.dumps(answer_of(error).body).encode()


def stream_line(error: ServingError, end: bytes) -> bytes:
    """Return the last value of a stream of `/generate`, whose values have ``end`` behind them."""
    return json.dumps(answer_of(error).body).encode() + end


def messages_event(error: ServingError) -> bytes:
    """Return the server-sent event that ends a stream of Anthropic's Messages."""
    return b"event: error\ndata: %s\n\n" % json.dumps(answer_of(error, MESSAGES).body).encode()


def responses_event(error: ServingError, sequence_number: int) -> bytes:
    """Return the server-sent event that ends a stream of the Responses API."""
    fields = answer_of(error).body["error"]
    event = {**fields, "type": "error", "code": fields["type"], "sequence_number": sequence_number}
    return b"event: error\ndata: %s\n\n" % json.dumps(event).encode()
