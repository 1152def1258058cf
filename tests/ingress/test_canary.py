"""A canary answers in front of its model, over fake front ends: small ASGI apps in the place of vLLM's."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config.model import CanarySettings
from serve_app.core.canary import CanaryState
from serve_app.core.request import RequestState, Resume
from serve_app.core.trail import Route
from serve_app.errors import NoFreePlace, NoReplica, QueueFull, RequestQuarantined, ServingError
from serve_app.ingress.books.books import Books
from serve_app.ingress.books.ledger import Ledger
from serve_app.ingress.exchange.engine_requests import EngineRequests
from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.routes.canary import _Watch
from tests.core.helpers import Output
from tests.doubles.fleet import MODEL, in_loop, settings
from tests.ingress.fake_fronts import App, Front, call

CHAT = "/v1/chat/completions"


def says(name: str, *, before: Callable[[], Awaitable[None] | None] | None = None) -> ASGIApp:
    """Answer with the name, after one engine request of three tokens."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        exchange = current_exchange()
        assert exchange is not None
        request = RequestState("r", prompt_tokens=1, max_tokens=3, resume=Resume.CONTINUE)
        exchange.requests.add(request, "answer")
        if before is not None and (waited := before()) is not None:
            await waited
        request.emitted_ids += [1, 2, 3]
        request.trail.started("replica-of-" + name, "load", Route(0, 0, 0.0), 0.0)
        request.trail.delivered(Output("r", [1, 2, 3]), 1.0)
        request.trail.finished("stop")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps({"by": name}).encode()})

    return app


def front(name: str, asgi: ASGIApp, *, canary: CanarySettings | None = None, ready: bool = True) -> FrontEnd:
    model = settings().models[MODEL].model_copy(update={"name": name, "canary": canary})
    return cast(FrontEnd, Front(model, SimpleNamespace(is_ready=lambda: ready), App(name, asgi)))


def pair(canary: ASGIApp, model: ASGIApp | None = None, *, ready: bool = True, ledger: Ledger | None = None) -> IngressApp:
    """A model and its canary, which gets each second request."""
    fronts = [
        front("next", canary, canary=CanarySettings(of="model", share=0.5), ready=ready),
        front("model", model or says("model")),
    ]
    return IngressApp(
        {f.model.name: f for f in fronts},
        AppLimits(1000),
        version={},
        books=Books(ledger=ledger),
    )


def state(app: IngressApp) -> CanaryState:
    return app.canaries["model"].judge.state


async def ask(app: IngressApp, num: int = 1, path: str = CHAT, model: str = "model") -> Counter[str]:
    answers = [await call(app, "POST", path, json={"model": model}) for _ in range(num)]
    assert {a.status_code for a in answers} == {200}
    return Counter(a.json()["by"] for a in answers)


