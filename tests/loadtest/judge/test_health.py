"""These tests run the gates on synthetic runs: a healthy one passes all, and each illness fails its own gate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from loadtest.judge.columns import RowColumns, ScheduleColumns
from loadtest.judge.health import BURST_LAG_S, gap_distance, gates, late_limit_s
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.records import HealthSample, Manifest, Row, ScheduledRequest

DURATION_S = 60.0


@dataclass(frozen=True)
class Made:
    scenario: Scenario
    manifest: Manifest
    schedule: list[ScheduledRequest]
    rows: list[Row]
    samples: list[HealthSample]

    def failing(self) -> set[str]:
        found = gates(self.samples, RowColumns.of(self.rows), ScheduleColumns.of(self.schedule), self.scenario, self.manifest)
        return {gate.name for gate in found if not gate.ok}


def a_run(arrival: dict[str, Any] | None = None, *, ttft_s: float = 0.1, num_workers: int = 2) -> Made:
    """60 s at 40 requests/s; sent 0.3 to 2 ms late, as an idle machine does."""
    scenario = parse_scenario({"name": "made", "arrival": arrival or {"law": "poisson", "rate": 40}})
    rng = np.random.default_rng(7)
    num = int(40 * DURATION_S)
    even = (arrival or {}).get("law") == "constant"
    due = np.arange(num) / 40 if even else np.sort(rng.uniform(0, DURATION_S, num))
    lag = rng.uniform(0.0003, 0.002, num)
    schedule = [ScheduledRequest(i, float(due[i]), "default", 10, 10) for i in range(num)]
    rows = [a_row(request, float(lag[request.id]), ttft_s, request.id % num_workers) for request in schedule]
    samples = [a_sample(float(t), worker) for t in range(1, 61) for worker in range(num_workers)]
    manifest = Manifest(
        state="finished", scenario={}, schedule_sha256="", num_scheduled=num, target="", model="", epoch_unix_s=1.0, command=[],
        workers=num_workers, ended_s=62.0,
    )  # fmt: skip
    return Made(scenario, manifest, schedule, rows, samples)


def a_row(request: ScheduledRequest, lag_s: float, ttft_s: float, worker: int = 0) -> Row:
    assert request.due_s is not None
    sent_s = request.due_s + lag_s
    return Row(request.id, worker, request.due_s, "ok", sent_s=sent_s, first_s=sent_s + ttft_s, end_s=sent_s + 2 * ttft_s)


def a_sample(t_s: float, worker: int, **changes: Any) -> HealthSample:
    late_ms = [0.1] * 90 + [2.0] * 9 + [4.0]
    sample = HealthSample(t_s, worker, 0.3, lag_max_s=0.004, gc_s=0.0, in_flight=8, num_sent=0, num_rows=0, read_late_ms=late_ms)
    return msgspec.structs.replace(sample, **changes)


def with_sample(made: Made, t_s: int, **changes: Any) -> Made:
    samples = [msgspec.structs.replace(s, **changes) if s.t_s == t_s and s.worker == 1 else s for s in made.samples]
    return replace(made, samples=samples)


def with_lags(made: Made, lags_s: Sequence[float], ttft_s: float = 0.1) -> Made:
    rows = [a_row(request, lag_s, ttft_s, request.id % 2) for request, lag_s in zip(made.schedule, lags_s, strict=True)]
    return replace(made, rows=rows)


@pytest.mark.parametrize("law", ["poisson", "constant"])
def test_a_healthy_run_fails_no_gate(law: str) -> None:
    assert a_run({"law": law, "rate": 40}).failing() == set()


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"lag_max_s": 0.29}, "loop stalls"),
        ({"gc_s": 0.2}, "garbage collection"),
        ({"throttled": 3}, "CPU throttling"),
    ],
)
def test_one_bad_second_of_one_worker_fails_its_gate(changes: dict[str, float], gate: str) -> None:
    assert with_sample(a_run(), 30, **changes).failing() == {gate}


def test_a_bad_second_of_the_warm_up_does_not_count() -> None:
    assert with_sample(a_run(), 3, lag_max_s=0.29, cpu=1.0).failing() == set()


def test_a_worker_that_uses_all_of_its_core_makes_the_run_invalid() -> None:
    made = a_run()
    busy = [msgspec.structs.replace(s, cpu=0.97) if s.worker == 1 and s.t_s >= 50 else s for s in made.samples]
    assert replace(made, samples=busy).failing() == {"CPU p95"}


def test_a_generator_at_half_the_needed_speed_is_late_and_bunches_nothing_away() -> None:
    made = a_run()
    late = [r.due_s or 0.0 for r in made.schedule]  # the request due at t leaves at 2 t
    assert with_lags(made, late).failing() >= {"lag p50", "lag p99", "delivered arrivals", "health samples"}


def test_requests_that_leave_in_bunches_are_not_the_arrivals_that_were_asked_for() -> None:
    made = a_run()
    bunched = [0.4 - (r.due_s or 0.0) % 0.4 for r in made.schedule]
    assert with_lags(made, bunched).failing() == {"lag p50", "lag p99", "delivered arrivals"}


@pytest.mark.parametrize(("ttft_s", "failing"), [(0.1, {"lag p99"}), (2.0, set())])
def test_a_lag_counts_beside_what_is_measured(ttft_s: float, failing: set[str]) -> None:
    made = a_run()
    lags = [0.03 if r.id % 50 == 0 else 0.001 for r in made.schedule]  # 2 % of the requests leave 30 ms late
    assert with_lags(made, lags, ttft_s).failing() == failing


def limits(rows: Sequence[Row], arrival: dict[str, Any] | None = None) -> tuple[float, float]:
    scenario = parse_scenario({"name": "made", "arrival": arrival or {"law": "poisson", "rate": 40}})
    columns = RowColumns.of(rows)
    return late_limit_s(columns, columns.is_sent, scenario, 0.5), late_limit_s(columns, columns.is_sent, scenario, 0.99)


@pytest.mark.parametrize(
    ("ttft_s", "expected"),
    [(0.01, (0.003, 0.010)), (0.2, (0.010, 0.020)), (0.3, (0.015, 0.030)), (3600.0, (0.020, 0.100))],
)
def test_the_limit_of_lateness_is_a_share_of_the_median_ttft_with_a_floor_and_a_ceiling(
    ttft_s: float, expected: tuple[float, float]
) -> None:
    assert limits(a_run(ttft_s=ttft_s).rows) == pytest.approx(expected)


def test_a_generator_that_inflates_its_own_tail_is_not_excused_by_it() -> None:
    """4 % of the requests leave 90 ms late, and of those the answers are read 5 s late: that much is 2 % of their own p99."""
    made = a_run()
    lags = [0.09 if r.id % 25 == 0 else 0.001 for r in made.schedule]
    rows = [a_row(r, lag_s, 5.0 if lag_s > 0.01 else 0.1, r.id % 2) for r, lag_s in zip(made.schedule, lags, strict=True)]
    assert limits(rows) == limits(made.rows) == pytest.approx((0.005, 0.010))
    assert replace(made, rows=rows).failing() == {"lag p99"}


def test_failed_requests_do_not_raise_the_limit_and_a_burst_has_its_own() -> None:
    rows = a_run(ttft_s=2.0).rows
    for row in rows:
        row.state = "timeout"
    assert limits(rows) == (0.003, 0.010)
    assert limits(rows, {"law": "burst", "max_requests": 100}) == (BURST_LAG_S, BURST_LAG_S)


def reading_late(made: Made, late_ms: list[float], worker: int = 1) -> Made:
    samples = [msgspec.structs.replace(s, read_late_ms=late_ms) if s.worker == worker else s for s in made.samples]
    return replace(made, samples=samples)


@pytest.mark.parametrize(
    ("late_ms", "failing"),
    [
        ([0.1] * 98 + [9.0] * 2, set()),
        ([0.1] * 98 + [40.0] * 2, {"read lag p99"}),  # 40 ms late in 2 % of the time: a p99 of 100 ms becomes 140
        ([6.0] * 100, {"read lag p50"}),
        ([6.0] * 60 + [80.0] * 40, {"read lag p50", "read lag p99"}),
    ],
)
def test_answers_that_are_read_late_make_the_run_invalid_though_requests_left_in_time(
    late_ms: list[float], failing: set[str]
) -> None:
    made = a_run()
    assert reading_late(made, late_ms).failing() == failing
    assert reading_late(made, late_ms, worker=0).failing() == failing


def test_late_reads_count_beside_what_is_measured_and_in_the_warm_up_not_at_all() -> None:
    late_ms = [0.1] * 98 + [40.0] * 2
    assert reading_late(a_run(ttft_s=1.0), late_ms).failing() == set()
    made = a_run()
    early = [msgspec.structs.replace(s, read_late_ms=late_ms) if s.t_s < 5 else s for s in made.samples]
    assert replace(made, samples=early).failing() == set()


def test_records_that_do_not_tell_how_late_answers_were_read_say_so() -> None:
    made = a_run()
    old = replace(made, samples=[msgspec.structs.replace(s, read_late_ms=[]) for s in made.samples])
    found = {
        gate.name: gate
        for gate in gates(old.samples, RowColumns.of(old.rows), ScheduleColumns.of(old.schedule), old.scenario, old.manifest)
    }
    assert (found["read lag p99"].ok, found["read lag p99"].value) == (True, None)
    assert "not judged" in found["read lag p99"].text


def test_a_row_too_few_too_many_or_unknown_is_found() -> None:
    made = a_run()
    stranger = msgspec.structs.replace(made.rows[0], id=99_999)
    for rows in (made.rows[1:], [*made.rows, made.rows[5]], [*made.rows, stranger]):
        assert replace(made, rows=rows).failing() == {"every request accounted for"}


def test_an_interrupted_run_answers_for_what_was_due_before() -> None:
    made = a_run()
    manifest = msgspec.structs.replace(made.manifest, state="interrupted", ended_s=30.0)
    rows = [row for row in made.rows if row.due_s < 30.0]
    samples = [sample for sample in made.samples if sample.t_s <= 30.0]
    interrupted = replace(made, manifest=manifest, rows=rows, samples=samples)
    assert interrupted.failing() == set()
    assert replace(interrupted, rows=rows[:-1]).failing() == {"every request accounted for"}


def with_unsent(made: Made, due_s: float, reason: str) -> Made:
    first = next(row for row in made.rows if row.due_s >= due_s)
    unsent = Row(first.id, first.worker, first.due_s, "never_sent", reason=reason)
    return replace(made, rows=[unsent if row is first else row for row in made.rows])


def test_one_request_that_could_not_be_sent_makes_the_run_invalid_unless_it_was_of_the_warm_up() -> None:
    reason = "OSError: [Errno 24] Too many open files"
    assert with_unsent(a_run(), 20.0, reason).failing() == {"every request sent"}
    assert with_unsent(a_run(), 1.0, reason).failing() == set()


def test_of_an_interrupted_run_only_what_it_left_may_be_unsent() -> None:
    made = a_run()
    interrupted = replace(made, manifest=msgspec.structs.replace(made.manifest, state="interrupted", ended_s=60.0))
    assert with_unsent(interrupted, 59.0, "the run was interrupted").failing() == set()
    assert with_unsent(interrupted, 59.0, "no buffer space").failing() == {"every request sent"}
    assert with_unsent(made, 59.0, "the run was interrupted").failing() == {"every request sent"}


@pytest.mark.parametrize(("due_s", "failing"), [(60.5, set()), (59.5, {"every request sent"})])
def test_a_closed_loop_need_not_get_through_its_list(due_s: float, failing: set[str]) -> None:
    made = a_run({"law": "closed", "concurrency": 8, "max_requests": 2400})
    last = Row(2399, 0, due_s, "never_sent", reason="no client was free")
    assert replace(made, rows=[*made.rows[:-1], last]).failing() == failing


def test_a_worker_without_samples_for_some_seconds_is_missed() -> None:
    made = a_run()
    holed = [s for s in made.samples if not (s.worker == 1 and 20 < s.t_s < 26)]
    assert replace(made, samples=holed).failing() == {"health samples"}
    assert replace(made, samples=[s for s in made.samples if s.worker == 0]).failing() == {"health samples"}


def test_a_worker_whose_share_ends_early_need_not_be_watched_any_longer() -> None:
    made = a_run()
    early = [r for r in made.rows if r.worker == 0 or r.due_s < 40]
    kept = {r.id for r in early}
    schedule = [r for r in made.schedule if r.id in kept]
    done = replace(made, rows=early, schedule=schedule, samples=[s for s in made.samples if s.worker == 0 or s.t_s <= 41])
    assert done.failing() == set()
    lost = replace(done, samples=[s for s in done.samples if s.worker == 0 or s.t_s <= 36])
    assert lost.failing() == {"health samples"}


def test_a_worker_that_has_nothing_to_send_needs_no_samples() -> None:
    made = a_run(num_workers=1)
    assert replace(made, manifest=msgspec.structs.replace(made.manifest, workers=2)).failing() == set()


@pytest.mark.parametrize("changes", [{"problems": ["worker 1 was lost"]}, {"state": "running"}])
def test_what_only_the_running_generator_saw_makes_the_run_invalid(changes: dict[str, Any]) -> None:
    made = a_run()
    manifest = msgspec.structs.replace(made.manifest, **changes)
    assert replace(made, manifest=manifest).failing() == {"generator complete"}


def test_a_closed_loop_has_no_arrivals_to_deliver() -> None:
    made = a_run({"law": "closed", "concurrency": 8, "max_requests": 2400})
    assert made.failing() == set()


@pytest.mark.filterwarnings("ignore:ks_2samp")
@given(
    a=st.lists(st.floats(0, 10), min_size=2, max_size=40),
    b=st.lists(st.floats(0, 10), min_size=2, max_size=40),
)
def test_without_tolerance_the_distance_is_kolmogorov_smirnovs(a: list[float], b: list[float]) -> None:
    assert gap_distance(np.array(a), np.array(b), tolerance_s=0.0) == pytest.approx(ks_2samp(a, b).statistic)


def test_with_tolerance_equal_gaps_may_jitter() -> None:
    jittered = np.full(100, 0.1) + np.random.default_rng(1).normal(0, 0.001, 100)
    assert gap_distance(np.full(100, 0.1), jittered, tolerance_s=0.0) > 0.4
    assert gap_distance(np.full(100, 0.1), jittered, tolerance_s=0.01) == 0.0
