"""In a full engine, requests give their places to others: our scheduler in a real vLLM engine."""

from collections.abc import Callable
from concurrent.futures import wait
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.fair_tags import tag_of
from tests.simulated.engine_traffic import Traffic

pytestmark = pytest.mark.engine

AHEAD, LEVEL = (tag_of("interactive", 1.0, is_ahead=ahead) for ahead in (True, False))
"""Tags of a tenant that is ahead of its share and of one that is not."""
BLOCK = 16
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 256}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tenant_ahead_of_its_share_gives_its_place_and_computes_less_than_a_block_again(
    make_traffic: Callable[..., Traffic], *, is_async: bool
) -> None:
    traffic = make_traffic(is_async=is_async, max_num_seqs=2, enable_prefix_caching=True)
    for number in range(2):
        traffic.add(f"ahead{number}", prompt=40 + number, answer=20, first=20 + 300 * number, priority=AHEAD)
    traffic.step(6)
    traffic.add("later", prompt=30, answer=3, first=800, priority=AHEAD + 4)
    traffic.add("level", prompt=30, answer=3, first=620, priority=LEVEL + 2)
    before = len(traffic.steps)
    traffic.step()
    (begun,) = traffic.steps[before:]
    assert begun["level"] == 30, "though `later` was there first, and an earlier one of its tenant runs"
    (stays,) = begun.keys() - {"level"}
    traffic.finish()
    gave = "ahead1" if stays == "ahead0" else "ahead0"
    again = next(step[gave] for step in traffic.steps[before:] if gave in step)
    assert 1 <= again <= BLOCK + 1
    assert {name: len(answer) for name, answer in traffic.answers.items()} == {"ahead0": 20, "ahead1": 20, "later": 3, "level": 3}


