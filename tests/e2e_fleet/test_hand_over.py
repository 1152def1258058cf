"""Streams of a replica that stops go on at another with their KV: real engines, NIXL over TCP."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, taking
from tests.e2e_fleet.streams import Answer, Ask, completion, play

pytest.importorskip("nixl", reason="the extra kv is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3000)]

PROMPT_WORDS, NUM_TOKENS, NUM_STREAMS = 200, 1400, 4
MIXED_TOKENS = 700
"""Fewer, because 40 streams make each step longer."""
BUDGET_S = 4.0
NUM_STOPS = 5
MIXED: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 2},
    "a seed": {"temperature": 1.0, "seed": 7},
    "two choices": {"n": 2, "temperature": 1.0, "seed": 8},
    "a grammar": {"structured_outputs": {"regex": "[a-z]{700}"}, "ignore_eos": False},
    "a penalty": {"repetition_penalty": 1.2},
    "a penalty that replays": {"presence_penalty": 0.5},
    "usage": {"stream_options": {"include_usage": True}},
}
"""What a stream asks for beside its prompt: requests that continue, with and without a history, and requests that are replayed."""


@pytest.fixture(scope="module")
def reading(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        8058, replicas={"min": 2, "max": 2}, timeouts={"drain_s": BUDGET_S, "no_replica_s": 60.0, "stream_silence_s": 60.0}
    )
    config["models"][MODEL]["kv"] = {"transfer": "nixl", "port": 15900}
    with fleet(config, tmp_path_factory.mktemp("reading")) as running:
        yield running


def terminate_one(fleet: Fleet) -> None:
    victim = fleet.members("replica")[0]
    os.kill(victim["pid"], signal.SIGTERM)
    wait_until(
        lambda: victim["replica_id"] not in taking(fleet.ingresses()[0]), limit_s=60.0, what="a replica that takes no more"
    )


def results(fleet: Fleet) -> Counter[str]:
    """Return the hand-overs by result."""
    series = fleet.ingresses()[0]
    return Counter(
        {dict(labels)["result"]: int(n) for (name, labels), n in series.items() if name == "serve_app_hand_overs_total"}
    )


def test_streams_of_a_replica_that_stops_are_the_same_and_take_their_kv_along(reading: Fleet) -> None:
    asks = [completion(MODEL, prompt=f"{number} a" * PROMPT_WORDS, max_tokens=NUM_TOKENS) for number in range(NUM_STREAMS)]
    undisturbed = play(reading.url, asks)
    answers = play(reading.url, asks, lambda: terminate_one(reading))
    assert [a.folded() for a in answers] == [a.folded() for a in undisturbed]
    assert results(reading)["read"] > 0, results(reading)
    series = reading.ingresses()[0]
    assert series["serve_app_kv_read_tokens_total", (("model", MODEL),)] >= PROMPT_WORDS
    assert series["serve_app_kv_read_bytes_total", (("model", MODEL),)] > PROMPT_WORDS


def with_stop(ask: Ask, undisturbed: Answer) -> Ask:
    """Return the request with a stop string that ends its answer in the last quarter."""
    text = undisturbed.text()
    stop = text[len(text) * 3 // 4 :][:40]
    assert text.index(stop) >= len(text) // 2, "it comes too early to be met after a move"
    return Ask(ask.path, {**ask.body, "stop": [stop]})


def test_streams_of_every_kind_are_the_same_after_each_of_five_replicas_has_stopped(reading: Fleet) -> None:
    """Prompts of many lengths, so that moves come at many places of a block; about half of the 40 streams move, five times."""
    reading.wait_for_replicas(2)
    plain = [completion(MODEL, prompt=[30 + n] * (100 + 7 * n), max_tokens=MIXED_TOKENS) for n in range(26)]
    mixed = [
        completion(MODEL, prompt=[60 + 9 * n + k] * (110 + 31 * n), max_tokens=MIXED_TOKENS, **asked)
        for n in range(2)
        for k, asked in enumerate(MIXED.values())
    ]
    varied = [
        Ask(ask.path, {**ask.body, "repetition_penalty": 1.3}) for ask in plain[:4]
    ]  # without it, the text soon repeats itself
    stopped = [with_stop(ask, answer) for ask, answer in zip(varied, play(reading.url, varied), strict=True)]
    asks = [*plain[4:], *stopped, *mixed]
    undisturbed = play(reading.url, asks)
    assert all(answer.is_complete() for answer in undisturbed)
    for stop in range(NUM_STOPS):
        reading.wait_for_replicas(2)
        before = results(reading)
        answers = play(reading.url, asks, lambda: terminate_one(reading), after_events=5 + 40 * stop)
        for ask, answer, expected in zip(asks, answers, undisturbed, strict=True):
            assert answer.folded() == expected.folded(), ask.body
            assert answer.logprobs() == pytest.approx(expected.logprobs(), abs=1e-3)
        moved = results(reading) - before
        assert moved["read"] > 0, f"stop {stop} moved no KV: {moved}"
