"""A replica dies under running requests: the answers are those of an undisturbed fleet. Real CPU engines in float32."""

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.fleet import MODEL, Pair, wait_until
from tests.e2e_fleet.operations import Fleet, taking
from tests.e2e_fleet.streams import PROMPT, Answer, Ask, chat, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

Member = dict[str, Any]

RESTART_LIMIT_S = 180.0
PROMPTS = [f"{n} {PROMPT}" for n in ("one", "two", "three", "four")]


@pytest.fixture(scope="module")
def fleet(pair: Pair) -> Fleet:
    """The pair's fleet: two real engines behind one ingress."""
    running = Fleet(pair.config["name"], dict(pair.config), pair.fleet)
    running.wait_until_ready()
    return running


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[Answer]:
    """The answers to `greedy_streams` of a fleet that loses nothing."""
    return play(fleet.url, greedy_streams())


def greedy_streams() -> list[Ask]:
    long = {"max_tokens": 600}
    return [completion(MODEL, prompt=p, **long) for p in PROMPTS] + [chat(MODEL, prompt=p, **long) for p in PROMPTS]


def kinds_of_requests(stop: str) -> list[Ask]:
    """Return one request for each way to resume a request: continued, replayed, and by its parts."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    return [
        completion(MODEL, n=2, temperature=0.9, seed=3),
        chat(MODEL, n=2, prompt=PROMPTS[1], temperature=0.9, seed=5, **usage),
        completion(MODEL, prompt=PROMPTS[1], logprobs=2),
        chat(MODEL, prompt=PROMPTS[2], logprobs=True, top_logprobs=2),
        completion(MODEL, prompt=PROMPTS[0], stop=[stop], **usage),
        completion(MODEL, prompt=PROMPTS[3], temperature=0.8, seed=7),
        completion(MODEL, prompt=PROMPTS[2], presence_penalty=0.5, frequency_penalty=0.3),
        chat(MODEL, repetition_penalty=1.1),
        completion(MODEL, structured_outputs={"regex": "[a-z ]{150}"}, ignore_eos=False),
        completion(MODEL, prompt=PROMPTS[3], stream=False),
        chat(MODEL, prompt=PROMPTS[3], stream=False, temperature=0.8, seed=11),
        completion(MODEL, stream=False, use_beam_search=True, n=2, max_tokens=40, ignore_eos=False),
    ]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def assert_same(disturbed: list[Answer], undisturbed: list[Answer]) -> None:
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert ours.is_complete(), ours.events[-3:]
        assert ours.folded() == theirs.folded()
        assert ours.logprobs() == pytest.approx(theirs.logprobs(), abs=1e-4)


def killed(fleet: Fleet, pid_of: Callable[[Member], int], asks: list[Ask]) -> list[Answer]:
    """Return the answers while a process of the busiest replica is killed in their midst, so that streams lose it."""
    for _ in range(3):  # on a busy machine the streams may be over before the kill
        members = {m["replica_id"]: m for m in fleet.members("replica")}
        resumed = fleet.resumptions()
        answers = play(fleet.url, asks, lambda members=members: kill(pid_of(members[busiest(fleet)])))  # type: ignore[misc]
        if fleet.resumptions() > resumed:
            return answers
        wait_for_heir(fleet, set(members))
    raise AssertionError("nothing ran on what was killed, three times")


def num_gaps(fleet: Fleet) -> float:
    """Return how often a greedy stream has gone on after its loss, by the series of the gap's length."""
    labels = (("model", MODEL), ("way", "continue"))
    return fleet.ingresses()[0].get(("serve_app_resume_gap_seconds_count", labels), 0.0)


def busiest(fleet: Fleet) -> str:
    """Return the id of the replica with the most tokens still to make."""
    series = fleet.ingresses()[0]
    tokens = {
        dict(labels)["replica"]: v for (name, labels), v in series.items() if name == "serve_app_replica_outstanding_tokens"
    }
    return max(tokens, key=tokens.__getitem__)


def test_streams_are_the_same_when_an_engine_core_is_killed(fleet: Fleet, undisturbed: list[Answer]) -> None:
    gaps = num_gaps(fleet)
    assert_same(killed(fleet, lambda m: int(m["load"]["engine_pid"]), greedy_streams()), undisturbed)
    assert num_gaps(fleet) > gaps
    fleet.wait_for_replicas(2, limit_s=RESTART_LIMIT_S)


@pytest.mark.slow
def test_every_kind_of_request_is_the_same_when_a_replica_process_is_killed(fleet: Fleet) -> None:
    text = play(fleet.url, [completion(MODEL, prompt=PROMPTS[0])])[0].text()
    stop = re.findall(r"[ -~]{6}", text)[-1]
    undisturbed = play(fleet.url, kinds_of_requests(stop))
    assert_same(killed(fleet, lambda m: int(m["pid"]), kinds_of_requests(stop)), undisturbed)
    fleet.wait_for_replicas(2, limit_s=RESTART_LIMIT_S)


@pytest.mark.slow
def test_without_the_lease_board_serving_goes_on_and_a_new_replica_is_found(fleet: Fleet, undisturbed: list[Answer]) -> None:
    board = fleet.process("ray::LeaseBoard").pid
    assert_same(play(fleet.url, greedy_streams(), lambda: kill(board)), undisturbed)

    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 950}
    bound = completion(MODEL, structured_outputs={"regex": "[a-z ]{900}"}, ignore_eos=False, **sampled)
    asks = [bound, bound, *[completion(MODEL, vllm_xargs={"unknown": 1}, **sampled)] * 2]
    for _ in range(3):  # on a busy machine the streams may be over before the kill
        engines = {m["replica_id"]: m["load"]["engine_pid"] for m in members_on_the_new_board(fleet)}
        answers = play(fleet.url, asks, lambda engines=engines: kill(engines[busiest(fleet)]))  # type: ignore[misc]
        assert all(re.fullmatch("[a-z ]{900}", a.text()) for a in answers[:2])
        assert all(a.is_complete() or a.errors() for a in answers), "a silent end"
        wait_for_heir(fleet, set(engines))
        if any(a.errors() for a in answers[2:]):
            return
    raise AssertionError("no stream that cannot go on was on the killed engine, three times")


def wait_for_heir(fleet: Fleet, before: set[str]) -> None:
    """Wait until one of the two replicas from ``before`` has gone and a new one is there instead."""
    wait_until(
        lambda: len(now := taking(fleet.ingresses()[0])) == 2 and len(now - before) == 1,
        limit_s=RESTART_LIMIT_S,
        what=f"a new replica beside one of {before}",
    )


def members_on_the_new_board(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the replicas once both have registered with the board that Ray started again."""
    found: list[dict[str, Any]] = []

    def both() -> bool:
        found[:] = fleet.members("replica")
        return len(found) == 2

    wait_until(both, limit_s=RESTART_LIMIT_S, what="two replicas on the lease board")
    return found
