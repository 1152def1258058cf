"""A canary answers its share of a model's requests, and the model answers the requests that the canary fails to begin.

docs/adr/0014-a-canary-judged-against-its-model.md has the reasons. This module measures requests; ``core/canary.py`` judges the values.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.config import ModelSettings
from serve_app.core.canary import CanaryLimits, CanaryState, Criterion, Judge, is_looping
from serve_app.core.request import Resume
from serve_app.errors import (
    CannotStartInTime,
    DeadlinePassed,
    NoFreePlace,
    QueueFull,
    QuotaExceeded,
    RequestQuarantined,
    ServerStopping,
    ServingError,
)
from serve_app.ingress.exchange.engine_requests import EngineRequests
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import ERRORS, HeldAnswer, status_of
from serve_app.ingress.exchange.outcomes import Sent
from serve_app.ingress.front_end.front_end import FrontEnd

logger = logging.getLogger(__name__)

SHARED_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate"})
"""Routes of which a canary gets its share. /v1/responses is not among them: its answer begins before the engine is asked."""

_LOOK_S = 0.5
_GOODBYE_S = 1.0
"""How long the canary's app has to notice that its client is gone, in seconds."""
_ITL_TOKENS, _ITL_AFTER_S = 32, 10.0
"""The ITL of an answer is measured after so many tokens, or after so many seconds, whichever comes first."""
_ITL_LEAST_TOKENS = 8


class Canary:
    """One canary at one ingress."""

    def __init__(self, front: FrontEnd, model: ModelSettings) -> None:
        assert front.model.canary is not None
        self.front = front
        self.of = model.name
        self.judge = Judge(CanaryLimits(front.model.canary.share, front.model.canary.requests, front.model.canary.slow_factor))
        self.release = f"{front.model.release()} beside {model.release()}"
        """The name of this comparison, equal in all ingresses with the same two settings. A verdict on it holds for these settings only."""

    def condemned(self) -> tuple[tuple[str, str], ...]:
        """Return for the lease, which other ingresses read: the release and why it is bad; empty if it is not."""
        return ((self.release, self.judge.reason),) if self.judge.reason else ()

    def learn(self, condemned: dict[str, str]) -> None:
        """Take in the releases that other ingresses have condemned, with their reasons."""
        if not self.judge.reason and (reason := condemned.get(self.release)) is not None:
            self.judge.condemn(reason)
            self._log_state()

    def describe(self) -> dict[str, Any]:
        """Return the state of the canary as plain data, for status and metrics."""
        judge = self.judge
        state = {"of": self.of, "state": judge.state.value, "reason": judge.reason}
        return {**state, "requests": judge.num_taken, "judged": judge.num_judged, "share": judge.limits.share}

    def split(self, app_of: Callable[[FrontEnd], Awaitable[ASGIApp]], model: FrontEnd, replay: Callable[[], Receive]) -> ASGIApp:
        """Return an app that answers by the canary or by the model.

        Args:
            app_of: Notes that a front end answers the request, and returns its app.
            replay: Returns a receive that gives the body, then the client's messages; the app reads from such ones alone.
        """

        async def answer(scope: Scope, _: Receive, held: Send) -> None:
            assert isinstance(held, HeldAnswer)
            exchange = held.exchange
            if self.judge.takes_next(is_ready=self.front.client.is_ready()):
                outcome = await self._try(await app_of(self.front), scope, _Client(replay()), held)
                if outcome is _Outcome.ANSWERED:
                    return
                if isinstance(exchange.error, DeadlinePassed | QuotaExceeded):  # the model may not answer either
                    await held.end()
                    return
                exchange.begin_again()
                await (await app_of(model))(scope, replay(), held)
                if outcome is _Outcome.REFUSED and exchange.answered and not _is_error(exchange.sent):
                    self._saw(Criterion.FAILED, 1.0)  # the release accepts less: a shorter context, no tool parser, ...
                return
            watch = _Watch(self.judge.saw_model, exchange.requests)
            app = await app_of(model)
            raised = True
            try:
                await app(scope, replay(), held)
                raised = False
            finally:
                watch.end(failed=_has_failed(exchange, raised=raised))

        return answer

    async def _try(self, app: ASGIApp, scope: Scope, client: "_Client", held: HeldAnswer) -> "_Outcome":
        """Let the canary answer. Unless it returns `ANSWERED`, the client was sent nothing, and the model has to answer."""
        was = self.judge.state
        exchange = held.exchange
        watch = _Watch(self._saw, exchange.requests)
        gate = _Gate(held)
        task = asyncio.create_task(_run(app, scope, client.receive, gate), name="canary")
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                watch.look()
                if not gate.has_begun and (self.judge.state is CanaryState.BAD or watch.waits_s() > self.judge.patience_s()):
                    gate.has_failed = True
                    break
        finally:
            if not task.done():
                gate.has_failed = not gate.has_begun
                await client.hang_up(task)
        raised = None if task.cancelled() else task.exception()
        if raised is not None and not gate.has_begun:
            gate.has_failed = True
        taken_away = (
            was is not CanaryState.BAD and self.judge.state is CanaryState.BAD and watch.waits_s() <= self.judge.patience_s()
        )
        if gate.has_failed and taken_away and exchange.error is None and raised is None:
            return _Outcome.FAILED  # another request condemned the canary, so this one shows nothing
        failed = None if gate.has_refused else _has_failed(exchange, raised=raised is not None or gate.has_failed)
        watch.end(failed=failed)
        if gate.has_failed:
            logger.info(
                "canary %s did not begin to answer, so %s answers: %r", self.front.model.name, self.of, exchange.error or raised
            )
        elif raised is not None:
            raise raised
        if not gate.has_failed:
            return _Outcome.ANSWERED
        return _Outcome.REFUSED if gate.has_refused else _Outcome.FAILED

    def _saw(self, criterion: Criterion, value: float) -> None:
        was = self.judge.state
        self.judge.saw_canary(criterion, value)
        if self.judge.state is not was:
            self._log_state()

    def _log_state(self) -> None:
        name, judge = self.front.model.name, self.judge
        if judge.state is CanaryState.BAD:
            logger.error("canary %s is bad, so %s answers all requests: %s", name, self.of, judge.reason)
        else:
            logger.info("canary %s is good: %d requests were judged", name, judge.num_judged)


