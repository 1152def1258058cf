"""These tests check when the soak calls a process flat: by medians of the first and the last third after the warm-up."""

from benchmarks.soak import Sample, grown


def samples(pid: int, first: int, values: list[float]) -> list[Sample]:
    return [Sample(60.0 * (first + n), pid, "ingress", {"descriptors": value}) for n, value in enumerate(values)]


def test_growth_after_the_warm_up_is_a_problem_and_growth_within_it_is_none() -> None:
    steady = samples(1, 0, [10.0] * 5 + [100.0] * 15)
    leaking = samples(2, 0, [100.0 + 2 * n for n in range(20)])
    replaced = samples(3, 0, [100.0] * 10)
    seen = sorted([*steady, *leaking, *replaced], key=lambda sample: sample.at)
    assert grown(seen) == ["ingress 2: descriptors grew from 114 to 134"]
