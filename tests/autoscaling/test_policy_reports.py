"""The policy copes with reports that are late, partial, wrong or missing."""

import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.decision import Decision
from serve_app.autoscaling.decision_log import DecisionLog
from serve_app.autoscaling.fleet import FleetObservation, FleetScaler
from serve_app.autoscaling.policy import OBSERVE_S, DemandPolicy, load_of_replicas
from serve_app.autoscaling.signals import STALE_S, Meter, ModelLoad
from serve_app.core.step_costs import MeasuredCosts
from tests.autoscaling.controller import (
    BIG,
    INGRESS,
    SETTINGS,
    TINY,
    Context,
    Controller,
    Point,
    reporting_controller,
)


@pytest.fixture
def controller() -> Controller:
    return reporting_controller()


class Seen(DecisionLog):
    """A log that writes nothing and keeps the last load of tiny."""

    load = ModelLoad()

    @property
    def is_partial(self) -> bool:
        return self.load.is_partial

    def observe(self, scaler: FleetScaler, seen: FleetObservation, *, time: float) -> dict[str, Decision]:
        self.load = seen.models["tiny"].load
        return super().observe(scaler, seen, time=time)


@pytest.fixture
def seen(controller: Controller) -> Seen:
    for member in ("t1", "t2"):
        controller.report(TINY, member, steps=0.0)
    controller.policy._log = seen = Seen(None)
    controller.tick()
    assert not seen.is_partial
    return seen


def test_after_a_replica_went_steps_are_missing_until_no_ingress_has_requests_on_one_that_drains(
    controller: Controller, seen: Seen
) -> None:
    del controller.reports[TINY]["t2"]
    controller.tick()
    assert seen.is_partial  # also before an ingress has reported it
    controller.report(INGRESS, "i1", draining__tiny=3.0)
    for _ in range(100):
        controller.tick()
        assert seen.is_partial
    controller.report(INGRESS, "i1", draining__tiny=0.0)
    controller.tick()
    assert not seen.is_partial


def test_a_replica_without_requests_is_missed_for_seconds_and_another_models_not_at_all(
    controller: Controller, seen: Seen
) -> None:
    del controller.reports[BIG]["b1"]
    controller.tick()
    assert not seen.is_partial
    del controller.reports[TINY]["t2"]
    controller.tick()
    assert seen.is_partial
    controller.tick(STALE_S)
    assert not seen.is_partial


def test_the_end_of_the_last_stream_of_an_ingress_that_went_is_unknown(controller: Controller, seen: Seen) -> None:
    controller.report(INGRESS, "i2", streams=1.0)
    controller.tick()
    del controller.reports[INGRESS]["i2"]
    controller.tick()
    controller.tick(599.0)
    assert seen.is_partial
    controller.tick()
    assert not seen.is_partial


def test_what_replicas_and_ingresses_report_is_what_a_models_demand_is_made_of(controller: Controller) -> None:
    """Each second has 10 requests of 100 + 20 tokens; the only replica makes 10 steps, of 0.02 s each and 1 ms for each token."""
    rng, totals = (
        random.Random(1),
        dict.fromkeys(("requests", "prompt_tokens", "prefilled_tokens", "output_tokens", "finished"), 0.0),
    )
    steps = busy_s = 0.0
    for _ in range(120):
        arrived = rng.randint(5, 15)
        for name, value in zip(totals, (arrived, 100 * arrived, 100 * arrived, 20 * arrived, arrived), strict=True):
            totals[name] += value
        steps += 10
        busy_s += 10 * 0.02 + 20 * arrived * 0.001
        tallied = {f"{name}__big": value for name, value in totals.items()}
        controller.report(INGRESS, "i1", finished_tokens__big=totals["output_tokens"], **tallied)
        controller.report(BIG, "b1", steps=steps, busy_s=busy_s, running=4.0, kv_usage=0.1, max_num_seqs=64.0, cold_start_s=33.0)
        controller.tick()
    (memory,) = (state["memory"] for state in controller.state.values())
    decision = memory.decided["big"]
    assert decision.inputs["cold_start_s"] == 33.0
    assert decision.inputs["requests_per_s"] == pytest.approx(10, rel=0.15)
    assert decision.inputs["work_per_request_s"] == pytest.approx(0.02, rel=0.2)


def test_the_kv_usage_is_of_the_replicas_that_have_reported() -> None:
    usage = {"b1": [Point(1.0, 0.9)], "b2": [Point(1.0, 0.5)], "b3": []}
    load = load_of_replicas(Context(3, ("b1", "b2", "b3"), {"kv_usage": usage}), Meter(), now=2.0)
    assert (load["kv_usage"], load["reporting"]) == (pytest.approx(0.7), 2)


