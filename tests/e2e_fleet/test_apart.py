"""Answers make way for long prompts, and their clients notice nothing: simulated accelerators and a simulated link, in real processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.books.words import CAUSES
from serve_app.simulated.profiles import PROFILES
from tests.chaos.records import ledger_lines
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import Answer, Ask, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHATS = [completion(MODEL, prompt=[number + 3] * 300, max_tokens=200) for number in range(16)]


def long_prompts(first: int) -> list[Ask]:
    """Their prefill takes half a second each on this accelerator, as long as 16 steps of answers, unless their KV is cached.

    So each test needs a ``first`` token of its own.
    """
    return [completion(MODEL, prompt=[number + first] * 1600, max_tokens=20) for number in range(8)]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


def moving_kv(configure: Configure, port: int, **model: Any) -> dict[str, Any]:
    """Return the configuration of two simulated replicas that read each other's KV."""
    config = configure(
        port,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "no_replica_s": 30.0},
        simulated={"profile": "a10g-llama-8b"},
        engine_args={"max_num_batched_tokens": 512},
    )
    config["models"][MODEL] |= {"kv": {"transfer": "nixl", "port": 16300}, **model}
    return config


@pytest.fixture(scope="module")
def moving(configure: Configure, ledger: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = moving_kv(configure, 8056, routing={"apart": True})
    config["ingress"]["ledger"] = {"dir": str(ledger)}
    with fleet(config, tmp_path_factory.mktemp("moving")) as running:
        yield running


def moves(fleet: Fleet, name: str, label: str) -> dict[str, float]:
    series = fleet.ingresses()[0]
    return {dict(labels)[label]: value for (found, labels), value in series.items() if found == name}


def folded(answers: list[Answer]) -> list[dict[str, Any]]:
    assert all(answer.is_complete() for answer in answers)
    return [answer.folded() for answer in answers]


def test_answers_that_make_way_for_long_prompts_are_the_same_and_explain_says_why_they_moved(moving: Fleet, ledger: Path) -> None:
    undisturbed = folded(play(moving.url, CHATS))
    assert moves(moving, "serve_app_hand_overs_asked_total", "cause").get("prompts", 0) == 0
    long: list[Answer] = []
    prompts = long_prompts(3)

    def ask_long() -> None:
        long.extend(play(moving.url, prompts))

    assert folded(play(moving.url, CHATS, ask_long)) == undisturbed
    assert len(folded(long)) == len(prompts)
    assert moves(moving, "serve_app_hand_overs_asked_total", "cause")["prompts"] > 0
    assert moves(moving, "serve_app_hand_overs_total", "result").get("read", 0) > 0
    series = moving.ingresses()[0]
    num_tokens, num_bytes = (series[f"serve_app_kv_read_{unit}_total", (("model", MODEL),)] for unit in ("tokens", "bytes"))
    assert num_bytes == num_tokens * PROFILES["a10g-llama-8b"].model.kv_bytes_per_token > 0

    moved = next(line for line in ledger_lines(ledger) if any(move.result == "read" for move in line.moves))
    told = moving.command("explain", moved.id, str(ledger))
    assert told.returncode == 0, told.stderr
    for words in (f"attempt 2 at {moved.replicas[1]}", CAUSES[moved.moves[0].cause], "tokens was read", "ended: length"):
        assert words in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_is_lost_while_answers_move_costs_no_token(moving: Fleet, sent: signal.Signals) -> None:
    undisturbed = folded(play(moving.url, CHATS))
    long: list[Answer] = []
    prompts = long_prompts(40 if sent == signal.SIGKILL else 60)

    def lose_an_engine() -> None:
        long.extend(play(moving.url, prompts, lambda: os.kill(moving.members("replica")[0]["load"]["engine_pid"], sent)))

    before = moves(moving, "serve_app_hand_overs_asked_total", "cause").get("prompts", 0)
    assert folded(play(moving.url, CHATS, lose_an_engine)) == undisturbed
    assert len(folded(long)) == len(prompts)
    assert moves(moving, "serve_app_hand_overs_asked_total", "cause").get("prompts", 0) > before
    moving.wait_for_replicas(2)
