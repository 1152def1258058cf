"""Streams that stay silent get their heads and comments, and later refusals are events. Pauses end when a test says so."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Tenant
from serve_app.errors import CannotStartInTime, NoReplica
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer
from tests.doubles.fleet import in_loop, until
from tests.ingress.fake_fronts import error
from tests.ingress.tenants import caller
from tests.ingress.test_held_answer import CREATED, DELTA, DONE, IN_PROGRESS, OF_VLLM

AWAY = NoReplica(model="tiny", waited_s=30.0, retry_after_s=41.2)
AWAY_BODY = error("no replica of 'tiny' after 30.0 s; retry in 41.2 s", "no_replica", 503, retry_after_s=42)
SILENCE_S = 5.0
COMMENT = b": waiting\n\n"
FIRST, SECOND = b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n'


def head(media_type: bytes, status: int = 200) -> Message:
    headers = [(b"x-request-id", b"7"), (b"content-type", media_type)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


SSE = head(b"text/event-stream; charset=utf-8")
LINES = head(b"application/x-ndjson")
JSON = head(b"application/json")


class Pauses:
    """A pause that ends when a test calls ``end``, which returns when the next pause has begun."""

    def __init__(self) -> None:
        self._num_begun = 0
        self.pause_s = 0.0
        self._over: Callable[[], None] | None = None

    def __call__(self, pause_s: float, over: Callable[[], None]) -> "Pauses":
        self._num_begun += 1
        self.pause_s, self._over = pause_s, over
        return self

    def cancel(self) -> None:
        self._over = None

    async def end(self) -> None:
        before = self._num_begun
        assert self._over is not None
        self._over()
        await until(lambda: self._num_begun > before)


class Answer:
    """A held answer, and what its client has been sent."""

    def __init__(self, *, is_responses: bool = False, first_token_s: float | None = None) -> None:
        self.sent: list[Message] = []
        of_tenant = None if first_token_s is None else caller(Tenant("red", first_token_s=first_token_s))
        self.exchange = Exchange("/v1/responses" if is_responses else "/v1/completions", of_tenant)
        self.held = HeldAnswer(self.take, self.exchange)
        self.pauses = Pauses()

    async def take(self, message: Message) -> None:
        self.sent.append(message)

    async def send(self, *messages: Message) -> None:
        for message in messages:
            await self.held(message)

    def content(self) -> bytes:
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")


@in_loop
async def test_a_stream_that_waits_gets_its_own_head_a_comment_for_each_silence_and_then_what_vllm_sends() -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE)
        assert answer.sent == []
        await answer.pauses.end()
        assert answer.sent == [SSE, body(COMMENT)]
        await answer.pauses.end()
        await answer.send(body(FIRST), body(SECOND))
        await answer.pauses.end()
        await answer.send(body(DONE), body(b"", more=False))
    assert answer.content() == COMMENT * 3 + FIRST + SECOND + DONE
    assert answer.content().replace(COMMENT, b"") == FIRST + SECOND + DONE
    assert answer.exchange.status == 200


@in_loop
async def test_a_stream_that_speaks_in_time_gets_no_comment() -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE, body(FIRST))
        await answer.pauses.end()
        await answer.send(body(DONE, more=False))
        await answer.pauses.end()
        await answer.pauses.end()
    assert answer.sent == [SSE, body(FIRST), body(DONE, more=False)]


@pytest.mark.parametrize("first", [[], [JSON], [head(b"text/plain", 400)]], ids=["nothing", "json", "text"])
@in_loop
async def test_what_is_no_stream_stays_silent_and_a_refusal_of_it_is_a_real_status(first: list[Message]) -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(*first)
        await answer.pauses.end()
        await answer.pauses.end()
        assert answer.sent == []
        answer.exchange.error = AWAY
        await answer.send(head(b"application/json", 500), body(b"internal", more=False))
    assert (answer.sent[0]["status"], (b"retry-after", b"42") in answer.sent[0]["headers"]) == (503, True)
    assert json.loads(answer.content()) == AWAY_BODY


@in_loop
async def test_a_stream_whose_head_is_late_has_no_other_invented_for_it() -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.pauses.end()
        assert answer.sent == []
        await answer.send(SSE)
        await answer.pauses.end()
    assert answer.sent == [SSE, body(COMMENT)]


@in_loop
async def test_a_refusal_after_a_comment_is_an_event_that_says_when_to_retry_and_the_streams_end() -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE)
        await answer.pauses.end()
        answer.exchange.error = AWAY
        await answer.send(body(OF_VLLM), body(DONE), body(b"", more=False))
    event = b"data: %s\n\n" % json.dumps(AWAY_BODY).encode()
    assert answer.content() == COMMENT * 2 + event + DONE
    assert answer.sent[-1] == body(b"", more=False)


@in_loop
async def test_a_refusal_that_is_known_before_the_first_comment_is_a_real_status() -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE)
        answer.exchange.error = AWAY
        await answer.pauses.end()
        assert answer.sent == []
        await answer.send(body(OF_VLLM), body(DONE), body(b"", more=False))
    assert (answer.sent[0]["status"], json.loads(answer.content())) == (503, AWAY_BODY)


@pytest.mark.parametrize(
    ("first_token_s", "waited_s", "next_pause_s"),
    [(10.0, 5.0, 5.0), (10.0, 11.0, 1.0), (30.0, 30.5, 1.5), (90.0, 29.0, 3.0)],
)
@in_loop
async def test_a_stream_that_a_deadline_may_still_refuse_gets_no_comment(
    first_token_s: float, waited_s: float, next_pause_s: float
) -> None:
    answer = Answer(first_token_s=first_token_s)
    answer.exchange.arrived_at -= waited_s
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE)
        await answer.pauses.end()
        assert answer.sent == []
        assert answer.pauses.pause_s == pytest.approx(next_pause_s, abs=0.9)
        answer.exchange.error = CannotStartInTime(3, first_token_s, 0.0, "first_token_s", first_token_s, 7.0)
        await answer.pauses.end()
        await answer.send(body(OF_VLLM), body(DONE), body(b"", more=False))
    refused = json.loads(answer.content())["error"]
    assert (answer.sent[0]["status"], refused["type"]) == (503, "cannot_start_in_time")


@pytest.mark.parametrize(
    ("first_token_s", "waited_s", "has_token"),
    [(10.0, 12.1, False), (30.0, 32.1, False), (90.0, 32.1, False), (None, 5.0, False), (90.0, 5.0, True)],
)
@in_loop
async def test_a_stream_that_no_deadline_refuses_any_more_gets_its_comments(
    first_token_s: float | None, waited_s: float, has_token: bool
) -> None:
    answer = Answer(first_token_s=first_token_s)
    answer.exchange.arrived_at -= waited_s
    request = RequestState("r", 5, 5, Resume.CONTINUE)
    answer.exchange.requests.add(request, "answer")
    request.trail.first_token_at = answer.exchange.arrived_at + 1 if has_token else None
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE)
        await answer.pauses.end()
        assert answer.sent == [SSE, body(COMMENT)]
        await answer.pauses.end()
    assert (answer.content(), answer.pauses.pause_s) == (COMMENT * 2, SILENCE_S)


@in_loop
async def test_a_stream_of_responses_says_what_it_has_before_its_comments_which_are_no_events_of_its_sequence() -> None:
    answer = Answer(is_responses=True)
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE, body(CREATED), body(IN_PROGRESS))
        await answer.pauses.end()
        assert answer.content() == CREATED + IN_PROGRESS + COMMENT
        await answer.pauses.end()
        answer.exchange.error = AWAY
        assert await answer.held.end()
    before, _, event = answer.content().partition(b"event: error\ndata: ")
    assert before == CREATED + IN_PROGRESS + COMMENT * 3
    told: dict[str, Any] = {**AWAY_BODY["error"], "type": "error", "code": "no_replica", "sequence_number": 2}
    assert json.loads(event) == told
    assert not answer.sent[-1]["more_body"]


@in_loop
async def test_a_stream_of_responses_continues_after_comments() -> None:
    answer = Answer(is_responses=True)
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE, body(CREATED))
        await answer.pauses.end()
        await answer.send(body(IN_PROGRESS), body(DELTA, more=False))
    assert answer.content() == CREATED + COMMENT * 2 + IN_PROGRESS + DELTA


@in_loop
async def test_a_stream_of_lines_gets_empty_ones_and_a_refusal_as_its_last() -> None:
    answer = Answer()
    refusal = b'{"error": {}}\n'
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(LINES)
        await answer.pauses.end()
        assert answer.sent == [LINES, body(b"\n")]
        answer.exchange.error = AWAY
        await answer.send(head(b"application/json", 503), body(refusal, more=False))
    assert (answer.exchange.status, answer.content()) == (200, b"\n\n" + refusal)


@in_loop
async def test_a_refusal_may_follow_the_head_of_a_stream_that_did_not_go_out() -> None:
    answer = Answer()
    bad = head(b"application/json", 400)
    await answer.send(LINES, bad, body(b"{}", more=False))
    assert answer.sent == [bad, body(b"{}", more=False)]


@in_loop
async def test_a_comment_comes_between_events_never_in_one() -> None:
    answer = Answer()
    async with answer.held.filling(answer.pauses, SILENCE_S):
        await answer.send(SSE, body(FIRST[:5]))
        await answer.pauses.end()
        await answer.pauses.end()
        assert answer.content() == FIRST[:5]
        await answer.send(body(FIRST[5:]))
        await answer.pauses.end()
        await answer.pauses.end()
        await answer.send(body(SECOND, more=False))
    assert answer.content() == FIRST + COMMENT * 2 + SECOND


@in_loop
async def test_what_the_app_sends_meanwhile_does_not_overtake_the_head() -> None:
    answer = Answer()
    blocked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(message: Message) -> None:
        blocked.set()
        await go_on.wait()
        await answer.take(message)

    answer.held = HeldAnswer(slow, answer.exchange)
    async with answer.held.filling(answer.pauses, SILENCE_S), asyncio.TaskGroup() as tasks:
        await answer.send(SSE)
        pause = tasks.create_task(answer.pauses.end())
        await blocked.wait()
        event = tasks.create_task(answer.send(body(FIRST, more=False)))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(pause, event)
    assert answer.sent == [SSE, body(COMMENT), body(COMMENT + FIRST, more=False)]


@in_loop
async def test_the_filling_ends_with_the_app() -> None:
    answer = Answer()

    async def fails() -> None:
        async with answer.held.filling(answer.pauses, SILENCE_S):
            await answer.send(SSE)
            await answer.pauses.end()
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        await fails()
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name() == "fill silences"] == []
