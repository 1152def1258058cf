"""`serve-app plan` reads the schedules of the load test kit, and refuses other files with the line and a way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.plan.scenario import load_scenario
from loadtest.plan.schedule import Schedule, make_schedule
from loadtest.records import ScheduledRequest
from serve_app.errors import ConfigError
from serve_app.planning.comparison import prompt_ids
from serve_app.planning.trace import TraceRequest, read_trace


def write(path: Path, *requests: dict[str, Any] | str) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in requests))
    return path


def request(due_s: float, input_tokens: int = 10, output_tokens: int = 5) -> dict[str, Any]:
    return {"due_s": due_s, "input_tokens": input_tokens, "output_tokens": output_tokens}


def test_a_schedule_of_the_kit_is_read_as_the_kit_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    scheduled = [
        ScheduledRequest(0, 0.5, "chat", 411, 153, workload="ab"),
        ScheduledRequest(1, 7.0, "long", 1100, 10, "s1", (7, -8, 9)),
    ]
    Schedule(scheduled).write(path)
    assert read_trace(path, 60.0) == [TraceRequest(0.0, 411, 153, (), "chat"), TraceRequest(6.5, 1100, 10, (7, -8, 9), "long")]


def test_the_beginning_that_a_scenarios_class_shares_is_shared_in_the_plan(tmp_path: Path) -> None:
    file, path = tmp_path / "scenario.yaml", tmp_path / "schedule.jsonl"
    shared = {"chat": 40, "tools": 700, "alone": 0}
    length = {"dist": "constant", "mean": 1000}
    classes = [{"name": name, "shared_prefix_tokens": tokens, "input_tokens": length} for name, tokens in shared.items()]
    file.write_text(
        json.dumps(
            {"name": "shared", "duration_s": 60, "seed": 3, "arrival": {"law": "poisson", "rate": 1.0}, "requests": classes}
        )
    )
    make_schedule(load_scenario(file)).write(path)
    of: dict[str, list[list[int]]] = {}
    for number, each in enumerate(read_trace(path, 60.0)):
        of.setdefault(each.cls, []).append(prompt_ids(each, number, 1))
    assert of.keys() == shared.keys()
    for name, tokens in shared.items():
        one, two, *_ = of[name]
        assert one[:tokens] == two[:tokens]
        assert one[tokens : tokens + 30] != two[tokens : tokens + 30]
    assert of["chat"][0][:40] != of["tools"][0][:40]


def test_requests_are_sorted_and_those_after_the_first_seconds_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", request(9.0), request(3.0), "", request(30.0))
    assert [each.due_s for each in read_trace(path, 20.0)] == [0.0, 6.0]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], ":1: is no request: JSON is malformed"),
        ([request(0.0), {"due_s": 1.0}], ":2: is no request: Object missing required field `input_tokens`"),
        ([request(0.0, output_tokens=0)], ":1: is no request: Expected `int` >= 1 - at `$.output_tokens`"),
        ([request(-1.0)], ":1: is no request: Expected `float` >= 0.0 - at `$.due_s`"),
        (["[" * 100_000], ":1: is no request: "),
        ([], ": 0 requests within 0 s; give a trace of 5 s or more"),
        ([request(1.0), request(3.0)], ": 2 requests within 2 s; give a trace of 5 s or more"),
        ([request(1.0), request(99.0)], ": 1 requests within 0 s; give a trace of 5 s or more"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(lines: list[Any], problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *lines)
    with pytest.raises(ConfigError) as raised:
        read_trace(path, 60.0)
    assert str(raised.value).startswith(f"{path}{problem}")
    assert str(raised.value).endswith("`serve-app-loadtest plan SCENARIO --schedule FILE` makes a trace")


@pytest.mark.parametrize("more", [{}, {"after": 0, "think_s": 2.0}], ids=["closed loop", "conversation"])
def test_a_request_that_waits_for_an_answer_is_refused_with_what_to_give_instead(more: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", request(0.0), {**request(1.0), **more, "due_s": None})
    with pytest.raises(ConfigError) as raised:
        read_trace(path, 60.0)
    assert str(raised.value) == (
        f"{path}:2: is sent when an answer ends, and the trace does not say when; give a scenario that has an arrival.law other than "
        "closed and no conversation, or one that replays a recorded trace"
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file or directory"):
        read_trace(tmp_path / "none.jsonl", 60.0)


def test_prompts_share_tokens_where_their_block_ids_are_equal_and_nowhere_else() -> None:
    first, second = (prompt_ids(TraceRequest(0.0, 1200, 1, blocks), n, 1) for n, blocks in enumerate([(5, -6), (5, 7)]))
    assert (len(first), len(second)) == (1200, 1200)
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]
    assert first[1024:] != second[1024:]
    alone = prompt_ids(TraceRequest(0.0, 100, 1, (5,)), 2, 1)
    assert alone == first[:100]
    assert prompt_ids(TraceRequest(0.0, 512, 1, (5,)), 0, 2) != first[:512]
    assert prompt_ids(TraceRequest(0.0, 8, 1), 0, 1) != prompt_ids(TraceRequest(0.0, 8, 1), 1, 1)