class _Outcome(Enum):
    ANSWERED = auto()
    FAILED = auto()
    REFUSED = auto()


class _Gate:
    """An ASGI ``send`` that passes nothing on if the canary fails before the first part of an answer."""

    def __init__(self, held: HeldAnswer) -> None:
        self._held = held
        self.has_begun = False
        self.has_failed = False
        self.has_refused = False
        """Whether the canary failed and blames the request; the model may accept the same request."""

    async def __call__(self, message: Message) -> None:
        if not self.has_begun and not self.has_failed:
            self.has_failed = self._fails(message)
            self.has_begun = not self.has_failed and message["type"] == "http.response.body"
        if not self.has_failed:
            await self._held(message)

    def _fails(self, message: Message) -> bool:
        error = self._held.exchange.error
        if error is not None:
            self.has_refused = not _is_the_servers(error)
            return True
        if message["type"] == "http.response.start":
            self.has_refused = 400 <= int(message["status"]) < 500
            return int(message["status"]) >= 400
        body = message.get("body", b"")
        if not body.startswith(ERRORS):
            return False
        self.has_refused = status_of(body) < 500
        return True


class _Watch:
    """The measurements of one request, for the canary or the model that answers it."""

    def __init__(self, saw: Callable[[Criterion, float], None], requests: EngineRequests) -> None:
        self._saw = saw
        self._requests = requests
        self._began_at = time.monotonic()
        self._to_time = {Criterion.TTFT, Criterion.ITL}

    def waits_s(self) -> float:
        """Return for how long the request has waited for a first token; 0 once it has one."""
        first = self._requests.first
        of_kept = (request.trail.first_token_at for request in self._requests.kept)  # the first of a beam search may not be kept
        has_token = any(at is not None for at in (None if first is None else first.trail.first_token_at, *of_kept))
        return 0.0 if has_token else time.monotonic() - self._began_at

    def look(self) -> None:
        """Measure the request while it runs, because an answer may take minutes."""
        self._time(least_tokens=_ITL_TOKENS)

    def end(self, *, failed: bool | None) -> None:
        """Take in the end. ``failed`` None: it shows nothing about the release, because the request was wrong or the client left."""
        if failed is not None:
            self._saw(Criterion.FAILED, float(failed))
        self._time(least_tokens=_ITL_LEAST_TOKENS)
        first = self._requests.first
        if failed is False and first is not None and first.trail.end and first.resume is not Resume.RESTART:
            self._saw(Criterion.EMPTY, float(first.trail.end == "stop" and len(first.emitted_ids) <= 1))
            self._saw(Criterion.LOOPED, float(is_looping(first.emitted_ids)))
        elif Criterion.TTFT in self._to_time and (failed or failed is None) and first is not None:
            self._saw(Criterion.TTFT, time.monotonic() - self._began_at)  # without a token, the wait so far is a lower bound

    def _time(self, *, least_tokens: int) -> None:
        first = self._requests.first
        if first is None or (first_at := first.trail.first_token_at) is None:
            return
        if Criterion.TTFT in self._to_time:
            self._to_time.discard(Criterion.TTFT)
            self._saw(Criterion.TTFT, first_at - first.arrived_at)
        num_tokens = len(first.emitted_ids)
        long_enough = num_tokens >= least_tokens or (num_tokens > 1 and time.monotonic() - first_at > _ITL_AFTER_S)
        if Criterion.ITL in self._to_time and long_enough:
            self._to_time.discard(Criterion.ITL)
            self._saw(Criterion.ITL, (first.trail.last_token_at - first_at) / (num_tokens - 1))


