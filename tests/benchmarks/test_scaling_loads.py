"""The loads of the autoscaling cases: that they need the replicas they say, and come as their laws say."""

import itertools
import statistics

import pytest

from benchmarks.scaling_loads import Case, Kind, jobs_of, matrix


def rate_of(kind: Kind, _: int) -> float:
    """As many requests as tokens allow: what is tested does not depend on it."""
    return 500 / (kind.prompt[1] + kind.answer)


@pytest.mark.parametrize("replicas", [1, 65, 1000])
def test_each_case_of_the_matrix_needs_so_many_replicas_at_its_peak(replicas: int) -> None:
    cases = matrix(replicas, rate_of)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.needs is not None
        needed = [case.needs(at) for at in range(int(case.duration_s))]
        assert max(needed) == pytest.approx(replicas), case.name
        assert case.initial == max(1, -(-needed[0] // 1)), case.name


def test_where_lengths_change_the_rate_stays() -> None:
    (case,) = (case for case in matrix(8, rate_of) if case.name == "lengths: prompts x4.3")
    assert case.needs is not None
    assert case.rate(0.0) == case.rate(case.duration_s - 1)
    assert case.needs(0.0) < case.needs(case.changes_at) == pytest.approx(8)
    before, after = ([j for j in jobs_of(case, 1) if (j.due_at >= case.changes_at) == later] for later in (False, True))
    assert max(j.prompt_tokens for j in before) <= 512 < 1000 <= min(j.prompt_tokens for j in after)


def test_gaps_vary_as_said() -> None:
    def gaps(cv: float) -> list[float]:
        case = Case(name="gaps", rate=lambda _: 10.0, duration_s=2000, initial=1, needed=1, cv=cv)
        due = [job.due_at for job in jobs_of(case, 1)]
        return [later - earlier for earlier, later in itertools.pairwise(due)]

    for cv in (1.0, 3.0):
        seen = gaps(cv)
        assert statistics.fmean(seen) == pytest.approx(0.1, rel=0.1)
        assert statistics.stdev(seen) / statistics.fmean(seen) == pytest.approx(cv, rel=0.1)
