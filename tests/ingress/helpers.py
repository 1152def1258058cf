"""This module has shorthand for tests of a fleet client."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Message

from serve_app.ingress.exchange import held_answer
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.held_answer import HeldAnswer
from serve_app.ingress.http.error_answers import FleetError
from tests.doubles.fleet import Fleet

PROMPT = [1, 2, 3]


def is_running(f: Fleet, replica_id: str, *attempt_ids: str) -> bool:
    return f.running(replica_id) == list(attempt_ids)


def error_of(stream: Any) -> Exception:
    assert isinstance(stream.error, FleetError)
    assert not stream.finished
    return stream.error.error


@contextmanager
def answering(exchange: Exchange) -> Iterator[None]:
    """Let the code inside answer this HTTP request, whose client reads nothing."""

    async def send(_: Message) -> None: ...

    held = HeldAnswer(send, exchange)
    with held_answer.answering(held):
        yield
