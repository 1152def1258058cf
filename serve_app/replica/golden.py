"""Golden prompts must be answered by a replica's engine as the configuration expects before any request reaches it.

So a release with wrong weights, or one that is far too slow, fails at its first replica, and a rolling update stops there: the replicas
of the release before keep serving.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence

from serve_app.config import GoldenPrompt
from serve_app.errors import EngineStartFailed
from serve_app.replica import pipe
from serve_app.replica.health import LOOK_EVERY_S

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 200


async def ask_all(
    model: str,
    prompts: Sequence[GoldenPrompt],
    ask: Callable[[pipe.AskGolden], asyncio.Future[pipe.GoldenAnswer]],
    ping: Callable[[], None],
) -> None:
    """Ask the prompts one after the other.

    Args:
        ask: Gives a prompt to the engine; its future raises EngineStartFailed if the engine ends.
        ping: Shows the engine core that its supervisor lives.
    Raises:
        EngineStartFailed: An answer was wrong, late or missing.
    """
    for golden in prompts:
        began = time.monotonic()
        answer = ask(pipe.AskGolden(golden.prompt, golden.max_tokens))
        while not answer.done() and time.monotonic() - began < golden.within_s:
            await asyncio.wait([answer], timeout=min(LOOK_EVERY_S, golden.within_s))
            ping()
        if not answer.done():
            answer.cancel()
            raise EngineStartFailed(model=model, reason=f"{_about(golden)} has no answer after {golden.within_s:g} s (within_s)")
        given, took_s = answer.result(), time.monotonic() - began
        if given.problem:
            raise EngineStartFailed(model=model, reason=f"{_about(golden)} has no answer: {given.problem}")
        if re.search(golden.expect, given.text) is None:
            answered = f"was answered with {_short(given.text)}, in which {golden.expect!r} is not found"
            raise EngineStartFailed(model=model, reason=f"{_about(golden)} {answered}")
        logger.info("golden prompt %s answered as expected after %.2f s", _short(golden.prompt), took_s)


def _about(golden: GoldenPrompt) -> str:
    return f"golden prompt {_short(golden.prompt)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
