"""After a client that disconnects, or an engine that gives up, nothing is left over and nothing ends in silence."""

import asyncio
import json
from collections.abc import Callable

import pytest
from starlette.types import ASGIApp, Message
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [pytest.mark.engine]


def body_of(**fields: object) -> bytes:
    return json.dumps({"prompt": "The engine core schedules"} | fields).encode()


async def call(
    app: ASGIApp, content: bytes, *, leave: asyncio.Event, on_line: Callable[[int], object] = lambda _: None
) -> list[Message]:
    """Call the application as a server would; the client is gone when ``leave`` is set. Return what it was sent."""
    sent: list[Message] = []
    body = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        on_line(len([message for message in sent if message["type"] == "http.response.body"]))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    return sent


LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 3, "use_beam_search": True}])
def test_a_client_that_leaves_a_stream_ends_its_generation(
    app: ASGIApp, runner: asyncio.Runner, assert_idle: Callable[[], None], fields: dict[str, object]
) -> None:
    async def leave_after_two_lines() -> list[Message]:
        leave = asyncio.Event()
        content = body_of(stream=True, **LONG, **fields)
        return await call(app, content, leave=leave, on_line=lambda count: leave.set() if count == 2 else None)

    sent = runner.run(leave_after_two_lines())
    assert sent[0]["status"] == 200
    assert sent[-1]["more_body"] is True  # never ended properly
    assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 3, "use_beam_search": True}])
@pytest.mark.parametrize("num_yields", [0, 1, 2, 3, 5, 8, 20])
def test_a_client_may_leave_at_any_time_before_the_answer(
    app: ASGIApp,
    runner: asyncio.Runner,
    assert_idle: Callable[[], None],
    stream: bool,
    fields: dict[str, object],
    num_yields: int,
) -> None:
    async def leave_soon() -> list[Message]:
        leave = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(call(app, body_of(stream=stream, **LONG, **fields), leave=leave))
            for _ in range(num_yields):
                await asyncio.sleep(0)
            leave.set()
        return answer.result()

    sent = runner.run(leave_soon())
    if stream and num_yields == 20:  # on a slow machine a first token may have come
        assert all(m.get("more_body") for m in sent if m["type"] == "http.response.body")
    else:
        assert sent == []
    assert_idle()


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 3, "use_beam_search": True}])
def test_a_client_may_leave_while_its_request_waits_for_the_engine_to_take_it(
    app: ASGIApp,
    engine: AsyncLLM,
    runner: asyncio.Runner,
    assert_idle: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
) -> None:
    async def leave_while_it_waits() -> list[Message]:
        leave = asyncio.Event()

        async def never_taken(_: object) -> None:
            leave.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine_core, "add_request_async", never_taken)
            return await call(app, body_of(stream=True, **LONG, **fields), leave=leave)

    assert runner.run(leave_while_it_waits()) == []
    assert_idle()


def test_a_cancelled_server_task_ends_the_generation(
    app: ASGIApp, runner: asyncio.Runner, assert_idle: Callable[[], None]
) -> None:
    async def cancel_after_a_line() -> None:
        line = asyncio.Event()
        call_ = call(app, body_of(stream=True, **LONG), leave=asyncio.Event(), on_line=lambda count: line.set())
        task = asyncio.create_task(call_)
        await line.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runner.run(cancel_after_a_line())
    assert_idle()


def test_a_send_that_fails_because_the_client_left_ends_the_generation(
    app: ASGIApp, runner: asyncio.Runner, assert_idle: Callable[[], None]
) -> None:
    def fail(count: int) -> None:
        if count == 2:
            raise OSError("the client went away")

    runner.run(call(app, body_of(stream=True, **LONG), leave=asyncio.Event(), on_line=fail))
    assert_idle()


def test_an_error_after_the_stream_began_is_its_last_line(
    app: ASGIApp, engine: AsyncLLM, runner: asyncio.Runner, assert_idle: Callable[[], None]
) -> None:
    async def pause_after_two_lines() -> list[Message]:
        lines = asyncio.Event()
        content = body_of(stream=True, **LONG)
        wake = {2: lines.set}
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(
                call(app, content, leave=asyncio.Event(), on_line=lambda count: wake.get(count, lambda: None)())
            )
            await lines.wait()
            await engine.pause_generation(mode="abort")
        await engine.resume_generation()
        return answer.result()

    sent = runner.run(pause_after_two_lines())
    *lines, last, end = [message for message in sent if message["type"] == "http.response.body"]
    assert (sent[0]["status"], end) == (200, {"type": "http.response.body", "body": b"", "more_body": False})
    assert all(json.loads(line["body"]).keys() == {"text"} for line in lines)
    assert json.loads(last["body"]) == {
        "error": {
            "message": "the server aborted the generation; send the request again",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    }
    assert_idle()
