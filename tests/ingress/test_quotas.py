"""Quotas at the ingress: what clients are answered, and how several ingresses share."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.core.quota_shares import Answer, Days, QuotaShares, Report, later
from serve_app.core.quotas import Prompt
from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Tenant
from serve_app.errors import BadRequest, LeaseBoardSilent, QuotaExceeded, ServingError, StorageAway
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.fleet import quotas as quotas_of_an_ingress
from serve_app.ingress.fleet.quotas import EXCHANGE_S, Quotas
from tests.doubles.fleet import MODEL, in_loop
from tests.ingress.serving import serving
from tests.ingress.tenants import caller, digest, of_file

WAYS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/generate": {"prompt": "hi", "max_tokens": 2},
}


def tenants_file(**limits: dict[str, int]) -> str:
    keys = {name: [{"id": name, "sha256": digest(f"sk-of-the-tenant-{name}")}] for name in limits}
    return json.dumps({"tenants": {name: {"keys": keys[name], "limits": values} for name, values in limits.items()}})


def shown(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-of-the-tenant-{tenant}"}


@pytest.mark.parametrize("path", WAYS)
@in_loop
async def test_a_request_beyond_the_quota_gets_429_on_each_route_and_other_tenants_do_not(path: str, tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", tenants_file(red={"requests_per_minute": 2}, blue={}))
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, engine, _):
        ask = {"model": MODEL, **WAYS[path]}
        for left in (1, 0):
            answer = await http.post(path, json=ask, headers=shown("red"))
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-reset-requests"] in ("60s", "61s")
        engine.added.clear()
        for stream in (False, True):
            refused = await http.post(path, json={**ask, "stream": stream}, headers=shown("red"))
            assert refused.status_code == 429
            assert 55 <= int(refused.headers["retry-after"]) <= 61
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            error = refused.json()["error"]
            said = "the tenant 'red' has requests_per_minute 2: 2 are in use and none is left for another request; retry in"
            assert error["message"].startswith(said)
            assert error["type"] == ("rate_limit_error" if path == "/v1/messages" else "rate_limit_exceeded")
        assert engine.added == []
        answer = await http.post(path, json=ask, headers=shown("blue"))
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


@in_loop
async def test_tokens_are_counted_as_the_engines_count_them(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", tenants_file(red={"tokens_per_minute": 100, "tokens_per_day": 1000}))
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, _, _):
        ask = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 10, "ignore_eos": True}
        left = []
        for more in ({}, {"n": 2}):
            answer = await http.post("/v1/completions", json={**ask, **more}, headers=shown("red"))
            assert answer.status_code == 200, answer.text
            left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
        assert left == [70, 30], "20 + 10, and 20 + 2 x 10"
        refused = await http.post("/v1/completions", json={**ask, "n": 3}, headers=shown("red"))
        assert refused.status_code == 429
        needs = "needs 50, its answer included: a much lower max_tokens may need less; retry in"
        said = f"tokens_per_minute 100: 70 are in use and this request {needs}"
        assert said in refused.json()["error"]["message"]
        answer = await http.post("/v1/completions", json=ask, headers=shown("red"))
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        long = await http.post("/v1/completions", json={**ask, "prompt": [5] * 101}, headers=shown("red"))
        said = "the tenant 'red' has tokens_per_minute 100: 100 are in use and none is left for another request; retry in"
        assert (long.status_code, long.json()["error"]["message"][: len(said)]) == (429, said), "before it is read"


@in_loop
async def test_a_prompt_longer_than_the_quota_is_refused_for_good(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", tenants_file(red={"tokens_per_minute": 100}))
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, engine, _):
        ask = {"model": MODEL, "prompt": [5] * 101, "max_tokens": 10}
        refused = await http.post("/v1/completions", json=ask, headers=shown("red"))
        said = "prompt: has 101 tokens, and the tenant 'red' has tokens_per_minute 100; shorten it"
        assert (refused.status_code, refused.json()["error"]["message"], engine.added) == (400, said, [])


LEFT = "x-ratelimit-remaining-requests"
FULL = {"model": MODEL, "max_tokens": 10, "ignore_eos": True}
CHAT = {**FULL, "messages": [{"role": "user", "content": "hi"}]}
BEAMS = {"use_beam_search": True, "max_tokens": 30}
ALONE_TOO_LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a list": ("/v1/completions", {**FULL, "prompt": [[5]] * 20}, "max_tokens: 20 answers or beams need at least 110 tokens"),
    "a list of long prompts": ("/v1/completions", {**FULL, "prompt": [[5] * 30] * 5}, "prompt: has 150 tokens in a list of 5"),
    "many prompts": ("/v1/completions", {**FULL, "prompt": [[5]] * 40, "max_tokens": 1}, "prompt: is a list of 40 prompts"),
    "n": ("/v1/completions", {**FULL, "prompt": [5], "n": 20}, "max_tokens: 20 answers or beams need at least 101 tokens"),
    "n as a text": ("/v1/chat/completions", {**CHAT, "n": "20"}, "max_tokens: 20 answers or beams need at least"),
    "n as a float": (
        "/v1/completions",
        {**FULL, "prompt": [5], "n": 20.0},
        "max_tokens: 20 answers or beams need at least 101 tokens",
    ),
    "chats": (
        "/v1/chat/completions/batch",
        {**CHAT, "max_tokens": 60, "messages": [CHAT["messages"]] * 5},
        "max_tokens: 5 answers or beams need at least",
    ),
    "beams": (
        "/v1/completions",
        {**FULL, **BEAMS, "prompt": [5], "n": 4},
        "max_tokens: 4 answers or beams need at least 121 tokens",
    ),
    "beams of a chat": ("/v1/chat/completions", {**CHAT, **BEAMS, "n": "4"}, "max_tokens: 4 answers or beams need at least"),
    "beams of /generate": (
        "/generate",
        {**FULL, **BEAMS, "prompt": [5], "best_of": 4},
        "max_tokens: 4 answers or beams need at least 121 tokens",
    ),
}
"""Route, body, and the first words of the error to a tenant with 100 tokens and 30 requests a minute."""


@pytest.mark.parametrize("name", ALONE_TOO_LARGE)
@in_loop
async def test_a_request_that_alone_exceeds_a_quota_is_refused_for_good(name: str, tmp_path: Path) -> None:
    path, body, said = ALONE_TOO_LARGE[name]
    quota = "requests_per_minute 30" if name == "many prompts" else "tokens_per_minute 100"
    tenants = of_file(tmp_path / "tenants.yaml", tenants_file(red={"tokens_per_minute": 100, "requests_per_minute": 30}))
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, engine, _):
        for stream in (False,) if "beams" in name or name == "chats" else (False, True):
            refused = await http.post(path, json={**body, "stream": stream}, headers=shown("red"))
            message = refused.json()["error"]["message"]
            assert (refused.status_code, message[: len(said)], engine.added) == (400, said, [])
            assert f", and the tenant 'red' has {quota}; " in message


@in_loop
async def test_each_prompt_of_a_list_counts_and_a_list_waits_for_room_for_all_of_them(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", tenants_file(red={"tokens_per_minute": 100, "requests_per_minute": 30}))
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, engine, _):
        left = []
        for prompts in ([[5, 5]] * 5, [[5]] * 3):
            answer = await http.post("/v1/completions", json={**FULL, "max_tokens": 4, "prompt": prompts}, headers=shown("red"))
            assert answer.status_code == 200, answer.text
            left.append([int(answer.headers[f"x-ratelimit-remaining-{what}"]) for what in ("tokens", "requests")])
        assert left == [[100 - 5 * 6, 25], [100 - 5 * 6 - 3 * 5, 22]]
        engine.added.clear()
        for stream in (False, True):
            body = {**FULL, "max_tokens": 2, "prompt": [[5]] * 20, "stream": stream}
            refused = await http.post("/v1/completions", json=body, headers=shown("red"))
            assert (refused.status_code, engine.added) == (429, [])
            assert "45 are in use and this request needs 60" in refused.text


@in_loop
async def test_a_request_that_began_before_the_file_changed_leaves_the_new_quotas_in_force(tmp_path: Path) -> None:
    file, begun, changed = tmp_path / "tenants.yaml", asyncio.Event(), asyncio.Event()
    tenants = of_file(file, tenants_file(red={"requests_per_minute": 1}))

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()  # the ingress has read the head, and asks for more of the body
        await changed.wait()
        yield json.dumps({**FULL, "prompt": "hi"}).encode()[1:]

    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants) as (http, _, _):
        headers = {**shown("red"), "content-type": "application/json"}
        slow = asyncio.create_task(http.post("/v1/completions", content=slow_body(), headers=headers))
        await begun.wait()
        file.write_text(tenants_file(red={"requests_per_minute": 60}))
        tenants.follow_changes()
        left = [
            (await http.post("/v1/completions", json={**FULL, "prompt": "hi"}, headers=headers)).headers[LEFT] for _ in range(2)
        ]
        changed.set()
        answer = await slow
        assert (left, answer.status_code, answer.headers[LEFT]) == (["59", "58"], 200, "57")


@in_loop
async def test_as_many_requests_run_at_once_as_the_quota_says(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", tenants_file(red={"max_concurrent": 1}))
    async with serving(make_tiny_llama(tmp_path / "tiny"), tenants=tenants, stepping=False) as (http, engine, _):
        ask = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "ignore_eos": True}
        first = asyncio.create_task(http.post("/v1/completions", json=ask, headers=shown("red")))
        while not engine.added:
            await asyncio.sleep(0.01)
        refused = await http.post("/v1/completions", json=ask, headers=shown("red"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        while not first.done():
            engine.step()
            await asyncio.sleep(0.01)
        assert (await first).status_code == 200
        second = asyncio.create_task(http.post("/v1/completions", json=ask, headers=shown("red")))
        while not second.done():
            engine.step()
            await asyncio.sleep(0.01)
        assert (await second).status_code == 200


NOW = 1_800_000_000.0


@contextlib.asynccontextmanager
async def sharing(
    number: int, exchange: Callable[[Report], Any] | None = None, *, stored: "FakeDays | None" = None
) -> AsyncIterator[list[Quotas]]:
    """Yield the quotas of so many ingresses with one board, which all of them have reported to."""
    now = NOW
    board = QuotaShares(6.0, now - 60)
    began_at = asyncio.get_running_loop().time()

    def clock() -> float:
        return now + asyncio.get_running_loop().time() - began_at

    async def ask(report: Report) -> Answer | None:
        return board.exchange(report, clock())

    found = [Quotas(f"i{each}", exchange or ask, clock, stored) for each in range(number)]
    tasks = [asyncio.create_task(quotas.run()) for quotas in found]
    await asyncio.sleep(2 * EXCHANGE_S)
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


TEAM = Tenant("team", quotas={"requests_per_minute": 60})


def exchange_of(tenant: Tenant = TEAM) -> Exchange:
    return Exchange("/v1/completions", caller(tenant))


async def ask(quotas: Quotas, exchange: Exchange, prompt_tokens: int, max_tokens: int) -> ServingError | None:
    """Note one more prompt, and ask for an engine request."""
    exchange.prompts.append(Prompt(prompt_tokens, 1, max_tokens))
    return await quotas.refusal(exchange)


@in_loop
async def test_a_burst_at_one_ingress_gets_the_whole_quota() -> None:
    async with sharing(3) as (one, two, _):
        for _ in range(5):
            assert await ask(two, exchange_of(), 10, 10) is None
        refused = [await ask(one, exchange_of(), 10, 10) for _ in range(60)]
        assert refused[:55] == [None] * 55
        error = refused[55]
        assert isinstance(error, QuotaExceeded)
        assert (error.used, error.limit, error.headers["x-ratelimit-remaining-requests"]) == (60, 60, "0")
        with pytest.raises(QuotaExceeded):
            one.check(TEAM)
        await asyncio.sleep(EXCHANGE_S * 2.5)
        with pytest.raises(QuotaExceeded):
            two.check(TEAM)


@in_loop
async def test_an_ingress_without_the_board_keeps_its_share_and_lets_no_request_wait() -> None:
    is_away = False
    board = QuotaShares(6.0, 0.0)

    async def exchange(report: Report) -> Answer | None:
        if is_away:
            raise LeaseBoardSilent(retry_after_s=1.0)
        return board.exchange(report, 1_800_000_000.0)

    async with sharing(2, exchange) as (one, _):
        assert await ask(one, exchange_of(), 1, 1) is None
        is_away = True
        await asyncio.sleep(EXCHANGE_S * 1.5)
        began_at = asyncio.get_running_loop().time()
        refused = [await ask(one, exchange_of(), 1, 1) for _ in range(20)]
        assert asyncio.get_running_loop().time() - began_at < EXCHANGE_S
        admitted = refused.count(None)
        assert 10 <= admitted < 20, "the share was a half of half the quota, or more"


@in_loop
async def test_prompts_of_one_request_that_wait_at_once_are_admitted_at_once() -> None:
    tenant = Tenant("team", quotas={"requests_per_minute": 4, "max_concurrent": 1})
    async with sharing(2) as (quotas, _):
        exchange = exchange_of(tenant)
        exchange.prompts = [Prompt(5, 1, 5)] * 3
        assert await asyncio.gather(*[quotas.refusal(exchange) for _ in range(3)]) == [None] * 3
        exchange.end()
        quotas.end(exchange)
        assert isinstance(await ask(quotas, exchange, 5, 5), BadRequest), "no client waits for it"
        for is_taken in (True, False, True, False, True, True):  # the fleet refuses two: they are no requests
            after = exchange_of(tenant)
            assert await ask(quotas, after, 5, 5) is None
            if is_taken:
                after.requests.add(RequestState("r", 5, 5, Resume.CONTINUE), "r")
            after.end()
            quotas.end(after)
        assert isinstance(await ask(quotas, exchange_of(tenant), 5, 5), QuotaExceeded)


class FakeDays:
    """A store that has the tokens of an earlier fleet, and is away at first."""

    def __init__(self, days: Days) -> None:
        self.days, self.tries = days, 0

    def tenant_days(self) -> Days:
        self.tries += 1
        if self.tries == 1:
            raise StorageAway(retry_after_s=1.0)
        return self.days

    def keep_tenant_days(self, days: Days) -> None:
        self.days = later(self.days, days)


@in_loop
async def test_tokens_of_the_day_are_found_again_after_the_whole_fleet_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_of_an_ingress, "_STORE_S", 0.05)
    tenant, today = Tenant("team", quotas={"tokens_per_day": 100}), int(NOW // 86_400)
    stored = FakeDays({"team": (today, 70), "other": (today - 1, 99)})
    async with sharing(1, stored=stored) as (quotas,):
        exchange = exchange_of(tenant)
        assert await ask(quotas, exchange, 15, 5) is None
        exchange.requests.add(RequestState("r", 15, 5, Resume.CONTINUE), "r")
        await asyncio.sleep(EXCHANGE_S * 2)
        refused = await ask(quotas, exchange_of(tenant), 20, 5)
        assert isinstance(refused, QuotaExceeded)
        assert (refused.used, refused.limit) == (90, 100)
        quotas.end(exchange)
        await quotas.leave()
    assert stored.days == {"team": (today, 85), "other": (today - 1, 99)}


@in_loop
async def test_an_admitted_request_is_not_refused_later_and_ends_once() -> None:
    async with sharing(1) as (quotas,):
        tenant = Tenant("team", quotas={"tokens_per_minute": 100, "max_concurrent": 1})
        exchange = exchange_of(tenant)
        assert await ask(quotas, exchange, 40, 10) is None
        assert await ask(quotas, exchange, 80, 10) is None, "another prompt of the same request"
        assert isinstance(await ask(quotas, exchange_of(tenant), 1, 1), QuotaExceeded)
        quotas.end(exchange)
        quotas.end(exchange)
        assert await ask(quotas, exchange_of(tenant), 1, 1) is None
        assert isinstance(await ask(quotas, exchange_of(tenant), 101, 1), BadRequest)
        assert await ask(quotas, exchange_of(Tenant("free")), 10**6, 1) is None
        assert await quotas.refusal(None) is None


@in_loop
async def test_a_running_request_meets_no_quota_that_its_tenant_has_got_since() -> None:
    async with sharing(1) as (quotas,):
        exchange = exchange_of(Tenant("team", quotas={"tokens_per_minute": 1}))
        exchange.prompts = [Prompt(50, 1, 5)]
        assert isinstance(await quotas.refusal(exchange), BadRequest)
        exchange.requests.add(RequestState("r", 50, 5, Resume.CONTINUE), "r")
        assert await quotas.refusal(exchange) is None


@in_loop
async def test_each_prompt_of_a_list_of_beam_searches_counts() -> None:
    tenant = Tenant("team", quotas={"tokens_per_minute": 100})
    async with sharing(1) as (quotas,):
        exchange = exchange_of(tenant)
        exchange.prompts = [Prompt(30, 2, 5, is_beam_search=True)] * 2
        for number in range(2):
            assert await quotas.refusal(exchange) is None
            exchange.add_engine_request(RequestState(f"r{number}", 30, 1, Resume.CONTINUE), f"cmpl-x-{number}-beam-0")
        quotas.end(exchange)
        refused = await ask(quotas, exchange_of(tenant), 50, 1)
        assert isinstance(refused, QuotaExceeded)
        assert (refused.used, refused.needed) == (60, 51)
