"""This module serves an ingress at a port of the loopback interface: vLLM's own front end over a fake engine."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from serve_app.checkpoints import make_tiny_llama
from serve_app.ingress.http.connection import LimitedHttpProtocol
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.routes.app import AppLimits, IngressApp
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fleet import settings
from tests.ingress.serving import application
from tests.ports import free_port

WITHOUT = frozenset(
    {"logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "use_beam_search", "prompt_logprob_token_ids"}
)
"""Fields for which an engine must compute log probabilities, which the fake engine does not have."""


class Impatient(LimitedHttpProtocol):
    """A connection that gives up after a second, so that a test does not wait for half a minute."""

    head_timeout_s = 1.0
    unread_body_timeout_s = 1.0


@dataclass(frozen=True)
class Served:
    """An ingress at ``port``, and the engine behind it."""

    port: int
    app: IngressApp
    engine: FakeEngine


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """Serve a tiny model, made in ``folder``. A body must come within two seconds, and have 10 MiB at most."""
    async with application(make_tiny_llama(folder / "tiny"), AppLimits(10 << 20, body_timeout_s=2.0)) as (app, engine, _):
        values = settings(ingress={"port": free_port()}).ingress
        listener = Listener(app, values, connection=Impatient)
        await listener.start()
        try:
            yield Served(values.port, app, engine)
        finally:
            await listener.stop()