class _Client:
    """The client as the canary's app sees it: the body, then a disconnect, by the client or by `hang_up`."""

    def __init__(self, receive: Receive) -> None:
        self._rest = receive
        self._hung_up = asyncio.Event()

    async def receive(self) -> Message:
        coming, ours = asyncio.ensure_future(self._rest()), asyncio.ensure_future(self._hung_up.wait())
        try:
            await asyncio.wait([coming, ours], return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            coming.cancel()
            ours.cancel()

    async def hang_up(self, task: asyncio.Task[None]) -> None:
        """End the app's task. A disconnect makes vLLM stop the request in its engine; the task's cancellation alone would not."""
        self._hung_up.set()
        await asyncio.wait([task], timeout=_GOODBYE_S)
        task.cancel()  # no effect on a task that is done
        await asyncio.wait([task])


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def _is_the_servers(error: ServingError) -> bool:
    """Return whether another front end may succeed. If a release's engines crash, any request looks like the cause, and is quarantined."""
    return error.http_status >= 500 or isinstance(error, RequestQuarantined)


def _is_refused(exchange: Exchange) -> bool:
    """Return whether the fleet had no place or no time for the request. That depends on the number of replicas, not on their quality."""
    return isinstance(exchange.error, QueueFull | CannotStartInTime | DeadlinePassed | ServerStopping | NoFreePlace)


def _has_failed(exchange: Exchange, *, raised: bool) -> bool | None:
    error, sent = exchange.error, exchange.sent
    if exchange.gone is not None or _is_refused(exchange) or (error is not None and not _is_the_servers(error)):
        return None
    if raised or error is not None or max(sent.error_status, sent.status) >= 500:
        return True
    return False if sent.ended and not _is_error(sent) else None


def _is_error(sent: Sent) -> bool:
    """Return whether the client was sent an error, as a status or inside a stream."""
    return max(sent.status, sent.error_status) >= 400