@pytest.mark.parametrize("silent_from_s", [0, 60])
def test_a_silent_replica_of_five_leaves_what_a_request_costs_to_the_others(controller: Controller, silent_from_s: int) -> None:
    """A replica serves a fifth of the 50 requests/s, later 150: 10 steps of 0.02 s, and 1 ms for each of 20 tokens a request."""
    rng = random.Random(1)
    requests, busy_s = 0.0, 0.0
    for second in range(240):
        arrived = rng.randint(25, 75) * (1 if second < 120 else 3)
        requests += arrived
        busy_s += 10 * 0.02 + 20 * arrived / 5 * 0.001
        counts = {
            "requests": 1,
            "prompt_tokens": 100,
            "prefilled_tokens": 100,
            "output_tokens": 20,
            "finished": 1,
            "finished_tokens": 20,
        }
        controller.report(INGRESS, "i1", **{f"{name}__big": count * requests for name, count in counts.items()})
        if second == silent_from_s:
            controller.silent_since["b5"] = controller.at
        for member in ("b1", "b2", "b3", "b4", *(["b5"] if second < silent_from_s else [])):
            controller.report(BIG, member, steps=10.0 * second, busy_s=busy_s, running=4.0, kv_usage=0.1, max_num_seqs=64.0)
        controller.reports[BIG].setdefault("b5", {})
        controller.tick()
    (memory,) = (state["memory"] for state in controller.state.values())
    assert memory.decided["big"].inputs["work_per_request_s"] == pytest.approx(0.02, rel=0.1)
    assert memory.decided["big"].inputs["requests_per_s"] == pytest.approx(150, rel=0.1)


def test_a_silent_ingress_continues_with_its_last_rate_of_requests(controller: Controller) -> None:
    for second in range(500):
        for member, last in (("i1", 100), ("i2", 99)):
            requests = 10.0 * min(second, last)
            controller.report(INGRESS, member, requests__big=requests, prompt_tokens__big=100 * requests)
        if second == 100:
            controller.silent_since["i2"] = controller.at
        controller.tick()
    (memory,) = (state["memory"] for state in controller.state.values())
    assert memory.decided["big"].inputs["requests_per_s"] == pytest.approx(10.0, rel=0.01), "of the 20 that there were"


def test_nothing_is_learnt_while_silent_ingresses_had_more_than_a_tenth_of_the_models_tokens(
    controller: Controller, seen: Seen
) -> None:
    """i1 has 81 % of the tokens of tiny, i2 10 % and i3 9 %; i4 has none of tiny, and all of big."""
    began = controller.at

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            passed_s = controller.at - began
            for member, rate in {"i1": 810.0, "i2": 100.0, "i3": 90.0}.items():
                controller.report(INGRESS, member, output_tokens__tiny=rate * passed_s)
            controller.report(INGRESS, "i4", output_tokens__big=100.0 * passed_s)
            controller.tick()

    pass_time(30)
    for member, is_learning in (("i4", True), ("i3", True), ("i2", False)):
        controller.silent_since[member] = controller.at
        pass_time(int(STALE_S) + 2)
        assert member in seen.load.silent
        assert seen.load.fits_together == is_learning, member
    assert not seen.is_partial, "no member drains"


def test_what_replicas_measured_at_their_start_is_known_before_any_load_and_older_replicas_do_without(
    controller: Controller,
) -> None:
    measured = MeasuredCosts(
        step_s=0.03,
        output_token_s=0.001,
        prompt_token_s=0.0004,
        step_error_s=0.001,
        output_token_error_s=0.0001,
        prompt_token_error_s=0.0001,
    )
    controller.report(INGRESS, "i1", requests__big=0.0)
    controller.report(BIG, "b1", steps=0.0, busy_s=0.0)  # a replica of older code
    controller.tick()
    (memory,) = (state["memory"] for state in controller.state.values())
    assert memory.scaler.step_costs("big").times() is None
    controller.report(BIG, "b1", steps=0.0, busy_s=0.0)
    controller.report(BIG, "b2", steps=0.0, busy_s=0.0, **measured.report())
    controller.tick()
    assert memory.scaler.step_costs("big").times() == StepTimes(0.03, 0.001, 0.0004)


@pytest.mark.parametrize("value", [None, "many", [1.0]])
def test_a_value_that_is_no_number_changes_nothing_and_raises_nothing(
    controller: Controller, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    controller.report(INGRESS, "i1", streams=value)
    assert controller.tick() == {}
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    controller.report(INGRESS, "i1", streams=12.0)
    assert controller.tick()[INGRESS] == 2


def test_a_value_that_is_not_finite_is_left_out(controller: Controller) -> None:
    controller.report(INGRESS, "i1", streams=float("nan"))
    controller.report(INGRESS, "i2", streams=12.0)
    assert controller.tick()[INGRESS] == 2


class Unreadable(dict[str, Mapping[str, list[Point]]]):
    """Reports that cannot be read, and the number of attempts to read them."""

    num_read = 0

    def items(self) -> Any:
        self.num_read += 1
        raise RuntimeError("unreadable")


def test_what_fails_while_reports_are_read_fails_once_a_second(controller: Controller) -> None:
    reports = Unreadable(any={})
    for passed_s in (OBSERVE_S, 0.1, 0.1, 0.1):
        controller.at += passed_s
        contexts = controller.contexts()
        contexts[INGRESS] = replace(contexts[INGRESS], raw_metrics=reports)
        assert controller.policy(contexts)[0] == {}
    assert reports.num_read == 1


def test_without_reports_or_without_the_ingress_nothing_changes_and_nothing_is_raised() -> None:
    controller = Controller()
    for _ in range(int(STALE_S) + 3):
        assert set(controller.tick().items()) <= set(controller.targets.items())
    assert controller.targets == {INGRESS: 1, TINY: 0, BIG: 1}
    assert DemandPolicy(SETTINGS)({TINY: Context(1)}) == ({}, {})
    assert DemandPolicy(SETTINGS)({}) == ({}, {})
