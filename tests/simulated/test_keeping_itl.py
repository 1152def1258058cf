"""Our scheduler keeps an ITL target in a real vLLM engine: it limits the prompts of a step, and lets short ones go first."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.fair_tags import tag_of
from serve_app.core.prompt_room import PATIENCE, PromptRoom
from serve_app.core.step_costs import MeasuredCosts
from tests.simulated.engine_traffic import Traffic

pytestmark = pytest.mark.engine

ERRORS = dict.fromkeys(("step_error_s", "output_token_error_s", "prompt_token_error_s"), 1e-6)
COSTS = MeasuredCosts(step_s=0.01, output_token_s=1e-4, prompt_token_s=1e-4, **ERRORS)
ITL_S = 0.01 + 1e-4 + 100.5 * 1e-4
"""Beside one answer, a step has room for a hundred tokens of prompts."""
SHORT_S, LONG_S = 60 * 1e-4, 400 * 1e-4
"""Work of the prompts of these tests."""


def tag(seconds: float) -> int:
    return tag_of("interactive", seconds, is_ahead=False)


@pytest.fixture
def make(make_traffic: Callable[..., Traffic], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Traffic]:
    """Return a function that makes an engine which knows its costs, and learns nothing from steps that take no time."""
    monkeypatch.setattr(PromptRoom, "learn", lambda *_, **__: None)

    def make(**arguments: Any) -> Traffic:
        traffic = make_traffic(itl_s=ITL_S, **arguments)
        traffic.scheduler.start_from(COSTS)
        return traffic

    return make


@pytest.fixture
def traffic(make: Callable[..., Traffic]) -> Traffic:
    """Return an engine in which one answer runs."""
    traffic = make()
    traffic.add("chat", prompt=10, answer=60, priority=tag(0.0))
    traffic.step()
    return traffic


def test_beside_an_answer_a_long_prompt_has_what_the_target_leaves_and_alone_whole_steps(
    traffic: Traffic, make: Callable[..., Traffic]
) -> None:
    traffic.add("long", prompt=400, answer=2, priority=tag(1.0))
    traffic.step(4)
    assert traffic.steps[1:] == [{"chat": 1, "long": 100}] * 4
    alone = make()
    alone.add("long", prompt=400, answer=2, priority=tag(1.0))
    alone.step()
    assert alone.steps == [{"long": 400}]


def test_short_prompts_go_before_a_begun_long_one_which_pauses_where_no_room_is_left(traffic: Traffic) -> None:
    traffic.add("long", prompt=400, answer=2, priority=tag(1.0))
    traffic.step()
    traffic.add("short0", prompt=40, answer=2, priority=tag(1.0 + SHORT_S))
    traffic.step()
    for number in range(1, 4):
        traffic.add(f"short{number}", prompt=40, answer=2, priority=tag(1.0 + (1 + number) * SHORT_S), first=30 * number)
    traffic.step(2)
    assert traffic.steps[1:] == [
        {"chat": 1, "long": 100},
        {"chat": 1, "short0": 40, "long": 60},
        {"chat": 1, "short0": 1, "short1": 40, "short2": 40, "short3": 19},
        {"chat": 1, "short1": 1, "short2": 1, "short3": 21, "long": 77},
    ]


def test_a_prompt_waits_for_shorter_ones_of_a_multiple_of_its_work_and_no_longer(traffic: Traffic) -> None:
    traffic.add("long", prompt=400, answer=2, priority=tag(1.0 + LONG_S))
    before, number = len(traffic.steps), 0
    while not any("long" in step for step in traffic.steps):
        for _ in range(2):  # more than a step can hold
            number += 1
            traffic.add(f"short{number}", prompt=60, answer=1, priority=tag(1.0 + LONG_S + number * SHORT_S), first=7 * number)
        traffic.step()
        assert len(traffic.steps) < 60
    in_front = sum(step.get(f"short{each}", 0) for step in traffic.steps[before:] for each in range(1, number + 1))
    assert 0.8 * PATIENCE * 400 < in_front <= (PATIENCE + 1) * 400


def test_a_longest_chunk_of_the_engines_own_arguments_holds_too(make: Callable[..., Traffic]) -> None:
    traffic = make(long_prefill_token_threshold=64)
    traffic.add("chat", prompt=10, answer=60, priority=tag(0.0))
    traffic.step()
    for name in ("long", "later"):
        traffic.add(name, prompt=300, answer=2, priority=tag(1.0), first=40 * len(name))
    traffic.step()
    assert traffic.steps[1] == {"chat": 1, "long": 64, "later": 36}


def test_a_prompt_whose_beginning_is_cached_is_as_short_as_its_rest(make: Callable[..., Traffic]) -> None:
    traffic = make(enable_prefix_caching=True)
    traffic.add("chat", prompt=10, answer=60, first=500, priority=tag(0.0))
    traffic.add("before", prompt=400, answer=1, priority=tag(0.0))
    traffic.step(2)
    traffic.add("long", prompt=400, answer=2, first=300, priority=tag(1.0))
    traffic.step()
    traffic.add("again", prompt=400, answer=2, priority=tag(1.0 + LONG_S))
    traffic.step()
    assert traffic.steps[-1] == {"chat": 1, "again": 16, "long": 84}


def test_a_queued_prompt_that_lacks_kv_stops_no_begun_one(make: Callable[..., Traffic]) -> None:
    traffic = make(num_gpu_blocks_override=36)
    traffic.add("chat", prompt=10, answer=60, priority=tag(0.0))
    traffic.step()
    traffic.add("long", prompt=400, answer=2, priority=tag(1.0))
    traffic.step()
    traffic.add("first", prompt=440, answer=2, first=300, priority=tag(0.5))  # 28 blocks; 27 are free
    traffic.step(4)
    assert traffic.steps[1:] == [{"chat": 1, "long": 100}, {"chat": 1}, *[{"chat": 1, "long": 100}] * 3]
    traffic.finish()
    assert {name: len(answer) for name, answer in traffic.answers.items()} == {"chat": 60, "long": 2, "first": 2}


def test_a_prompt_that_lacked_kv_begins_once_an_answer_has_ended_though_another_began(make: Callable[..., Traffic]) -> None:
    traffic = make(num_gpu_blocks_override=36)
    traffic.add("chat", prompt=10, answer=60, priority=tag(0.0))
    traffic.add("ends", prompt=60, answer=3, first=700, priority=tag(0.0))
    traffic.step()
    traffic.add("long", prompt=400, answer=2, priority=tag(1.0))
    traffic.step()
    traffic.add("tiny", prompt=5, answer=9, first=100, priority=tag(0.0))
    traffic.add("first", prompt=400, answer=2, first=300, priority=tag(0.5))  # 25 blocks; 22 are free, and 26 without `ends`
    traffic.step(2)
    assert traffic.steps[2:] == [{"chat": 1, "ends": 1, "tiny": 5}, {"chat": 1, "tiny": 1, "first": 99}]


@pytest.mark.parametrize("is_async", [False, True])
def test_each_answer_is_what_vllms_own_scheduler_gives(
    make: Callable[..., Traffic], make_traffic: Callable[..., Traffic], *, is_async: bool
) -> None:
    found = []
    for maker in (make, make_traffic):
        traffic = maker(is_async=is_async, is_bounded=maker is make, enable_prefix_caching=True)
        for number in range(24):
            long = number % 4 == 0
            traffic.add(
                f"{'line' if number % 5 == 4 else 'chat'}{number}",
                prompt=300 + number if long else 10 + 3 * number,
                answer=3 + number % 7,
                first=20 + 11 * number,
                priority=tag(0.01 * number),
                regex="[ab]{3,}" if number % 6 == 1 else "",
            )
            traffic.step()
        traffic.finish()
        found.append((traffic.answers, traffic.steps))
    (kept, steps), (other, others) = found
    assert kept == other
    assert all(kept.values())
    assert steps != others
