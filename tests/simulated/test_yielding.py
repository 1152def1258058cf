"""Our scheduler runs in a real vLLM engine: it bounds the batches' part of a step beside chats, and changes no answer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.batch_lines import Lengths, lines, sizes
from benchmarks.batch_steps import Engine, Sequence, Way, chats
from serve_app.core.step_budget import FIRST
from serve_app.engine_args import BATCH_STEP_SHARE
from serve_app.simulated.profiles import PROFILES
from tests.simulated.engine_traffic import SHARE, Traffic

pytestmark = pytest.mark.engine


def of_lines(step: dict[str, int]) -> int:
    return sum(count for name, count in step.items() if name.startswith("line"))


def test_a_long_prompt_leaves_room_in_its_steps_for_one_that_goes_before_it(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(max_num_batched_tokens=128)
    traffic.add("long", prompt=480, answer=3, priority=-10)
    traffic.step()
    traffic.add("short", prompt=20, answer=5, priority=-20)
    traffic.add("later", prompt=20, answer=5, priority=-5)
    traffic.step()
    assert traffic.steps == [{"long": 128}, {"long": 108, "short": 20}]
    traffic.add("large", prompt=200, answer=5, priority=-20)
    traffic.step(2)
    assert traffic.steps[2:] == [{"short": 1, "long": 64, "large": 63}, {"short": 1, "large": 127}]
    traffic.finish()
    assert {name: len(answer) for name, answer in traffic.answers.items()} == {"long": 3, "short": 5, "later": 5, "large": 5}


def test_a_prompt_that_finds_no_place_shortens_no_other(make_traffic: Callable[..., Traffic]) -> None:
    traffic = make_traffic(max_num_seqs=2, max_num_batched_tokens=128)
    traffic.add("chat", prompt=10, answer=9, priority=-30)
    traffic.add("long", prompt=480, answer=3, priority=-10)
    traffic.step()
    traffic.add("short", prompt=20, answer=5, priority=-20)
    traffic.step()
    assert traffic.steps == [{"chat": 10, "long": 118}, {"chat": 1, "long": 127}]


def test_lines_alone_fill_their_steps(traffic: Traffic) -> None:
    for number in range(4):
        traffic.add(f"line{number}", prompt=200, answer=3)
    traffic.step()
    assert traffic.steps == [{"line0": 200, "line1": 200, "line2": 112}]


def test_beside_a_chat_the_first_step_measures_and_the_others_have_the_allowance(traffic: Traffic) -> None:
    traffic.add("chat", prompt=10, answer=12)
    traffic.step()
    for number in range(6):
        traffic.add(f"line{number}", prompt=200, answer=3)
    traffic.step(2)
    assert traffic.steps == [{"chat": 10}, {"chat": 1}, {"chat": 1, "line0": int(FIRST)}]


def test_a_chat_that_comes_has_its_whole_prompt_in_the_next_step_though_a_lines_prompt_is_begun(traffic: Traffic) -> None:
    for number in range(4):
        traffic.add(f"line{number}", prompt=300, answer=3)
    traffic.step(2)

    traffic.add("chat", prompt=180, answer=3)
    traffic.step()
    assert traffic.steps[-1]["chat"] == 180
    assert of_lines(traffic.steps[-1]) == 0, "the chat's prompt is longer than the allowance"


def test_chats_that_one_step_cannot_hold_are_before_lines_in_the_next_step_too(traffic: Traffic) -> None:
    for number in range(4):
        traffic.add(f"line{number}", prompt=300, answer=3)
    traffic.step(2)
    for number in range(3):
        traffic.add(f"chat{number}", prompt=300, answer=3)
    traffic.step(2)
    assert traffic.steps[-2:] == [{"chat0": 300, "chat1": 212}, {"chat0": 1, "chat1": 88, "chat2": 300}]


def test_beside_a_short_prompt_of_a_chat_lines_answers_continue_and_their_prompts_wait(traffic: Traffic) -> None:
    traffic.add("line0", prompt=20, answer=20)
    traffic.add("line1", prompt=500, answer=3)
    traffic.step()
    traffic.add("chat", prompt=30, answer=3)
    traffic.step()
    assert traffic.steps[-1] == {"line0": 1, "chat": 30}


@pytest.mark.parametrize(("max_num_seqs", "num_lines"), [(1, 1), (2, 3)])
def test_a_chat_that_finds_no_place_stops_no_line_whose_end_would_give_it_one(
    make_traffic: Callable[..., Traffic], max_num_seqs: int, num_lines: int
) -> None:
    traffic = make_traffic(max_num_seqs=max_num_seqs, max_num_batched_tokens=128)
    for number in range(num_lines):
        traffic.add(f"line{number}", prompt=300, answer=3)
    traffic.step()
    traffic.add("chat", prompt=50, answer=3)
    traffic.step(60)
    assert {name: len(answer) for name, answer in traffic.answers.items()} == dict.fromkeys(traffic.answers, 3)


@pytest.mark.parametrize("is_async", [False, True])
def test_each_answer_is_what_vllms_own_scheduler_gives(make_traffic: Callable[..., Traffic], *, is_async: bool) -> None:
    found = []
    for is_bounded in (True, False):
        traffic = make_traffic(is_async=is_async, is_bounded=is_bounded)
        for number in range(30):
            traffic.add(f"line{number}", prompt=10 + 12 * number, answer=1 + number, first=20 + number)
            if number % 3 == 0:
                traffic.add(f"chat{number}", prompt=5 + 9 * number, answer=30, first=60 + number)
            traffic.step()
        traffic.finish()
        found.append((traffic.answers, traffic.steps))
    (bounded, steps), (unbounded, others) = found
    assert {name: len(answer) for name, answer in bounded.items()} == {
        name: 30 if name.startswith("chat") else 1 + int(name.removeprefix("line")) for name in bounded
    }
    assert bounded == unbounded
    assert max(map(of_lines, steps)) < max(map(of_lines, others))


@pytest.mark.parametrize("share", [None, SHARE])
def test_vllm_makes_the_steps_that_the_benchmark_computes(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *, share: float | None
) -> None:
    """The same chats and lines run in the accelerator's own time: each step has as many tokens as in `benchmarks.batch_steps`."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from serve_app.replica import scheduler
    from serve_app.simulated.executor import SimulatedExecutor

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class ClockedExecutor(SimulatedExecutor):
        def _step(self, batch: Any) -> tuple[Any, float]:
            output, step_s = super()._step(batch)
            clock.now += step_s
            return output, step_s

    config = make_config(
        {BATCH_STEP_SHARE: share}, scheduling_policy="priority", max_model_len=2048, max_num_seqs=256, max_num_batched_tokens=2048
    )
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config.scheduler_cls = Scheduler if share is None else scheduler.YieldingScheduler
    traffic = Traffic(EngineCore(config, ClockedExecutor, log_stats=False))
    computed = Engine(PROFILES["h100-llama-8b"], Way(name="", share=share))
    coming = [(0.007 * number, False, *sizes(line)) for number, line in enumerate(lines(280, Lengths()))]
    coming += [(chat.came_at, True, chat.prompt_left, chat.answer_left) for chat in chats(12.0, 2.0)]
    expected = []
    for number, (due, is_chat, prompt, answer) in enumerate(sorted(coming)):
        while computed.now < due:
            before = computed.tokens
            computed.step()
            expected.append(computed.tokens - before)
            traffic.step()
        computed.add(Sequence(is_chat, float(number), prompt, answer))
        traffic.add(f"{'chat' if is_chat else 'line'}{number}", prompt=prompt, answer=answer, arrived_at=float(number))
    assert len(expected) > 100
    assert [sum(step.values()) for step in traffic.steps] == expected
    assert clock.now == pytest.approx(computed.now)


def test_vllms_schedulers_have_their_stand_ins_and_another_one_stays() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from serve_app.replica.scheduler import YieldingAsyncScheduler, YieldingScheduler, bounded

    assert [bounded(each) for each in (Scheduler, AsyncScheduler, dict)] == [YieldingScheduler, YieldingAsyncScheduler, dict]
