"""These tests analyse series with known delays: every derived time is exact to the grid (T18)."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.judge.autoscale import CALM_S, Autoscaling, LoadStep, analyse_autoscale, load_steps
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.slo import Limit
from loadtest.records import Row, ServerSample

STEP = {"law": "step", "rate": 5, "to_rate": 20, "at_s": 60}
DURATION_S = 240


def scenario(arrival: Mapping[str, Any] = STEP, **fields: Any) -> Scenario:
    return parse_scenario({"name": "x", "arrival": dict(arrival), "duration_s": DURATION_S, "slo": "ttft_p95=1s"} | fields)


def ttft_s(row: Row, limit: Limit) -> float | None:
    assert limit.metric == "ttft"
    return float("inf") if row.first_s is None else row.first_s - row.due_s


def rows(slow: range = range(0), per_second: int = 10) -> list[Row]:
    """Return evenly spaced answered requests; those due in the seconds of ``slow`` saw their first token after 3 s, others after 0.5."""
    made = []
    for number in range(DURATION_S * per_second):
        due_s = number / per_second
        wait_s = 3.0 if int(due_s) in slow else 0.5
        made.append(Row(number, 0, due_s, "ok", first_s=due_s + wait_s, end_s=due_s + wait_s + 0.25))
    return made


def replicas(desired: Mapping[int, int], ready: Mapping[int, int], name: str = "Replica") -> list[ServerSample]:
    """Return a sample each second; the dicts say from which second on how many there are."""

    def at(levels: Mapping[int, int], second: int) -> float:
        return float(levels[max(s for s in levels if s <= second)])

    return [
        ServerSample(
            t + 0.4,
            "serve",
            {
                f"replicas_desired/{name}": at(desired, t),
                f"replicas_ready/{name}": at(ready, t),
                "replicas_desired/Ingress": 1.0,
                "replicas_ready/Ingress": 1.0,
            },
        )
        for t in range(DURATION_S)
    ]


def analysed(samples: list[ServerSample], served: list[Row]) -> Autoscaling:
    found = analyse_autoscale(samples, served, scenario(), ttft_s)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Autoscaling) == found  # an assertion elsewhere can read it
    return found


@settings(max_examples=20, deadline=None)
@given(
    detection=st.integers(0, 40),
    provisioning=st.integers(0, 60),
    violates_after=st.integers(0, 50),
    violates_for=st.integers(10, 60),  # 100 of 1800 requests and more: not within the quantile
)
def test_delays_are_exact_to_the_grid(detection: int, provisioning: int, violates_after: int, violates_for: int) -> None:
    scales = 60 + detection
    slow = range(60 + violates_after, 60 + violates_after + violates_for)
    found = analysed(replicas({0: 1, scales: 3}, {0: 1, scales + provisioning: 3}), rows(slow)).steps[1]
    assert (found.detection_s, found.provisioning_s, found.settled_s) == (detection, provisioning, detection + provisioning)
    assert found.recovery_s == violates_after + violates_for
    assert (found.num_requests, found.num_violating, found.num_lost) == (1800, violates_for * 10, 0)


def test_replicas_may_come_one_by_one() -> None:
    found = analysed(replicas({0: 1, 67: 2, 80: 4}, {0: 1, 90: 2, 100: 3, 110: 4}), rows(range(62, 120)))
    assert found.deployments == ["Replica"]
    before, step = found.steps
    assert (before.step, before.until_s, before.recovery_s, before.num_oscillations) == (LoadStep(0, 5, 5), 60.0, 0.0, 0)
    assert (before.replica_s, before.over_provisioned_replica_s, before.detection_s) == (60.0, 0.0, None)
    assert (step.step, step.until_s) == (LoadStep(60, 5, 20), 241.0)  # the last answer ends in second 240
    assert (step.detection_s, step.provisioning_s, step.settled_s, step.recovery_s) == (7, 23, 50, 60)
    assert step.replica_s == 30 * 1 + 10 * 2 + 10 * 3 + 131 * 4
    assert step.over_provisioned_replica_s == 0


def test_a_step_down_is_followed_by_fewer_replicas() -> None:
    flash = {"law": "flash-crowd", "rate": 2, "peak_rate": 10, "at_s": 40, "rise_s": 10, "hold_s": 50, "fall_s": 20}
    samples = replicas({0: 1, 45: 3, 130: 1}, {0: 1, 55: 3, 142: 1})
    steps = analyse_autoscale(samples, rows(), scenario(flash), ttft_s).steps
    assert [step.step for step in steps] == [LoadStep(0, 2, 2), LoadStep(40, 2, 10, 10), LoadStep(100, 10, 2, 20)]
    assert [step.detection_rate for step in steps] == pytest.approx([None, 6.0, 2.0])  # half of the rise; all of the fall
    assert [(s.detection_s, s.provisioning_s, s.settled_s) for s in steps[1:]] == [(5, 10, 15), (30, 12, 42)]
    assert [s.over_provisioned_replica_s for s in steps[1:]] == [0, 12 * 2]  # what drains is beyond what is desired


DIURNAL = {"law": "diurnal", "rate": 6, "amplitude": 0.5, "period_s": 80}


def test_each_rise_of_a_diurnal_law_has_its_own_detection_and_recovery() -> None:
    """Three days of 80 s: rises from 3 to 9/s begin at 0, 80 and 160. In the first two, users wait; in the third nothing scales."""
    desired = {0: 1, 20: 3, 95: 1, 110: 4}  # still scaling down from the first day when the second rise has begun
    ready = {0: 1, 30: 3, 97: 1, 125: 4}
    served = rows(range(12, 35))
    for row in rows(range(104, 130))[1040:1300]:
        served[row.id] = row
    found = analyse_autoscale(replicas(desired, ready), served, scenario(DIURNAL), ttft_s)
    rises = [step for step in found.steps if step.step.to_rate == 9]
    assert [step.step for step in rises] == [LoadStep(at, 3, 9, 40, "sine") for at in (0, 80, 160)]
    assert [(s.detection_s, s.provisioning_s, s.settled_s) for s in rises] == [(20, 10, 30), (30, 15, 45), (None, None, None)]
    half, three_quarters = 6.0, 6 + 3 * 0.5**0.5  # of the rise's time
    assert [s.detection_rate for s in rises] == pytest.approx([half, three_quarters, None])
    # The second outage ends 10 s into the fall.
    assert [(s.outside_from_s, s.recovery_s) for s in rises] == [(12, 35), (24, 50), (None, 0)]
    falls = [step for step in found.steps if step.step.to_rate == 3]
    assert [(s.step.at_s, s.detection_s, s.recovery_s) for s in falls] == [(40, 55, 0), (120, None, 10), (200, None, 0)]
    assert len(rises) + len(falls) == len(found.steps)  # nothing before the first rise
    assert msgspec.json.decode(msgspec.json.encode(found), type=Autoscaling) == found


def test_the_outage_of_a_flash_crowd_begins_when_the_share_of_good_requests_falls() -> None:
    flash = {"law": "flash-crowd", "rate": 2, "peak_rate": 10, "at_s": 60, "rise_s": 20, "hold_s": 100, "fall_s": 20}
    served = rows(range(70, 95))
    served[650].first_s = served[650].due_s + 3  # one of the first 60: within the quantile of 95 %
    (_, rise, fall) = analyse_autoscale(replicas({0: 1, 75: 3}, {0: 1, 90: 3}), served, scenario(flash), ttft_s).steps
    assert (rise.detection_s, rise.detection_rate, rise.provisioning_s) == (15, 8.0, 15)
    assert (rise.outside_from_s, rise.recovery_s) == (10, 35)
    assert (fall.outside_from_s, fall.recovery_s, fall.detection_rate) == (None, 0, None)


def test_turning_round_is_counted() -> None:
    up_and_down = {0: 1, 65: 3, 80: 2, 95: 3, 110: 3, 120: 2, 130: 1}
    assert analysed(replicas(up_and_down, {0: 1}), rows()).steps[1].num_oscillations == 3


def test_what_never_happens_is_none() -> None:
    step = analysed(replicas({0: 2}, {0: 2}), rows(range(70, DURATION_S))).steps[1]
    assert (step.detection_s, step.provisioning_s, step.settled_s, step.recovery_s) == (None, None, None, None)
    step = analysed(replicas({0: 1, 70: 3}, {0: 1, 80: 2}), rows(range(70, DURATION_S - CALM_S + 1))).steps[1]
    assert (step.detection_s, step.provisioning_s, step.settled_s, step.recovery_s) == (10, None, None, None)


def test_a_few_violations_within_the_quantile_do_not_delay_recovery() -> None:
    served = rows(range(62, 80))
    for row in served[1000::100]:  # 1 %, where 5 % are allowed
        row.first_s = row.due_s + 3
    step = analysed([], served).steps[1]
    assert (step.recovery_s, step.num_violating) == (20, 18 * 10 + 14)


def test_lost_requests_are_those_neither_answered_nor_refused() -> None:
    served = rows()
    ends: list[tuple[Any, int]] = [
        ("truncated", 200),
        ("timeout", 0),
        ("http_error", 500),
        ("http_error", 429),
        ("http_error", 503),
        ("never_sent", 0),
    ]
    for row, (state, status) in zip(served[700:], ends, strict=False):
        row.state, row.status, row.first_s = state, status, None
    served[800].state = "cancelled"
    step = analysed([], served).steps[1]
    assert (step.num_requests, step.num_violating, step.num_lost) == (1799, 6, 3)
    assert (step.replica_s, step.detection_s) == (None, None)


def test_turns_that_the_end_of_the_run_left_out_are_no_requests() -> None:
    served = rows()
    before = analysed([], served).steps[1]
    left_out = msgspec.structs.replace(
        served[-1], id=10_000, state="never_sent", due_s=float(DURATION_S), first_s=None, end_s=None
    )
    after = analysed([], [*served, left_out]).steps[1]
    assert (after.num_requests, after.num_violating, after.num_lost) == (before.num_requests, 0, 0)


def test_without_an_slo_every_failed_request_violates() -> None:
    served = rows()
    for row in served[650:700]:
        row.state = "http_error"
    found = analyse_autoscale([], served, scenario(slo={}), ttft_s).steps[1]
    assert (found.num_violating, found.recovery_s) == (50, 10)


def test_pods_stand_for_replicas_where_only_they_are_known() -> None:
    samples = []
    for t in range(DURATION_S):
        ready, starting = 1 + (t >= 110), int(90 <= t < 110)
        pods = {"pods_ready": ready, "pods_starting": starting, "pods_pending": int(70 <= t < 90)}
        samples.append(ServerSample(t, "kubernetes", {name: float(count) for name, count in pods.items()}))
    step = analysed(samples, rows()).steps[1]
    assert (step.detection_s, step.placed_s, step.provisioning_s) == (10, 20, 40)


def test_the_timeline_has_a_value_for_each_second() -> None:
    samples = replicas({0: 1, 70: 2}, {0: 1, 80: 2})[3:100:2]  # starts late, skips every other second, ends early
    samples.append(ServerSample(50.0, "serve", error="timeout"))
    timeline = analysed(samples, rows(range(60, 61))).timeline
    assert {len(column) for column in timeline.values()} == {DURATION_S + 1}
    assert timeline["desired"] == [1.0] * 71 + [2.0] * 38 + [None] * 132  # the sample of second 70 was skipped, the last is of 99
    assert timeline["ready"] == [1.0] * 81 + [2.0] * 28 + [None] * 132
    assert timeline["offered"] == [10.0] * DURATION_S + [0.0]
    assert [t for t, num in enumerate(timeline["violating"]) if num] == [60]
    assert sum(num or 0.0 for num in timeline["completed"]) == DURATION_S * 10
    assert "pods_ready" not in timeline


def test_replicas_of_which_nobody_told_are_not_counted() -> None:
    """As in the cost of the window. A change that is reported after the silence is found nevertheless."""
    samples = replicas({0: 1, 100: 3}, {0: 1, 130: 3})
    found = analysed([sample for sample in samples if 15 <= sample.t_s < 30 or 120 <= sample.t_s < 180], rows())
    before, step = found.steps
    # Nine seconds before the first sample and nine behind the last one of a series: those that lie within ten seconds of it.
    assert (before.replica_s, step.replica_s) == (9 + 15 + 9, 10 + 50 * 3 + 9 * 3)
    assert (step.over_provisioned_replica_s, step.detection_s, step.settled_s) == (0, 60, 70)
    silent = analysed([sample for sample in samples if sample.t_s < 30], rows())
    assert (silent.steps[1].replica_s, silent.steps[1].over_provisioned_replica_s) == (None, None)
    assert silent.timeline["ready"] == [2.0] * 39 + [None] * 202  # the ingress as well: no target changed


@pytest.mark.parametrize(
    ("arrival", "expected"),
    [
        ({"law": "poisson", "rate": 3}, []),
        ({"law": "diurnal", "rate": 3, "amplitude": 0, "period_s": 60}, []),
        (
            {"law": "diurnal", "rate": 4, "amplitude": 0.5, "period_s": 160},
            [
                (0, 2, 6, 80, "sine"),
                (80, 6, 2, 80, "sine"),
                (160, 2, 6, 80, "sine"),
            ],
        ),
        ({"law": "ramp", "rate": 3, "to_rate": 9}, [(0, 3, 9, DURATION_S)]),
        (
            {"law": "flash-crowd", "rate": 2, "peak_rate": 8, "at_s": 40, "rise_s": 10, "hold_s": 50, "fall_s": 20},
            [
                (40, 2, 8, 10),
                (100, 8, 2, 20),
            ],
        ),
        (STEP | {"at_s": DURATION_S}, []),
        (
            {"law": "on-off", "rate": 4, "off_rate": 1, "on_s": 60, "off_s": 40},
            [(60, 4, 1), (100, 1, 4), (160, 4, 1), (200, 1, 4)],
        ),
    ],
)
def test_changes_of_the_rate(arrival: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    assert load_steps(scenario(arrival).arrival, DURATION_S) == [LoadStep(*step) for step in expected]


@pytest.mark.parametrize("change", [1, -1])
def test_other_requests_at_the_same_rate_are_a_step_either_way(change: int) -> None:
    classes = [{"name": "short", "until_s": 60}, {"name": "long", "from_s": 60}, {"name": "late", "from_s": DURATION_S - 10}]
    given = scenario({"law": "poisson", "rate": 10}, requests=classes)
    before, after = (1, 3) if change > 0 else (3, 1)
    samples = replicas({0: before, 71: before + change, 90: after}, {0: before, 80: before + change, 100: after})
    first, step, last = analyse_autoscale(samples, rows(range(65, 85)), given, ttft_s).steps
    assert first.step == LoadStep(0, 10, 10)
    assert (step.step, step.until_s) == (LoadStep(60, 10, 10, classes="long"), DURATION_S - 10)
    assert (step.detection_s, step.provisioning_s, step.settled_s) == (11, 9, 40)
    assert (step.outside_from_s, step.recovery_s, step.num_violating) == (5, 25, 200)
    assert (last.step.classes, last.detection_s) == ("long, late", None)
