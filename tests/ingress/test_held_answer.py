"""Refusals and failures of streams reach clients in the right form, from apps that answer as vLLM's do."""

import json

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import NoReplica, QueueFull
from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.http.error_answers import FleetError
from tests.ingress.fake_fronts import error, front, ingress, post

FULL = QueueFull(waiting=3, limit=3, retry_after_s=4.6)
FULL_BODY = error(
    "3 requests are waiting, limit 3 (ingress.max_waiting_requests); retry in 4.6 s", "queue_full", 503, retry_after_s=5
)
OF_VLLM = b'data: {"error": {"message": "full", "type": "Service Unavailable", "param": null, "code": 503}}\n\n'
DONE = b"data: [DONE]\n\n"
CREATED = b'event: response.created\ndata: {"sequence_number": 0}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"sequence_number": 1}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"sequence_number": 2}\n\n'


def stream(*before: bytes, then: tuple[bytes, ...] = (), raises: bool = False) -> ASGIApp:
    """Answer as vLLM does: the status line at once, chunks, and a refusal that is found later, sent or raised."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for chunk in before:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        exchange = current_exchange()
        assert exchange is not None
        exchange.error = FULL
        if raises:
            raise RuntimeError("Caught handled exception, but response already started.") from FleetError(FULL)
        for chunk in then:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def answered(app: ASGIApp, path: str = "/v1/completions") -> tuple[int, bytes]:
    response = post(ingress(front("tiny", app)), path, content=b'{"stream": true}')
    return response.status_code, response.content


@pytest.mark.parametrize(
    ("path", "app"),
    [
        ("/v1/completions", stream(then=(OF_VLLM, DONE))),
        ("/v1/chat/completions", stream(raises=True)),
        ("/v1/responses", stream(CREATED, IN_PROGRESS, raises=True)),
    ],
)
def test_a_refusal_before_the_engine_is_a_real_status_with_retry_after(path: str, app: ASGIApp) -> None:
    response = post(ingress(front("tiny", app)), path, content=b'{"stream": true}')
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == FULL_BODY


def test_an_error_event_of_vllms_within_a_stream_gets_the_type_that_the_same_error_has_before_it() -> None:
    status, content = answered(stream(b"data: a\n\n", then=(b"data: b\n\n", OF_VLLM, DONE)))
    expected = b"data: a\n\ndata: b\n\ndata: %s\n\n" % json.dumps(FULL_BODY).encode() + DONE
    assert (status, content) == (200, expected)


def test_an_error_of_which_the_fleet_knows_nothing_goes_through_as_vllm_sent_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": OF_VLLM})

    assert answered(app) == (200, OF_VLLM)


def fails(*, more: bool) -> ASGIApp:
    """As Starlette with a bug of vLLM's in it: an answer of 500, and the bug raised behind it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"Internal Server Error", "more_body": more})
        raise AssertionError("a bug")

    return app


def test_a_failure_that_was_answered_whole_leaves_the_connection_as_it_is_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert answered(fails(more=False)) == (500, b"Internal Server Error")
    ours = [record.message for record in caplog.records if record.name == "serve_app.ingress.routes.app"]
    assert ours == ["/v1/completions for the model 'tiny' failed with status 500, request -"]
    assert "AssertionError: a bug" in caplog.text


def test_a_failure_within_an_answer_reaches_the_listener_which_cuts_the_connection() -> None:
    with pytest.raises(AssertionError, match="a bug"):
        answered(fails(more=True))


def test_a_stream_of_responses_that_vllm_would_break_off_ends_with_an_error_event() -> None:
    status, content = answered(stream(CREATED, IN_PROGRESS, DELTA, raises=True), "/v1/responses")
    told = FULL_BODY["error"]
    event = {"type": "error", "code": "queue_full", "message": told["message"], "param": None, "retry_after_s": 5}
    before, _, last = content.partition(b"event: error\ndata: ")
    assert (status, before) == (200, CREATED + IN_PROGRESS + DELTA)
    assert json.loads(last) == {**event, "sequence_number": 3}


def test_a_fault_of_vllms_app_before_its_answer_has_the_form_of_all_errors_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("a bug")

    status, content = answered(app)
    error = json.loads(content)["error"]
    assert (status, error["code"], error["type"], "a bug" in error["message"]) == (500, 500, "InternalServerError", False)
    assert caplog.text.count("KeyError: 'a bug'") == 1
    assert "/v1/completions for the model 'tiny' failed with status 500, request -" in caplog.text


def test_an_error_that_vllm_answers_itself_gets_our_status_and_retry_after() -> None:
    async def internal(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        exchange.error = NoReplica(model="tiny", waited_s=30.0, retry_after_s=0.2)
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"internal"})

    response = post(ingress(front("tiny", internal)), content=b"{}")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_refusal_of_one_request_is_not_seen_by_the_next() -> None:
    app = ingress(front("refused", stream(then=(OF_VLLM,))), front("tiny"))
    assert post(app, content=b'{"model": "refused"}').status_code == 503
    assert post(app, content=b'{"model": "tiny"}').status_code == 200
    assert current_exchange() is None


def test_a_long_refusal_goes_out_with_its_new_length() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = json.dumps(error("a" * 100_000, "BadRequestError", 400)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    response = post(ingress(front("tiny", app)), content=b"{}")
    assert response.status_code == 400
    assert int(response.headers["content-length"]) == len(response.content) < 5000
    assert response.json()["error"]["message"].endswith("aaa... (100000 characters in all)")
