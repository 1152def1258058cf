"""These tests check classes that begin and end: which is drawn when, what does not change, and what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from loadtest.errors import UsageError
from loadtest.plan.overrides import scenario_of
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.schedule import Schedule, make_schedule
from loadtest.records import ScheduledRequest
from tests.loadtest.plan.test_traces import AZURE, replayed, written

SHORT: dict[str, Any] = {"name": "short", "until_s": 120, "input_tokens": {"dist": "uniform", "min": 1, "max": 9}}
LONG: dict[str, Any] = {"name": "long", "from_s": 120, "input_tokens": {"dist": "uniform", "min": 10, "max": 99}}
OTHER: dict[str, Any] = {"name": "other", "weight": 3}


def scenario(*classes: dict[str, Any], **values: Any) -> Scenario:
    arrival = {"law": "constant", "rate": 1}
    return parse_scenario({"name": "x", "arrival": arrival, "requests": list(classes), "duration_s": 300, **values})


def asked(made: Schedule) -> list[tuple[Any, ...]]:
    return [(r.id, r.due_s, r.cls, r.input_tokens, r.output_tokens) for r in made.requests]


def test_a_class_begins_with_its_from_s_and_ends_before_its_until_s() -> None:
    made = make_schedule(scenario(LONG, SHORT))
    assert [r.cls for r in made.requests] == ["short"] * 120 + ["long"] * 180
    assert all((r.input_tokens < 10) == (r.cls == "short") for r in made.requests)


def test_weights_count_among_the_classes_of_the_moment() -> None:
    made = make_schedule(scenario(SHORT, OTHER, LONG, arrival={"law": "poisson", "rate": 20}))
    for begin_s, end_s, name in ((0, 120, "short"), (120, 300, "long")):
        counted = Counter(r.cls for r in made.requests if r.due_s is not None and begin_s <= r.due_s < end_s)
        assert set(counted) == {name, "other"}
        assert stats.binomtest(counted[name], counted.total(), 0.25).pvalue > 0.01


def test_a_class_changes_nothing_outside_its_times() -> None:
    brief = {**LONG, "until_s": 200}
    without, beside = (asked(make_schedule(scenario(OTHER, {"name": "plain"}, *more))) for more in ([], [brief]))
    assert (without[:120], without[200:]) == (beside[:120], beside[200:])
    assert [each[:2] for each in without] == [each[:2] for each in beside]
    assert {each[2] for each in beside[120:200]} == {"other", "plain", "long"}


def test_other_times_are_another_workload_and_times_that_say_nothing_are_none() -> None:
    first, second = (make_schedule(scenario({**SHORT, "until_s": at}, {**LONG, "from_s": at})) for at in (120, 119.5))
    assert asked(first) == asked(second)  # no request is due between 119 and 120 s
    assert first.sha256 != second.sha256
    given, plain = scenario({"from_s": 0, "until_s": None}), scenario({})
    assert make_schedule(given).sha256 == make_schedule(plain).sha256


def test_a_conversation_goes_on_after_its_class_has_ended() -> None:
    talk = {"name": "talk", "endpoint": "chat", "prompt": "text", "until_s": 60, "conversation": {"turns": {"mean": 3}}}
    made = make_schedule(scenario(talk, {**OTHER, "from_s": 60}))
    assert Counter(r.cls for r in made.requests) == {"talk": 180, "other": 240}


@pytest.mark.parametrize(
    ("classes", "values", "problem"),
    [
        (
            [OTHER, {**SHORT, "from_s": 120}],
            {},
            "requests.1.until_s 120 is not after from_s 120; raise until_s, or leave one of them out",
        ),
        ([{"until_s": 0}], {"arrival": {"law": "burst", "max_requests": 9}}, "requests.0.until_s 0 is not after from_s 0"),
        (
            [OTHER, {**LONG, "from_s": 500}],
            {"duration_s": 100},
            "requests.1.from_s 500 is not before duration_s 100, so the class is never drawn; "
            "lower from_s, raise duration_s, or leave the class out",
        ),
        ([OTHER, LONG], {"duration_s": 120}, "requests.1.from_s 120 is not before duration_s 120"),
        ([OTHER, LONG], {"duration_s": 120, "arrival": {"law": "trace", "file": "x"}}, "requests.1.from_s 120 is not before"),
        ([SHORT, {**LONG, "from_s": "2m"}], {}, "requests.1.from_s: must be a number without a unit (got '2m')"),
        (
            [LONG, {**OTHER, "from_s": 120}],
            {},
            "no class is drawn from 0 s to 120 s, and duration_s is 300; lower a from_s or raise an until_s",
        ),
        ([SHORT, {**LONG, "from_s": 130}], {}, "no class is drawn from 120 s to 130 s, and duration_s is 300"),
        ([SHORT, {**LONG, "from_s": 120.0000001}], {}, "no class is drawn from 120 s to 120.0000001 s"),
        ([LONG], {"duration_s": 0, "warmup_s": 0, "arrival": {"law": "trace", "file": "x"}}, "duration_s 0 leaves no time"),
        ([SHORT], {"duration_s": 120.5}, "no class is drawn from 120 s to 120.5 s, and duration_s is 120.5"),
        ([SHORT], {"arrival": {"law": "trace", "file": "x"}}, "no class is drawn from 120 s to 300 s"),
        (
            [OTHER, LONG],
            {"arrival": {"law": "closed", "concurrency": 2, "max_requests": 9}},
            "requests.1.from_s does nothing with arrival.law closed; take one with a rate, such as poisson, or leave it out",
        ),
        ([SHORT], {"arrival": {"law": "burst", "max_requests": 9}}, "requests.0.until_s does nothing with arrival.law burst"),
    ],
)
def test_a_time_without_a_class_and_a_class_without_a_time_are_refused(
    classes: list[dict[str, Any]], values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        scenario(*classes, **values)
    assert problem in str(caught.value)


def test_a_trace_of_no_length_is_not_called_a_class_that_is_never_drawn(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^duration_s: 0 ends before the trace's first request"):
        replayed(written(tmp_path, AZURE), duration_s=0)


def test_a_class_may_begin_just_before_the_arrivals_end() -> None:
    assert Counter(r.cls for r in make_schedule(scenario(SHORT, LONG, duration_s=121)).requests) == {"short": 120, "long": 1}


def test_a_class_must_last_no_longer_than_the_arrivals() -> None:
    assert {r.cls for r in make_schedule(scenario(SHORT, duration_s=120)).requests} == {"short"}


def test_a_trace_without_classes_asks_those_of_the_time(tmp_path: Path) -> None:
    classes = [{"name": "a", "until_s": 30}, {"name": "b", "from_s": 30}]
    assert [r.cls for r in replayed(written(tmp_path, AZURE), requests=classes).requests] == ["a", "a", "b"]
    assert [r.cls for r in replayed(written(tmp_path, AZURE), requests=classes, speed=2.1).requests] == ["a", "a", "a"]


def test_a_trace_with_classes_is_asked_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    Schedule([ScheduledRequest(number, 20.0 * number, "ab"[number // 2], 5, 5) for number in range(4)]).write(path)
    fitting = [{"name": "a", "until_s": 40}, {"name": "b", "from_s": 40}]
    assert [r.cls for r in replayed(path, requests=fitting).requests] == ["a", "a", "b", "b"]
    with pytest.raises(UsageError) as caught:
        replayed(path, requests=fitting, speed=2)
    assert str(caught.value) == "requests.1.from_s: 40 leaves out 20 s, when the trace asks b; leave the key out"
    with pytest.raises(UsageError, match=r"requests\.0\.until_s: 15 leaves out 20 s, when the trace asks a"):
        replayed(path, requests=[{"name": "a", "until_s": 15}, {"name": "b"}])


def test_a_shorter_run_of_longer_prompts_must_also_begin_them_earlier() -> None:
    with pytest.raises(UsageError, match="from_s 120 is not before duration_s 100"):
        scenario_of(Path("longer-prompts"), ["duration_s=100"])


def test_longer_prompts_come_when_the_command_line_says() -> None:
    loaded = scenario_of(Path("longer-prompts"), ["requests.0.until_s=60", "requests.1.from_s=60"])
    early, late = ([r for r in make_schedule(loaded).requests if ((r.due_s or 0) >= 60) is later] for later in (False, True))
    assert {r.cls for r in early} == {"short"}
    assert {r.cls for r in late} == {"long"}
    assert max(r.input_tokens for r in early) <= 512 < 700 <= min(r.input_tokens for r in late)
