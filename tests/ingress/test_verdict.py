import asyncio
import contextvars

from serve_app.errors import QueueFull
from serve_app.ingress.exchange.verdict import Verdict, current_verdict


def test_outside_of_a_request_there_is_no_verdict() -> None:
    assert contextvars.Context().run(current_verdict.get) is None


def test_tasks_of_one_request_share_its_verdict_and_those_of_another_do_not() -> None:
    async def engine_request(error: QueueFull | None) -> None:
        verdict = current_verdict.get()
        assert verdict is not None
        verdict.error = verdict.error or error

    async def http_request(error: QueueFull | None) -> Verdict:
        verdict = Verdict()
        current_verdict.set(verdict)
        await asyncio.gather(engine_request(None), engine_request(error))
        return verdict

    async def both() -> tuple[Verdict, Verdict]:
        return await asyncio.gather(http_request(full), http_request(None))

    full = QueueFull(waiting=1, limit=1, retry_after_s=5.0)
    refused, accepted = asyncio.run(both())
    assert (refused.error, accepted.error) == (full, None)