def failing(how: Callable[[Any, Send], Awaitable[None]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await how(current_exchange(), send)

    return app


async def _answers_500(exchange: Any, send: Send) -> None:
    await send({"type": "http.response.start", "status": 500, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


async def _raises(exchange: Any, send: Send) -> None:
    raise RuntimeError("broken")


async def _loses_its_replica(exchange: Any, send: Send) -> None:
    exchange.error = NoReplica(model="next", waited_s=30.0, retry_after_s=1.0)
    await _answers_500(exchange, send)


async def _begins_a_stream_with_an_error(exchange: Any, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b'data: {"error": {"message": "x"}}\n\n', "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@in_loop
async def test_each_side_answers_its_share_and_only_of_generations() -> None:
    app = pair(says("next"))
    assert await ask(app, 10) == {"next": 5, "model": 5}
    assert await ask(app, 10, path="/tokenize") == {"model": 10}
    assert await ask(app, 2, model="next") == {"next": 2}


@pytest.mark.parametrize("how", [_answers_500, _raises, _loses_its_replica, _begins_a_stream_with_an_error])
@in_loop
async def test_what_the_canary_fails_to_begin_the_model_answers_and_a_few_condemn_it(how: Any) -> None:
    app = pair(failing(how))
    assert await ask(app, 60) == {"model": 60}
    judge = app.canaries["model"].judge
    assert state(app) is CanaryState.BAD
    assert judge.num_taken < 12
    assert "requests failed, of the model's own 0 of" in judge.reason


@pytest.mark.parametrize("refusal", [QueueFull(waiting=1, limit=1, retry_after_s=1.0), NoFreePlace(waiting=1, retry_after_s=1.0)])
@in_loop
async def test_a_canary_that_has_no_place_shows_nothing_about_its_release(refusal: ServingError) -> None:
    async def is_full(exchange: Any, send: Send) -> None:
        exchange.error = refusal
        await _answers_500(exchange, send)

    app = pair(failing(is_full))
    assert await ask(app, 40) == {"model": 40}
    assert state(app) is CanaryState.UNDECIDED


@in_loop
async def test_what_an_end_of_the_canarys_engines_is_blamed_on_is_tried_at_the_model() -> None:
    async def looks_like_poison(exchange: Any, send: Send) -> None:
        exchange.error = RequestQuarantined(blocked_s=1.0)
        await _answers_500(exchange, send)

    app = pair(failing(looks_like_poison))
    assert await ask(app, 40) == {"model": 40}
    assert state(app) is CanaryState.BAD


async def refuses(exchange: Any, send: Send) -> None:
    await send({"type": "http.response.start", "status": 400, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


@in_loop
async def test_a_mistake_of_the_client_shows_nothing_about_the_canary() -> None:
    app = pair(failing(refuses), failing(refuses))
    answers = [(await call(app, "POST", CHAT, json={"model": "model"})).status_code for _ in range(40)]
    assert Counter(answers) == {400: 40}
    assert (state(app), app.canaries["model"].judge.num_judged) == (CanaryState.UNDECIDED, 0)


@in_loop
async def test_what_only_the_canary_refuses_the_model_answers_and_a_few_condemn_it() -> None:
    app = pair(failing(refuses))
    assert await ask(app, 60) == {"model": 60}
    assert state(app) is CanaryState.BAD


@in_loop
async def test_a_canary_without_a_replica_gets_nothing() -> None:
    assert await ask(pair(says("next"), ready=False), 10) == {"model": 10}


@in_loop
async def test_a_verdict_frees_the_requests_that_hang_at_the_canary() -> None:
    asked = asyncio.Event()

    def hang() -> Awaitable[None]:
        asked.set()
        return asyncio.sleep(1000)

    app = pair(says("next", before=hang))
    await ask(app)
    answer = asyncio.ensure_future(ask(app))
    await asked.wait()
    app.canaries["model"].judge.condemn("another ingress says so")
    assert await answer == {"model": 1}
    assert app.canaries["model"].judge.num_judged == 0


@in_loop
async def test_a_request_that_waits_too_long_for_the_canary_is_answered_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    app = pair(says("next", before=lambda: asyncio.sleep(1000)))
    judge = app.canaries["model"].judge
    monkeypatch.setattr(type(judge), "patience_s", lambda self: 0.0)
    assert await ask(app, 2) == {"model": 2}
    assert judge.num_judged == 1


@in_loop
async def test_a_request_that_is_taken_from_the_canary_is_stopped_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = asyncio.Event()

    async def as_vllm(scope: Scope, receive: Receive, send: Send) -> None:
        """Its handler is a task of its own, which only a disconnect ends."""
        await receive()
        if (await receive())["type"] == "http.disconnect":
            stopped.set()

    app = pair(as_vllm)
    monkeypatch.setattr(type(app.canaries["model"].judge), "patience_s", lambda self: 0.0)
    assert await ask(app, 2) == {"model": 2}
    assert stopped.is_set()


@in_loop
async def test_a_client_that_gives_up_shows_nothing_about_the_canary() -> None:
    async def gone(exchange: Any, send: Send) -> None:
        exchange.client_gone()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"by": "next"}'})  # as vLLM's app does after its client has gone

    app = pair(failing(gone))
    await ask(app, 20)
    assert app.canaries["model"].judge.num_judged == 0


@in_loop
async def test_a_mistake_of_the_client_that_both_report_within_a_stream_shows_nothing_about_the_canary() -> None:
    async def mistaken(exchange: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        event = b'data: {"error": {"message": "told", "code": 400}}\n\n'
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    app = pair(failing(mistaken), failing(mistaken))
    for _ in range(20):
        assert '"code": 400' in (await call(app, "POST", CHAT, json={"model": "model"})).text
    assert app.canaries["model"].judge.num_judged == 0


@in_loop
async def test_a_stream_that_the_canary_has_begun_is_not_taken_away() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def app_of_next(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        begun.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"data: b\n\n"})

    app = pair(app_of_next)
    await ask(app)
    answer = asyncio.ensure_future(call(app, "POST", CHAT, json={"model": "model", "stream": True}))
    await begun.wait()
    app.canaries["model"].judge.condemn("bad")
    go_on.set()
    assert (await answer).text == "data: a\n\ndata: b\n\n"


@in_loop
async def test_a_canary_is_neither_listed_nor_needed() -> None:
    app = pair(says("next"), ready=False)
    assert [card["id"] for card in (await call(app, "GET", "/v1/models")).json()["data"]] == ["model"]
    assert (await call(app, "GET", "/readyz")).status_code == 200
    assert (await ask(app, 2, model="")) == {"model": 2}


@in_loop
async def test_verdicts_are_passed_on_and_adopted_for_the_same_release_only() -> None:
    bad, other = pair(failing(_answers_500)), pair(says("next"))
    await ask(bad, 60)
    condemned = dict(bad.canaries["model"].condemned())
    other.canaries["model"].learn({"another release": "x"})
    assert state(other) is CanaryState.UNDECIDED
    other.canaries["model"].learn(condemned)
    assert state(other) is CanaryState.BAD
    assert await ask(other, 10) == {"model": 10}


def test_a_beam_search_whose_first_token_came_does_not_wait_for_one_however_wide_its_step_is() -> None:
    requests = EngineRequests()
    watch = _Watch(lambda criterion, value: None, requests)
    first = RequestState("r-beam-0", 1, 1, Resume.CONTINUE)
    requests.add(first, "r-beam-0")
    assert watch.waits_s() > 0
    first.trail.delivered(Output("r-beam-0", [1]), 1.0)
    first.trail.finished("length")
    for beam in range(100):
        requests.add(RequestState(f"s-beam-{beam}", 2, 1, Resume.CONTINUE), f"s-beam-{beam}")
    assert first not in requests.kept
    assert watch.waits_s() == 0.0
