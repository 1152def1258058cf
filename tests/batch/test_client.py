"""The client that all batches share, against a small HTTP server that counts what it is asked."""

import asyncio
import json

from serve_app.batch.client import Answer, Client, Failure, Limits, connect
from serve_app.errors import ServiceAway
from tests.batch.service import Service

PATH = "/v1/completions"


def body(prompt: str) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


def test_a_waiting_request_that_is_given_up_leaves_its_place_to_the_next(service: Service) -> None:
    service.delay_s = 0.2

    async def ask() -> list[object]:
        limits = Limits(concurrency=1)
        async with connect(service.url, "", limits) as http:
            client = Client(http, limits)
            tasks = [asyncio.create_task(client.ask(PATH, body(prompt))) for prompt in ("a", "b", "c", "d")]
            while not service.asked:
                await asyncio.sleep(0.01)
            tasks[1].cancel()  # it waits
            await tasks[0]
            tasks[2].cancel()  # it has just been admitted, and has not run yet
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60.0)

    first, second, third, fourth = asyncio.run(ask())
    assert isinstance(first, Answer)
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(third, asyncio.CancelledError)
    assert isinstance(fourth, Answer)
    assert (service.asked["a"], service.asked["b"], service.asked["d"], service.most_at_once) == (1, 0, 1, 1)


def test_patience_counts_only_while_something_is_asked(service: Service) -> None:
    async def ask() -> Answer | Failure:
        limits = Limits(patience_s=3.0)
        async with connect(service.url, "", limits) as http:
            client = Client(http, limits)
            await client.ask(PATH, body("a"))
            service.verdict = lambda prompt: 503 if service.asked[prompt] < 3 else 200
            await asyncio.sleep(3.2)
            return await client.ask(PATH, body("b"))

    assert isinstance(asyncio.run(ask()), Answer)
    assert service.asked == {"a": 1, "b": 3}


def test_the_window_follows_what_the_service_takes(service: Service) -> None:
    async def ask() -> tuple[float, float, float]:
        limits = Limits(concurrency=40, patience_s=0.5)
        async with connect(service.url + "/v1/", "", limits) as http:
            client = Client(http, limits)
            first = client.window
            await asyncio.gather(*(client.ask(PATH, body(str(i))) for i in range(200)))
            grown = client.window
            service.verdict = lambda prompt: 503
            try:
                await client.ask(PATH, body("full"))
            except ServiceAway:
                return first, grown, client.window
            raise AssertionError("it was answered")

    assert asyncio.run(ask()) == (16.0, 40.0, 28.0)
