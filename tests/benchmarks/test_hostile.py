"""These tests check what the benchmark with hostile clients calls a failure."""

import asyncio
from dataclasses import asdict
from typing import Any

import httpx

from benchmarks.hostile import Phase, p99, problems
from benchmarks.hostile_attacks import paced, problem_of
from tests.hostile.described import Request

REQUEST = Request("a", "POST", "/v1/completions", "application/json", b"{}", follows=True)


def measured(**changes: Any) -> dict[str, Any]:
    plain = {
        "phases": [asdict(Phase("alone", whole_s=[1.0]))],
        "gone": [],
        "memory_mib": {"first": 500.0, "most": 550.0, "last": 540.0},
        "p99_s": {"whole_alone": 1.0, "whole_beside": 1.2},
    }
    return plain | changes


def test_a_run_within_its_limits_has_no_problems() -> None:
    assert problems(measured()) == []


def test_each_limit_that_is_exceeded_is_a_problem() -> None:
    wrong = measured(
        phases=[asdict(Phase("inputs", lost=["status 503"], failed=["a: 500"]))],
        gone=["ingress 1"],
        memory_mib={"first": 500.0, "most": 551.0, "last": 500.0},
        p99_s={"whole_alone": 1.0, "whole_beside": 1.3},
    )
    assert problems(wrong) == [
        "a: 500",
        "ordinary request in 'inputs': status 503",
        "ingress 1 has ended",
        "the ingress grew by 51 MiB, limit 50",
        "the p99 of ordinary answers became 1.30 times as long, limit 1.2",
    ]


def test_a_run_without_ordinary_answers_is_a_problem() -> None:
    assert len(problems(measured(p99_s={"whole_alone": p99([]), "whole_beside": p99([])}))) == 1


def test_the_p99_of_a_hundred_times_is_the_second_largest() -> None:
    assert p99([float(number) for number in range(1, 101)]) == 99.0


def test_a_5xx_is_a_problem_unless_it_is_a_documented_503() -> None:
    def problem(status: int, kind: str) -> bool:
        return bool(problem_of(REQUEST, httpx.Response(status, json={"error": {"type": kind}})))

    assert [problem(400, "BadRequestError"), problem(503, "queue_full"), problem(503, "overloaded_error")] == [False] * 3
    assert [problem(500, "a"), problem(503, "a"), problem(502, "replica_lost"), problem(200, "InternalServerError")] == [True] * 4


def test_calls_begin_at_their_rate_and_no_more_than_allowed_at_once() -> None:
    running, most = 0, 0

    async def call() -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1

    asyncio.run(paced([call] * 20, rate=1e6, at_once=3))
    assert (running, most) == (0, 3)
