"""These tests (T12) check that the requests of a run are those of its trace."""

import contextlib
import os
import resource
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtest.errors import UsageError
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import Schedule, make_schedule
from loadtest.plan.traces import read_trace, replay_times
from loadtest.plan.workload import body_of
from loadtest.records import Row, ScheduledRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type,Session ID
5,ChatGPT,472,18,490,Conversation log,x
45.5,GPT-4,1087,0,1087,API log,y
118,ChatGPT,417,276,693,Conversation log,x
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [46, 47]}
{"timestamp": 3000, "input_length": 600, "output_length": 6, "hash_ids": [46, 99]}
{"timestamp": 3000, "input_length": 700, "output_length": 7, "hash_ids": [46, 47], "session_id": 3}

"""
ROWS = [
    Row(2, 0, 7.5, "ok", prompt_tokens=30, output_tokens=3),
    Row(0, 0, 4.0, "timeout", reason="late"),
    Row(1, 0, 4.25, "ok", prompt_tokens=20, output_tokens=2),
]


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def replayed(path: Path, *, duration_s: float = 3600, requests: Any = ({"name": "a"},), **trace: Any) -> Schedule:
    arrival = {"law": "trace", "file": str(path), **trace}
    return make_schedule(parse_scenario({"name": "t", "arrival": arrival, "duration_s": duration_s, "requests": list(requests)}))


@pytest.mark.parametrize(
    ("content", "planned", "num_left_out"),
    [
        (AZURE, [(0, 4808, 10, "", ()), (0.052, 3180, 8, "", ()), (60, 110, 27, "", ())], 0),
        (BURSTGPT, [(0, 472, 18, "x", ()), (113, 417, 276, "x", ())], 1),
        (MOONCAKE, [(0, 1000, 5, "", (46, 47)), (3, 600, 6, "", (46, 99)), (3, 700, 7, "3", (46, 47))], 0),
        ("\n \r\n" + MOONCAKE, [(0, 1000, 5, "", (46, 47)), (3, 600, 6, "", (46, 99)), (3, 700, 7, "3", (46, 47))], 0),
        ("\n" + BURSTGPT, [(0, 472, 18, "x", ()), (113, 417, 276, "x", ())], 1),
        (msgspec.json.Encoder().encode_lines(ROWS), [(4.25, 20, 2, "", ()), (7.5, 30, 3, "", ())], 1),
        ("\ufeff" + AZURE.replace("\n", "\r\n"), [(0, 4808, 10, "", ()), (0.052, 3180, 8, "", ()), (60, 110, 27, "", ())], 0),
    ],
)
def test_due_times_and_lengths_are_the_file_s(tmp_path: Path, content: Any, planned: list[Any], num_left_out: int) -> None:
    schedule = replayed(written(tmp_path, content))
    assert [r.due_s for r in schedule.requests] == pytest.approx([p[0] for p in planned], abs=1e-3)
    assert [(r.input_tokens, r.output_tokens, r.session, r.blocks) for r in schedule.requests] == [p[1:] for p in planned]
    assert [r.id for r in schedule.requests] == list(range(len(planned)))
    assert {r.cls for r in schedule.requests} == {"a"}
    assert schedule.num_left_out == num_left_out


def test_a_replayed_schedule_is_the_schedule(tmp_path: Path) -> None:
    requests = [ScheduledRequest(i, 0.1 * i + 0.05, "ab"[i % 2], 5 + i, 9, session=f"s{i % 3}", blocks=(i, 7)) for i in range(40)]
    Schedule(requests).write(tmp_path / "schedule.jsonl")
    again = replayed(tmp_path / "schedule.jsonl", requests=[{"name": "a"}, {"name": "b"}]).requests
    assert again == [msgspec.structs.replace(requests[0], workload=again[0].workload), *requests[1:]]


def test_equal_hash_ids_become_equal_prompts(tmp_path: Path) -> None:
    scenario = parse_scenario({"name": "t", "arrival": {"law": "burst", "max_requests": 1}, "requests": [{"name": "a"}]})
    one, two, three = (body_of(scenario, r, model="m")["prompt"] for r in replayed(written(tmp_path, MOONCAKE)).requests)
    assert one[:512] == two[:512] == three[:512]
    assert one[512:600] != two[512:600]
    assert one[512:700] == three[512:700]


def test_a_trace_in_disorder_is_sorted_and_keeps_the_order_of_equal_times(tmp_path: Path) -> None:
    lines = [f'{{"timestamp":{t},"input_length":{n},"output_length":1}}' for t, n in ((9, 1), (5, 2), (9, 3), (5, 4))]
    requests = read_trace(written(tmp_path, "\n".join(lines))).requests
    assert [(r.due_s, r.input_tokens) for r in requests] == [(0, 2), (0, 4), (pytest.approx(0.004), 1), (pytest.approx(0.004), 3)]


def test_speed_divides_times_and_duration_cuts_what_comes_later(tmp_path: Path) -> None:
    schedule = replayed(written(tmp_path, BURSTGPT), speed=2, duration_s=57)
    assert [r.due_s for r in schedule.requests] == [0, 56.5]
    schedule = replayed(written(tmp_path, BURSTGPT), duration_s=57)
    assert ([r.due_s for r in schedule.requests], schedule.num_after_end) == ([0], 1)


def test_dequantised_times_are_seeded_spread_over_their_step_and_in_the_file_s_order() -> None:
    recorded = np.repeat(np.arange(500) * 3.0, 10)
    one, same, other = (replay_times(recorded, speed=1, dequantise_s=3.0, seed=seed) for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()
    assert (np.diff(one) >= 0).all()
    assert (
        (one >= recorded) & (one < recorded + 3)
    ).all()  # the i-th stays in the i-th's step: order of the file, so of sessions
    assert np.histogram((one - recorded) / 3, 10, (0, 1))[0].min() > 430  # 500 each; the standard deviation is 21
    assert replay_times(recorded, speed=2, dequantise_s=0, seed=1).tolist() == (recorded / 2).tolist()


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("", "", "0 of 0 requests have tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "", "0 of 0 requests"),
        ("a,b\n1,2\n", ":2", "columns a, b are of no known format; known: TIMESTAMP, ContextTokens, GeneratedTokens;"),
        (
            AZURE + "yesterday,1,2\n",
            ":5",
            "Invalid RFC3339 encoded datetime - at `$.TIMESTAMP` (got 'yesterday,1,2'); correct or remove",
        ),
        (AZURE + "2023-11-16 18:17:03,12.5,2\n", ":5", "Expected `int`, got `str` - at `$.ContextTokens`"),
        ("\n\n" + AZURE + "2023-11-16 18:17:03,12.5,2\n", ":7", "Expected `int`, got `str` - at `$.ContextTokens`"),
        ("\n" + MOONCAKE.replace("600", "-600"), ":3", "Expected `int` >= 0 - at `$.input_length`"),
        (AZURE + "2023-11-16 18:17:03,12\n", ":5", "Expected `int`, got `null` - at `$.GeneratedTokens`"),
        (BURSTGPT.replace("45.5", "nan"), ":3", "Expected `float` >= 0.0 - at `$.Timestamp`"),
        (MOONCAKE.replace("600", "-600"), ":2", "Expected `int` >= 0 - at `$.input_length`"),
        (MOONCAKE.replace("600", "2000000"), ":2", "Expected `int` <= 1000000"),
        (MOONCAKE + '{"timestamp": 4', ":5", "Input data was truncated"),
        (MOONCAKE + '{"a":' + "[" * 100_000, ":5", "maximum recursion depth"),
        (MOONCAKE.replace("99", "9" * 30), ":2", "Expected `int` <= 9223372036854775807 - at `$.hash_ids[1]`"),
        (MOONCAKE + "[]\n", ":5", "Expected `object`, got `array`"),
        (MOONCAKE + '{"timestamp": 4}\n', ":5", "missing required field `input_length`"),
        (
            '{"id":0,"due_s":null,"cls":"a","input_tokens":1,"output_tokens":1}',
            ":1",
            "Expected `float`, got `null` - at `$.due_s`",
        ),
        (b"\xff\xfe\x00", "", "cannot be read as text"),
        (BURSTGPT.replace(",18,", ",0,").replace(",276,", ",0,"), "", "0 of 3 requests have tokens"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line_and_value(tmp_path: Path, content: Any, line: str, problem: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        replayed(path)
    assert caught.value.where == f"{path}{line}"
    assert problem in caught.value.problem


def test_a_trace_that_is_not_there_or_starts_after_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        replayed(tmp_path / "missing.csv")
    Schedule([ScheduledRequest(0, 90.0, "a", 1, 1)]).write(tmp_path / "late")
    with pytest.raises(UsageError, match="60 ends before the trace's first request at 90 s"):
        replayed(tmp_path / "late", duration_s=60)


@given(
    content=st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | st.text(max_size=60).map(lambda x: (AZURE + x).encode())
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_breaks_the_reader(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    with contextlib.suppress(UsageError):
        assert read_trace(path).requests


def test_a_file_without_line_ends_is_no_trace(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match="sparse: has a line of more than 16,777,216 characters"):
        read_trace(tmp_path / "sparse")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 512 * 1024


@pytest.mark.parametrize(("head", "line"), [MOONCAKE.splitlines()[:2], BURSTGPT.splitlines()[:2], ("", "")])
def test_a_file_of_too_many_lines_is_no_trace(head: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.plan.traces.MAX_REQUESTS", 1000)
    (tmp_path / "long").write_text(f"{head}\n" + f"{line}\n" * 1000)
    with pytest.raises(UsageError, match="has more than 1,000 lines; cut it"):
        read_trace(tmp_path / "long")


def test_a_pipe_to_which_nobody_writes_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: is a pipe, a socket or a device"):
        read_trace(tmp_path / "pipe")