def test_a_request_gives_way_again_only_when_it_has_made_some_tokens(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(max_num_seqs=1, enable_prefix_caching=True)
    traffic.add("ahead", prompt=20, answer=60, priority=AHEAD)
    traffic.step()
    for number in range(20):
        traffic.add(f"level{number}", prompt=20, answer=2, first=40 * number, priority=LEVEL + 2 * number)
        traffic.step(3)
    traffic.finish()
    steps = [next(iter(step)) for step in traffic.steps if step]
    runs = [len(list(run)) for name, run in groupby(steps, key=lambda name: name == "ahead") if name]
    assert sum(runs) >= 60
    assert all(run >= 16 for run in runs[1:-1])
    assert len(runs) >= 4
    assert {name: len(answer) for name, answer in traffic.answers.items()} == {"ahead": 60} | {f"level{n}": 2 for n in range(20)}


def test_a_request_of_a_tenant_that_was_ahead_begins_and_stays_though_others_come_for_ever(
    make_traffic: Callable[..., Traffic], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("serve_app.replica.scheduler.time", SimpleNamespace(monotonic=lambda: now))
    traffic = make_traffic(max_num_seqs=1, enable_prefix_caching=True)
    for number in range(60):
        now += 1.0
        traffic.add(f"level{number}", prompt=20, answer=1, first=40 + number, priority=LEVEL + 2 * number)
        if number == 1:
            traffic.add("ahead", prompt=20, answer=8, priority=AHEAD)
        traffic.step()
    begun = [number for number, step in enumerate(traffic.steps) if "ahead" in step]
    assert begun == list(range(begun[0], begun[0] + 8))
    assert 20 <= begun[0] <= 41
    traffic.finish()


def test_a_batch_request_gives_way_to_an_interactive_one_however_long_others_have_begun_before_it(
    make_traffic: Callable[..., Traffic], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("serve_app.replica.scheduler.time", SimpleNamespace(monotonic=lambda: now))
    traffic = make_traffic(max_num_seqs=1, enable_prefix_caching=True)
    batch = tag_of("batch", 1.0, is_ahead=False)
    traffic.add("ahead", prompt=20, answer=40, priority=batch + 1)
    traffic.step()
    traffic.scheduler._overtakers.note(batch + 200, now)
    now += 41.0
    traffic.add("chat", prompt=20, answer=1, first=500, priority=LEVEL)
    traffic.step()
    assert "chat" in traffic.steps[-1]
    traffic.finish()


@pytest.mark.parametrize("priority", [0, LEVEL, AHEAD])
def test_a_chat_takes_the_place_of_a_line(make_traffic: Callable[..., Traffic], priority: int) -> None:
    traffic = make_traffic(max_num_seqs=2, enable_prefix_caching=True)
    for number in range(3):
        traffic.add(f"line{number}", prompt=40, answer=20, first=20 + 300 * number)
    traffic.step(3)
    traffic.add("chat", prompt=30, answer=3, first=950, priority=priority)
    traffic.step()
    assert traffic.steps[-1]["chat"] == 30
    traffic.finish()
    assert {name: len(answer) for name, answer in traffic.answers.items()} == {"line0": 20, "line1": 20, "line2": 20, "chat": 3}


def test_where_what_is_computed_would_be_lost_none_gives_way(traffic: Traffic) -> None:
    for number in range(64):
        traffic.add(f"ahead{number}", prompt=5, answer=3, priority=AHEAD)
    traffic.step()
    traffic.add("level", prompt=5, answer=3, priority=LEVEL)
    traffic.step()
    assert "level" not in traffic.steps[-1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_gives_its_place_to_one_of_a_tenant_that_is_not_ahead(
    make_traffic: Callable[..., Traffic], *, is_async: bool
) -> None:
    found = []
    for is_bounded in (True, False):
        traffic = make_traffic(is_async=is_async, is_bounded=is_bounded, max_num_seqs=1, **CACHED)
        traffic.add("ahead", prompt=40, answer=20, priority=AHEAD)
        traffic.step(3)
        traffic.add("level", prompt=30, answer=4, priority=LEVEL + 100)
        traffic.finish()
        found.append((traffic.answers, next(step for step in traffic.steps if "level" in step) == traffic.steps[3]))
    (answers, is_next), (others, is_next_without) = found
    assert answers == others
    assert {name: len(answer) for name, answer in answers.items()} == {"ahead": 20, "level": 4}
    assert (is_next, is_next_without) == (True, False)


def test_a_request_gives_way_to_one_that_lacks_kv(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(num_gpu_blocks_override=33, max_model_len=400, **CACHED | {"max_num_batched_tokens": 512})
    for number in range(2):
        traffic.add(f"ahead{number}", prompt=200, answer=50, first=20 + number, priority=AHEAD)
    traffic.step()
    traffic.add("level", prompt=200, answer=3, first=30, priority=LEVEL)
    traffic.step(3)
    assert [step.get("level", 0) for step in traffic.steps] == [0, 0, 200, 1]


def test_a_request_of_a_later_priority_is_not_put_first(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(max_num_seqs=2, **CACHED)
    traffic.add("first", prompt=20, answer=30, priority=AHEAD)
    traffic.step()
    traffic.add("ahead", prompt=20, answer=3, first=30, priority=AHEAD)
    traffic.add("later", prompt=20, answer=3, first=40, priority=tag_of("batch", 1.0, is_ahead=False))
    traffic.add("chosen", prompt=20, answer=3, first=50)
    traffic.step()
    assert traffic.steps[-1] == {"first": 1, "ahead": 20}


def test_free_places_are_filled_however_many_come_that_go_first(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(**CACHED)
    traffic.add("first", prompt=20, answer=30, priority=AHEAD)
    traffic.step()
    traffic.add("ahead", prompt=20, answer=3, first=30, priority=AHEAD)
    for number in range(2):
        traffic.add(f"level{number}", prompt=20, answer=3, first=40 + number, priority=LEVEL)
        traffic.step()
    assert ["ahead" in step for step in traffic.steps] == [False, False, True]


def test_no_request_gives_way_while_none_may_begin(make_traffic: Callable[..., Traffic]) -> None:
    from vllm.v1.core.sched.interface import PauseState

    traffic = make_traffic(max_num_seqs=1, **CACHED)
    traffic.add("ahead", prompt=20, answer=3, priority=AHEAD)
    traffic.step()
    traffic.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    traffic.add("level", prompt=20, answer=3, first=30, priority=LEVEL)
    traffic.step(2)
    assert traffic.steps == [{"ahead": 20}, {"ahead": 1}, {"ahead": 1}]


def test_a_request_gives_way_to_one_whose_grammar_is_ready(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(max_num_seqs=1, **CACHED)
    traffic.add("ahead", prompt=20, answer=9, priority=AHEAD)
    traffic.step()
    traffic.add("level", prompt=20, answer=3, first=30, regex="[0-9]*", priority=LEVEL)
    wait([traffic.scheduler.requests["level"].structured_output_request._grammar], timeout=60)
    traffic.step()
    assert traffic.steps[-1] == {"level": 20}


def test_lines_with_adapters_that_pause_leave_no_room_for_another_adapter(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(enable_lora=True, max_loras=1, max_lora_rank=8, max_num_batched_tokens=64)
    traffic.add("line0", prompt=300, answer=3, adapter=1)
    traffic.step()
    traffic.add("chat", prompt=20, answer=3, adapter=2)
    traffic.finish()
    assert {name: len(answer) for name, answer in traffic.answers.items()} == {"line0": 3, "chat": 3}
