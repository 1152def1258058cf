"""`BatchClient`, which all batches share, runs here against a small HTTP server that counts the requests."""

import asyncio
import gzip
import json
import socket
import threading
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from serve_app.batch.client import BatchClient, Failure, Limits, Reply, connect, only_model
from serve_app.batch.connections import Connections
from serve_app.batch.journal import Journal, JournalCounts
from serve_app.batch.requests import Defaults, request_of_example
from serve_app.batch.runner import _YIELD_LINES, Progress, Runner
from serve_app.errors import BatchError, KeyRefused, ServiceAway
from tests.batch.service import Service

PATH = "/v1/completions"


def body(prompt: str) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


def test_a_waiting_request_that_is_given_up_leaves_its_place_to_the_next(service: Service) -> None:
    service.delay_s = 0.2

    async def ask() -> list[object]:
        limits = Limits(concurrency=1)
        async with connect(service.url, "", limits) as http:
            client = BatchClient(http, limits)
            tasks: list[asyncio.Task[Reply | Failure]] = []

            async def first() -> Reply | Failure:
                answer = await client.ask(PATH, body("a"))
                tasks[2].cancel()  # it has just been given the place, and has not run yet
                return answer

            tasks.append(asyncio.create_task(first()))
            tasks.extend(asyncio.create_task(client.ask(PATH, body(prompt))) for prompt in ("b", "c", "d"))
            while not service.asked:
                await asyncio.sleep(0.01)
            tasks[1].cancel()  # it waits
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60.0)

    first, second, third, fourth = asyncio.run(ask())
    assert isinstance(first, Reply)
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(third, asyncio.CancelledError)
    assert isinstance(fourth, Reply)
    assert (service.asked["a"], service.asked["b"], service.asked["c"], service.asked["d"]) == (1, 0, 0, 1)
    assert service.most_at_once == 1


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"concurrency": 0}, "Limits.concurrency is 0; it must be at least 1"),
        ({"tries": 0}, "Limits.tries is 0; it must be at least 1"),
        ({"timeout_s": 0.0}, "Limits.timeout_s is 0.0; it must be above 0"),
        ({"patience_s": -1.0}, "Limits.patience_s is -1.0; it must be at least 0"),
        ({"tokens_per_minute": 0}, "Limits.tokens_per_minute is 0; it must be at least 1, or None"),
    ],
)
def test_a_limit_with_which_nothing_could_be_asked_is_refused(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        Limits(**limits)


def test_the_model_of_a_full_service_is_waited_for_and_that_of_another_kind_of_server_is_not(service: Service) -> None:
    service.statuses_of_models = [503, 429]
    assert only_model(service.url, "", Limits(patience_s=60.0)) == "tiny"
    service.statuses_of_models = [404]
    with pytest.raises(BatchError, match="answers 404; check the URL"):
        only_model(service.url, "", Limits(patience_s=60.0))


@pytest.mark.parametrize(("error_type", "num_sent"), [("deadline_passed", 1), ("", 2)])
def test_a_request_whose_time_is_over_is_not_sent_again(service: Service, error_type: str, num_sent: int) -> None:
    service.verdict, service.error_type = lambda prompt: 504, error_type

    async def ask() -> Reply | Failure:
        limits = Limits(tries=2)
        async with connect(service.url, "", limits) as http:
            return await BatchClient(http, limits).ask(PATH, body("a"))

    failure = asyncio.run(ask())
    assert isinstance(failure, Failure)
    assert (failure.status, service.asked["a"]) == (504, num_sent)


def test_a_key_that_no_header_can_have_is_refused_and_not_told() -> None:
    for key in ("schlüssel", "line\nend", "a b"):
        with pytest.raises(
            BatchError, match="the API key has a character that no header may have; set SERVE_APP_API_KEY"
        ) as raised:
            connect("http://127.0.0.1:9", key, Limits())
        assert key not in str(raised.value)


def test_patience_counts_only_while_something_is_asked(service: Service) -> None:
    async def ask() -> Reply | Failure:
        limits = Limits(patience_s=3.0)
        async with connect(service.url, "", limits) as http:
            client = BatchClient(http, limits)
            await client.ask(PATH, body("a"))
            service.verdict = lambda prompt: 503 if service.asked[prompt] < 3 else 200
            await asyncio.sleep(3.2)
            return await client.ask(PATH, body("b"))

    assert isinstance(asyncio.run(ask()), Reply)
    assert service.asked == {"a": 1, "b": 3}


def test_patience_counts_from_the_first_refusal_and_not_from_the_last_answer() -> None:
    asked: list[httpx.Request] = []

    async def slow_and_then_away(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            await asyncio.sleep(1.1)
            raise httpx.ReadError("the ingress was replaced")
        return httpx.Response(200, json={})

    async def ask() -> Reply | Failure:
        async with httpx.AsyncClient(transport=httpx.MockTransport(slow_and_then_away), base_url="http://service") as http:
            return await BatchClient(http, Limits(patience_s=1.0)).ask(PATH, body("a"))

    assert isinstance(asyncio.run(ask()), Reply)
    assert len(asked) == 2


def test_the_window_follows_what_the_service_takes(service: Service) -> None:
    async def ask() -> tuple[float, float, float]:
        limits = Limits(concurrency=40, patience_s=0.5)
        async with connect(service.url + "/v1/", "", limits) as http:
            client = BatchClient(http, limits)
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


def test_a_run_ends_with_what_watches_it_also_while_nothing_is_answered(service: Service, tmp_path: Path) -> None:
    service.verdict = lambda prompt: 503

    async def watch(_: Progress) -> None:
        while not service.asked:
            await asyncio.sleep(0.01)
        raise BatchError("the fleet ended", "start it")

    async def run() -> None:
        limits = Limits()
        async with connect(service.url, "", limits) as http, asyncio.timeout(60.0):
            with Journal(tmp_path / "journal") as journal:
                await Runner(http, journal, limits).run(iter([request_of_example(1, "a", Defaults("m"))]), watch=watch)

    with pytest.raises(BatchError, match="the fleet ended; start it"):
        asyncio.run(run())


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_no_failure_of_a_line(service: Service, tmp_path: Path, status: int) -> None:
    async def run() -> JournalCounts:
        limits = Limits()
        async with connect(service.url, "", limits) as http:
            with Journal(tmp_path / "journal") as journal:
                requests = [request_of_example(number, "a", Defaults("m")) for number in (1, 2)]
                await Runner(http, journal, limits).run(iter(requests))
                return journal.counts()

    service.verdict = lambda prompt: status
    with pytest.raises(KeyRefused, match=f"the service answers {status}: no: {status}; set SERVE_APP_API_KEY"):
        asyncio.run(run())
    service.verdict = lambda prompt: 200
    assert asyncio.run(run()) == JournalCounts(answered=2, failed=0)


def test_other_tasks_run_also_while_no_line_is_asked(service: Service, tmp_path: Path) -> None:
    seen: list[int] = []

    async def watch(progress: Progress) -> None:
        seen.append(progress.failed)
        await asyncio.Event().wait()

    async def run() -> None:
        wrong = (request_of_example(number, 7, Defaults("m")) for number in range(2000))
        async with connect(service.url, "", Limits()) as http:
            with Journal(tmp_path / "journal") as journal:
                await Runner(http, journal, Limits()).run(wrong, watch=watch)

    asyncio.run(run())
    assert seen == [_YIELD_LINES]


def test_each_line_with_the_id_of_another_one_is_in_the_errors_while_others_are_answered(tmp_path: Path) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        for _ in range(int(json.loads(request.content)["prompt"]) % 8):
            await asyncio.sleep(0)
        return httpx.Response(200, json={"id": "1", "choices": []})

    async def run() -> JournalCounts:
        values = [{"id": "same" if number // 20 % 2 else f"id-{number}", "prompt": str(number)} for number in range(1000)]
        requests = (request_of_example(number, value, Defaults("m", chat=False)) for number, value in enumerate(values, 1))
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://service") as http:
            with Journal(tmp_path / "journal") as journal:
                await Runner(http, journal, Limits()).run(requests)
                return journal.counts()

    assert asyncio.run(run()) == JournalCounts(answered=501, failed=499)


def test_as_many_requests_run_at_once_as_are_sent(service: Service) -> None:
    num = 110  # above the 100 of aiohttp's own default
    together = threading.Barrier(num)

    def verdict(_: str) -> int:
        together.wait(60.0)  # fails unless so many wait at the same time
        return 200

    service.verdict = verdict

    async def run() -> list[int]:
        async with Connections(service.url, {}, timeout_s=120.0) as http:
            posts = [http.post("/v1/completions", content=body("a"), headers={}) for _ in range(num)]
            return [response.status_code for response in await asyncio.gather(*posts)]

    assert asyncio.run(run()) == [200] * num


def test_an_answer_that_takes_too_long_and_a_service_that_is_away_are_told_apart(service: Service) -> None:
    service.delay_s = 5.0

    async def run(url: str) -> object:
        async with Connections(url, {}, timeout_s=0.2) as http:
            return await http.post("/v1/completions", content=b'{"prompt": "a"}', headers={})

    with pytest.raises(httpx.TimeoutException):
        asyncio.run(run(service.url))
    with pytest.raises(httpx.NetworkError):
        asyncio.run(run("http://127.0.0.1:9"))


def test_the_environments_proxy_is_asked_and_no_other_key_is_sent_than_ours(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine far.example login other password other")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", service.url)
    monkeypatch.setenv("no_proxy", "near.example")

    async def run(url: str) -> int:
        async with connect(url, "our-key", Limits()) as http:
            return (await http.post("/v1/completions", content=body("a"), headers={})).status_code

    assert asyncio.run(run("http://far.example")) == 200
    assert service.keys == {"Bearer our-key"}
    with pytest.raises(httpx.NetworkError):
        asyncio.run(run("http://near.example:9"))


def test_an_answer_that_a_gateway_compresses_is_read() -> None:
    async def compressed(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(b'{"choices": []}'), headers={"content-encoding": "gzip"})

    async def run() -> tuple[int, object]:
        app = web.Application()
        app.router.add_post(PATH, compressed)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with Connections(f"http://127.0.0.1:{runner.addresses[0][1]}", {}, timeout_s=60.0) as http:
            response = await http.post(PATH, content=body("a"), headers={})
        await runner.cleanup()
        return response.status_code, response.json()

    assert asyncio.run(run()) == (200, {"choices": []})


def test_a_service_to_which_no_connection_comes_about_is_away_and_has_not_failed_the_line() -> None:
    async def run() -> None:
        async with Connections(url, {}, timeout_s=60.0, connect_s=0.05) as http:
            await http.post(PATH, content=body("a"), headers={})

    with socket.socket() as full, socket.socket() as other:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # its one place is taken by `other`: the kernel answers nobody else
        other.connect(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(httpx.NetworkError) as raised:
            asyncio.run(run())
    assert isinstance(raised.value.__cause__, aiohttp.ConnectionTimeoutError)
