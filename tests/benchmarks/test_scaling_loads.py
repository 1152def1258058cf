"""These tests check that the loads of the autoscaling cases need their stated replicas and follow their laws."""

import itertools
import statistics

import pytest

from benchmarks.scaling_cases import cases_of
from benchmarks.scaling_loads import Case, jobs_of, step
from benchmarks.scaling_matrix import RATES, USUAL, matrix

BY_HALF = "step x1.5"


def of_matrix(replicas: int) -> dict[str, Case]:
    return {case.name: case for case in matrix(replicas)}


@pytest.mark.parametrize("replicas", [1, 65, 1000])
def test_each_case_of_the_matrix_needs_so_many_replicas_at_its_peak(replicas: int) -> None:
    cases = of_matrix(replicas)
    assert len(cases) == 17
    for case in cases.values():
        assert case.needs is not None
        assert case.needed == replicas
        assert max(case.needs(at / 2) for at in range(int(2 * case.duration_s))) == pytest.approx(replicas), case.name


def test_a_fleet_begins_with_what_the_load_needs_then() -> None:
    """By hand: 65 replicas over 1.5, 2 and 10; the trough of the day is 1/19 of its peak."""
    cases = of_matrix(65)
    initial = {name: case.initial for name, case in cases.items()}
    assert initial.pop("lengths: prompts x4.3") == 16, "65 x 1.20 / 5.13 = 15.2"
    assert initial.pop("lengths: answers 64 to 256") == 32, "65 x 3.04 / 6.35 = 31.1"
    known = {BY_HALF: 44, "step x2": 33, "spike x10 of two minutes": 7, "day": 4, "constant": 65, "5 % silent, to a tenth": 65}
    assert {name: initial[name] for name in known} == known
    assert initial["trickle, one each 30 s, then all"] == 1
    late = cases["starts of 300 s, 40 s believed, x2"]
    assert late.cold_starts_s == (40.0,) * 33 + (300.0,)


@pytest.mark.parametrize("name", [BY_HALF, "step x2", "lengths: prompts x4.3", "starts of 15 to 150 s, x2"])
def test_requests_come_at_the_rates_that_the_replicas_take(name: str) -> None:
    case = of_matrix(10)[name]
    jobs = [*jobs_of(case, 1)]
    assert case.needs is not None
    for began, ended in ((0.0, case.changes_at), (case.changes_at, case.duration_s)):
        kind, middle = case.kind(began), (began + ended) / 2
        here = [job for job in jobs if began <= job.due_at < ended]
        assert len(here) / (ended - began) == pytest.approx(case.needs(middle) * RATES[kind][1], rel=0.1)
        shortest, longest = kind.prompt
        assert all(shortest <= job.prompt_tokens <= longest for job in here)
        assert statistics.fmean(job.output_tokens for job in here) == pytest.approx(kind.answer, rel=0.1)


def test_silent_replicas_and_a_controller_that_is_away_have_the_requests_of_the_step() -> None:
    cases = of_matrix(10)
    step_of = [*jobs_of(cases[BY_HALF], 1)]
    for name in ("20 % silent, step x1.5", "controller away 15 to 5 s before a step x1.5"):
        assert [*jobs_of(cases[name], 1)] == step_of
        assert cases[name].initial == cases[BY_HALF].initial


def test_an_oracle_can_order_in_time_for_each_rise() -> None:
    for case in matrix(10):
        assert case.needs is not None
        if case.needs(case.changes_at) > case.needs(0.0):
            assert case.changes_at > max(case.cold_starts_s), case.name


def test_a_trickle_comes_at_equal_distances() -> None:
    due = [job.due_at for job in jobs_of(of_matrix(10)["trickle, one each 30 s, then all"], 1)]
    assert due[:29] == pytest.approx([30 * (number + 1) for number in range(29)])
    assert sum(900 <= at < 1000 for at in due) / 100 == pytest.approx(10 * RATES[USUAL][1], rel=0.1)


def test_after_a_change_gaps_are_drawn_by_the_new_rate() -> None:
    case = Case(name="late", rate=step(0.001, 50.0, 100.0), duration_s=101, initial=1, needed=1, changes_at=100.0)
    due = [job.due_at for job in jobs_of(case, 1)]
    assert len(due) > 20, "the gap that began before the change would be a thousand seconds long"


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_gaps_vary_as_said(cv: float) -> None:
    case = Case(name="gaps", rate=lambda _: 10.0, duration_s=2000, initial=1, needed=1, cv=cv)
    gaps = [later - earlier for earlier, later in itertools.pairwise(job.due_at for job in jobs_of(case, 1))]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_without_a_size_the_cases_are_those_that_went_wrong_before() -> None:
    assert {case.name for case in cases_of(None)}.isdisjoint(of_matrix(10))
    assert [case.needed for case in cases_of(10)] == [10] * 17
