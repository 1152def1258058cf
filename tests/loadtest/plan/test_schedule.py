import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from loadtest.errors import UsageError
from loadtest.plan.request_class import Length
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.schedule import Schedule, lengths, make_schedule, read_schedule
from loadtest.records import ScheduledRequest
from tests.loadtest.plan.test_arrivals import against_poisson

POISSON = {"law": "poisson", "rate": 20.0}
MIXED: list[dict[str, Any]] = [
    {"name": "short", "weight": 3, "output_tokens": {"dist": "exponential", "mean": 128, "max": 512}},
    {"name": "long", "input_tokens": {"dist": "lognormal", "mean": 900, "cv": 1.5, "min": 10, "max": 4000}},
]


def scenario(**values: Any) -> Scenario:
    return parse_scenario({"name": "test", "seed": 7, "arrival": POISSON, "requests": MIXED, "duration_s": 600, **values})


def test_the_schedule_is_the_same_for_any_number_of_workers_and_whatever_is_no_part_of_the_workload() -> None:
    others = {"slo": "ttft_p99=1s", "timeout_s": 9, "keep_text": False, "model": "other", "warmup_s": 1, "name": "renamed"}
    made = [make_schedule(scenario(workers=n)) for n in (1, 2, 4, 16)] + [make_schedule(scenario(**others))]
    assert len({schedule.sha256 for schedule in made}) == 1


@pytest.mark.parametrize(
    ("arrival", "sha256"),
    [
        (POISSON, "699b00b3ad0b53dc"),
        ({"law": "gamma", "rate": 20, "cv": 2.5}, "38fad686024653ad"),
        ({"law": "diurnal", "rate": 20, "amplitude": 0.7, "period_s": 100}, "dbc8eb7dbc566223"),
    ],
)
def test_the_schedule_is_the_same_on_every_machine_and_in_every_version(arrival: dict[str, Any], sha256: str) -> None:
    """Also seen with numpy's SIMD and libm's FMA switched off, which changes the last digit of exp() and pow()."""
    assert make_schedule(scenario(arrival=arrival)).sha256[:16] == sha256


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"requests": [{**MIXED[0], "token_ids": [10, 99]}, MIXED[1]]}, {"duration_s": 601}]
)
def test_another_workload_has_another_hash(change: dict[str, Any]) -> None:
    assert make_schedule(scenario(**change)).sha256 != make_schedule(scenario()).sha256


def test_a_change_of_one_law_moves_nothing_of_the_others() -> None:
    before = make_schedule(scenario()).requests
    after = make_schedule(scenario(requests=[{**MIXED[0], "input_tokens": {"dist": "uniform", "max": 9}}, MIXED[1]])).requests
    assert [(r.id, r.due_s, r.cls, r.output_tokens) for r in before] == [(r.id, r.due_s, r.cls, r.output_tokens) for r in after]
    assert [r.input_tokens for r in before if r.cls == "long"] == [r.input_tokens for r in after if r.cls == "long"]
    faster = make_schedule(scenario(arrival={"law": "poisson", "rate": 40.0})).requests
    assert [(r.cls, r.input_tokens, r.output_tokens) for r in before] == [
        (r.cls, r.input_tokens, r.output_tokens) for r in faster[: len(before)]
    ]


def test_ids_follow_due_times_and_classes_their_weights() -> None:
    requests = make_schedule(scenario()).requests
    due = [r.due_s for r in requests if r.due_s is not None]
    assert [r.id for r in requests] == list(range(len(requests)))
    assert due == sorted(due)
    assert len(due) == len(requests)
    num_short = sum(r.cls == "short" for r in requests)
    assert stats.binomtest(num_short, len(requests), 0.75).pvalue > 0.01


def test_shares_of_a_poisson_schedule_are_poisson_and_so_is_what_they_deliver_together() -> None:
    schedule = make_schedule(scenario(duration_s=900))
    parts = [np.array([r.due_s for r in schedule.part(worker, 4)]) for worker in range(4)]
    for part in parts:
        assert against_poisson(part, rate=5) == []
    assert against_poisson(np.sort(np.concatenate(parts)), rate=20) == []


