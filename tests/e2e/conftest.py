"""These fixtures start the pair of servers once for all tests but embeddings, and get the answers of both to each selected case.

The folder's ports are 8030 to 8033, below the ephemeral range, from which Ray and links take theirs.
"""

import asyncio
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest

from serve_app.checkpoints import make_tiny_llama
from tests.e2e.answers import Case, Json, ask
from tests.e2e.fleet import TOOL_PARSER, Pair, started_pair

PORT = 8030
NUM_AT_ONCE = 12  # requests per server; more only queue up in two engines on two cores
ANSWER_LIMIT_S = 60.0
MAX_TRIES_OF_BARE = 3  # on a busy machine bare vLLM may reset a connection whose request it has not read; the fleet must never


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Eight layers, not two: an answer must not be over before a test has seen its first tokens."""
    root = tmp_path_factory.mktemp("pair")
    model = make_tiny_llama(root / "tiny", num_layers=8)
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER]
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": TOOL_PARSER}
    with started_pair(model, root, port=PORT, num_replicas=2, flags=flags, frontend_args=tools) as pair:
        yield pair


@pytest.fixture(scope="package")
def answers(request: pytest.FixtureRequest, pair: Pair) -> dict[str, tuple[Json, Json]]:
    """Return case name -> (bare, fleet) for the cases of the tests that were selected, all asked at once."""
    items: list[Any] = request.session.items
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = [p["case"] for p in params if isinstance(p.get("case"), Case)]
    return asyncio.run(ask_both(pair, cases))


async def ask_both(pair: Pair, cases: list[Case]) -> dict[str, tuple[Json, Json]]:
    """Ask both servers at the same time; cases that must be alone come afterwards, one by one."""
    bare, fleet = await asyncio.gather(
        _ask_all(pair.bare.url, cases, max_tries=MAX_TRIES_OF_BARE), _ask_all(pair.fleet.url, cases, max_tries=1)
    )
    return {case.name: (bare[case.name], fleet[case.name]) for case in cases}


async def _ask_all(url: str, cases: list[Case], *, max_tries: int) -> dict[str, Json]:
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    async with _client(url) as client:

        async def one(case: Case) -> Json:
            async with gate:
                try:
                    return await _ask(client, url, case, max_tries)
                except (httpx.HTTPError, AssertionError) as exc:  # shown by the case's own test
                    return {"failed": f"{type(exc).__name__}: {exc}"}

        together = [case for case in cases if not case.alone]
        trees = await asyncio.gather(*(one(case) for case in together))
        found = {case.name: tree for case, tree in zip(together, trees, strict=True)}
        for case in cases:
            if case.alone:
                found[case.name] = await one(case)
        return found


async def _ask(client: httpx.AsyncClient, url: str, case: Case, max_tries: int) -> Json:
    """Return the answer's tree. After a lost connection the request is sent again on a new one, until it was sent ``max_tries`` times."""
    try:
        return await ask(client, case)
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        if max_tries == 1:
            raise
    async with _client(url) as new:
        return await _ask(new, url, case, max_tries - 1)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the servers' logs with each failure."""
    report = yield
    pair = getattr(item, "funcargs", {}).get("pair")
    if report.failed and isinstance(pair, Pair):
        report.sections += [(f"log of {server.name}", server.tail(20)) for server in (pair.bare, pair.fleet)]
    return report
