"""A fleet answers as one vLLM server does: same status, fields, text and events for the same request.

Every way in which they differ on purpose has a row in docs/differences.md; any other difference fails here.
"""

import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.e2e import cases_chat, cases_client, cases_completions, cases_invalid, cases_messages, cases_responses
from tests.e2e.answers import MASKED_DIFFERENCES, Case, Json, differences, is_error, mask
from tests.e2e.fleet import MODEL, Pair, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CASES = [*cases_completions.CASES, *cases_chat.CASES, *cases_responses.CASES, *cases_messages.CASES, *cases_invalid.CASES]
TABLE = Path(__file__).parents[2] / "docs" / "differences.md"
ABORT_LIMIT_S = 10.0  # an answer of 1000 tokens takes the engine longer than an abort even on a busy machine

Answers = dict[str, tuple[Json, Json]]


def documented() -> list[str]:
    return re.findall(r"^\| `([a-z-]+)` \|", TABLE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_fleet_answers_as_vllm(case: Case, answers: Answers, pair: Pair) -> None:
    bare, fleet = answers[case.name]
    failed = {name: tree["failed"] for name, tree in (("bare", bare), ("fleet", fleet)) if "failed" in tree}
    assert failed == {}
    assert is_error(bare) == ("invalid:" in case.name), "the case does not test what it says"
    found = differences(bare, fleet)
    unwanted = {at: both for at, both in found.items() if not any(_covers(part, at) for part in case.wanted)}
    assert unwanted == {}, "path: (bare, fleet)"
    for part in case.wanted:
        assert any(_covers(part, at) for at in found), f"{part} is the same by now: take {case.wanted[part]} away"


def _covers(part: str, path: str) -> bool:
    return path == part or path.startswith(part + ".")


def test_every_wanted_difference_is_in_the_table_and_every_row_has_a_case() -> None:
    used = {row for case in CASES for row in case.wanted.values()} | MASKED_DIFFERENCES
    assert Counter(documented()) == Counter(used)


def test_case_names_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []


@pytest.mark.parametrize("use", cases_client.CASES, ids=lambda use: use.__name__)
def test_the_openai_client_sees_no_difference(use: cases_client.Ask, pair: Pair) -> None:
    bare, fleet = (
        mask(use(OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)))
        for server in (pair.bare, pair.fleet)
    )
    assert differences({"answer": bare}, {"answer": fleet}) == {}


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_in_mid_stream_ends_its_requests_on_the_engines(pair: Pair, n: int) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": n}
    for _ in range(3):  # on a busy machine an answer may be over before the ingress has seen its client leave
        before = _metrics(pair)
        with httpx.stream("POST", f"{pair.fleet.url}/v1/completions", json=body, timeout=60) as response:
            assert any(line.startswith("data: ") for line in response.iter_lines())
        wait_until(lambda: _num_running(pair) == 0, limit_s=ABORT_LIMIT_S, what="no request runs on a replica")
        outcomes = _outcomes(_metrics(pair), since=before)
        assert sum(outcomes.values()) == n
        if outcomes == {"aborted": n}:
            return
    raise AssertionError(f"three times: {outcomes}")


def _num_running(pair: Pair) -> float:
    names = ("serve_app_replica_running", "serve_app_replica_waiting", "serve_app_replica_held")
    return sum(value for series, value in _metrics(pair).items() if series.startswith(names))


def _metrics(pair: Pair) -> dict[str, float]:
    lines = httpx.get(f"{pair.fleet.url}/metrics", timeout=10, verify=False).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("serve_app_"))
    return {series: float(value) for series, value in pairs}


def _outcomes(now: dict[str, float], *, since: dict[str, float]) -> dict[str, float]:
    """Return how many engine requests had which outcome in between."""
    found = {}
    for series, value in now.items():
        if series.startswith("serve_app_engine_requests_total") and value != since.get(series, 0.0):
            label = re.search(r'outcome="(\w+)"', series)
            assert label is not None
            found[label[1]] = value - since.get(series, 0.0)
    return found