@given(num=st.integers(1, 400), num_workers=st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_parts_are_disjoint_and_together_the_whole(num: int, num_workers: int) -> None:
    schedule = Schedule([ScheduledRequest(i, float(i), "default", 1, 1) for i in range(num)])
    parts = [schedule.part(worker, num_workers) for worker in range(num_workers)]
    assert sorted((r for part in parts for r in part), key=lambda r: r.id) == schedule.requests
    assert all([r.id for r in part] == sorted(r.id for r in part) for part in parts)


def test_parts_have_about_the_same_size() -> None:
    schedule = Schedule([ScheduledRequest(i, 0.0, "default", 1, 1) for i in range(16_000)])
    assert stats.chisquare([len(schedule.part(worker, 16)) for worker in range(16)]).pvalue > 0.01
    with pytest.raises(ValueError, match="worker 16 of 16"):
        schedule.part(16, 16)


@given(num=st.integers(1, 2000), num_workers=st.integers(1, 16), more=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_each_client_of_a_closed_loop_has_as_many_requests_as_the_others(num: int, num_workers: int, more: int) -> None:
    concurrency = num_workers + more
    schedule = Schedule([ScheduledRequest(i, None, "default", 1, 1) for i in range(num)])
    parts = [schedule.part(worker, num_workers, concurrency=concurrency) for worker in range(num_workers)]
    assert sorted((r for part in parts for r in part), key=lambda r: r.id) == schedule.requests
    each, rest = divmod(num, concurrency)
    for worker, part in enumerate(parts):  # clients are dealt out to the workers in turn, and requests to the clients
        clients = range(concurrency)[worker::num_workers]
        assert len(part) == sum(each + (client < rest) for client in clients)


LAWS = st.builds(
    Length.model_construct,
    dist=st.sampled_from(["constant", "uniform", "exponential", "lognormal"]),
    mean=st.floats(10, 400),
    cv=st.floats(0.3, 3),
    min=st.integers(1, 10),
    max=st.integers(400, 100_000),
)


@given(law=LAWS, uniform=st.lists(st.floats(0, 1, exclude_max=True), min_size=1))
def test_lengths_are_within_bounds_and_grow_with_their_number(law: Length, uniform: list[float]) -> None:
    drawn = lengths(law, np.array(sorted(uniform)))
    assert ((law.min <= drawn) & (drawn <= law.max)).all()
    assert (np.diff(drawn) >= 0).all()


LOGNORMAL = stats.lognorm(np.log(5) ** 0.5, scale=100 / 5**0.5)  # mean 100, cv 2


@pytest.mark.parametrize(
    ("law", "untruncated"),
    [
        *((Length(dist="exponential", mean=128, max=cap), stats.expon(scale=128)) for cap in (32, 128, 512, 1536)),
        (Length(dist="lognormal", mean=100, cv=2, min=5, max=700), LOGNORMAL),
        (Length(dist="uniform", min=3, max=40), stats.uniform(2.5, 38)),
    ],
)
def test_lengths_are_distributed_as_if_those_outside_were_drawn_again(law: Length, untruncated: Any) -> None:
    drawn = lengths(law, np.random.default_rng(5).random(20_000))
    values = np.arange(law.min, law.max + 1)
    shares = untruncated.cdf(values + 0.5) - untruncated.cdf(values - 0.5)
    shares /= shares.sum()
    edges = values[np.searchsorted(np.cumsum(shares), np.linspace(0, 1, 21)[1:-1])]  # cells of about 5 %
    cells = [np.histogram(x, [-np.inf, *(edges + 0.5), np.inf], weights=w)[0] for x, w in ((drawn, None), (values, shares))]
    assert stats.chisquare(cells[0], cells[1] * drawn.size).pvalue > 0.01
    assert drawn.mean() == pytest.approx((values * shares).sum(), rel=0.03)


def test_a_length_that_never_comes_is_refused() -> None:
    with pytest.raises(UsageError, match="lognormal of mean 100 and cv 0"):
        lengths(Length.model_construct(dist="lognormal", mean=100, cv=0.01, min=500, max=600), np.array([0.5]))


@pytest.mark.parametrize(
    "arrival", [POISSON, {"law": "closed", "concurrency": 4, "max_requests": 50}, {"law": "burst", "max_requests": 9}]
)
def test_a_written_schedule_is_read_as_it_was(tmp_path: Path, arrival: dict[str, Any]) -> None:
    schedule = make_schedule(scenario(arrival=arrival))
    schedule.write(tmp_path / "schedule.jsonl")
    again = read_schedule(tmp_path / "schedule.jsonl")
    assert again == schedule
    assert again.sha256 == schedule.sha256 == hashlib.sha256((tmp_path / "schedule.jsonl").read_bytes()).hexdigest()


def test_a_closed_loop_has_no_times_and_a_burst_only_one() -> None:
    closed = make_schedule(scenario(arrival={"law": "closed", "concurrency": 4, "max_requests": 50}))
    assert [r.due_s for r in closed.requests] == [None] * 50
    assert [r.due_s for r in make_schedule(scenario(arrival={"law": "burst", "max_requests": 9})).requests] == [0.0] * 9


LINE = b'{"id":0,"due_s":1.0,"cls":"a","input_tokens":1,"output_tokens":1}\n'


@pytest.mark.parametrize(
    ("content", "where", "problem"),
    [
        (b"", ":1", "empty or its last line is cut off"),
        (LINE + LINE[:20], ":2", "last line is cut off"),
        (LINE + b"{}\n", ":2", "missing required field `id`"),
        (LINE + LINE, ":2", "id 0 at 1.0 s is out of order"),
        (LINE + LINE.replace(b":0,", b":1,").replace(b"1.0", b"0.5"), ":2", "id 1 at 0.5 s is out of order"),
        (b"<html>\n", ":1", "<html>"),
    ],
)
def test_a_damaged_schedule_is_refused_with_its_line(tmp_path: Path, content: bytes, where: str, problem: str) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_schedule(path)
    assert caught.value.where == f"{path}{where}"
    assert problem in caught.value.problem


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_schedule(tmp_path / "missing.jsonl")
    with pytest.raises(IsADirectoryError):
        Schedule([]).write(tmp_path)


TALK: dict[str, Any] = {
    "name": "talk",
    "endpoint": "chat",
    "prompt": "text",
    "input_tokens": {"dist": "uniform", "min": 5, "max": 50},
    "conversation": {"turns": {"dist": "uniform", "min": 1, "max": 6}, "think_s": {"mean": 3}},
}


def test_later_turns_stand_behind_all_arrivals_and_move_none_of_them(tmp_path: Path) -> None:
    alone = {name: value for name, value in TALK.items() if name != "conversation"}
    plain = make_schedule(scenario(requests=[*MIXED, alone])).requests
    made = make_schedule(scenario(requests=[*MIXED, TALK]))
    first, later = made.requests[: len(plain)], made.requests[len(plain) :]
    assert [(r.due_s, r.cls, r.input_tokens, r.output_tokens) for r in first] == [
        (r.due_s, r.cls, r.input_tokens, r.output_tokens) for r in plain
    ]
    assert {(r.cls, r.due_s) for r in later} == {("talk", None)}
    before = [r.after for r in later]
    assert len(set(before)) == len(before)
    assert all(made.requests[r.after or 0].cls == "talk" for r in later)
    begun = sum(r.cls == "talk" for r in first)
    assert stats.binomtest(len(later), 5 * begun, 0.5).pvalue > 0.001
    assert stats.kstest([r.think_s for r in later], stats.expon(scale=3).cdf).pvalue > 0.01
    made.write(tmp_path / "schedule.jsonl")
    assert read_schedule(tmp_path / "schedule.jsonl") == made


def test_one_worker_has_all_turns_of_a_conversation() -> None:
    made = make_schedule(scenario(requests=[*MIXED, TALK]))
    parts = [made.part(worker, 3) for worker in range(3)]
    assert sorted(r.id for part in parts for r in part) == [r.id for r in made.requests]
    for part in parts:
        ids = {r.id for r in part}
        assert all(r.after in ids for r in part if r.after is not None)


@pytest.mark.parametrize("line", ['"due_s":null,"after":1', '"due_s":null,"after":-1', '"due_s":3.0,"after":0'])
def test_a_later_turn_that_comes_before_its_turn_or_has_a_time_is_out_of_order(tmp_path: Path, line: str) -> None:
    path = tmp_path / "schedule.jsonl"
    lengths_ = '"cls":"talk","input_tokens":1,"output_tokens":1'
    path.write_text(f'{{"id":0,"due_s":1.0,{lengths_}}}\n{{"id":1,{line},{lengths_}}}\n')
    with pytest.raises(UsageError, match="out of order"):
        read_schedule(path)
