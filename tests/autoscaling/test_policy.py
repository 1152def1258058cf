import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.decision import Decision
from serve_app.autoscaling.decision_log import DecisionLog
from serve_app.autoscaling.fleet import FleetObservation, FleetScaler
from serve_app.autoscaling.orders import DEFAULT_COLD_START_S
from serve_app.autoscaling.policy import OBSERVE_S, DemandPolicy
from serve_app.autoscaling.signals import STALE_S
from serve_app.core.step_costs import MeasuredCosts
from serve_app.membership import ScalingNote


@dataclass(frozen=True)
class Deployment:
    """Serve's DeploymentID."""

    name: str


@dataclass(frozen=True)
class Point:
    """Serve's TimeStampedValue."""

    timestamp: float
    value: float


@dataclass(frozen=True)
class Context:
    """The part of Serve's AutoscalingContext that the policy reads. ``raw_metrics``: name -> replica -> series."""

    target_num_replicas: int
    running_replicas: tuple[str, ...] = ()
    raw_metrics: Mapping[str, Mapping[str, list[Point]]] | None = None
    policy_state: Mapping[str, Any] = field(default_factory=dict)
    config: AutoscalingConfig | None = None
    """None: bounds as in the settings."""


INGRESS, TINY, BIG, FIXED = (Deployment(n) for n in ("ingress", "replica-tiny", "replica-big", "replica-fixed"))
SETTINGS: dict[str, Any] = {
    "models": {
        "tiny": {"model": "/tiny", "replicas": {"min": 0, "max": 8}, "required": False},
        "big": {"model": "/big", "replicas": {"min": 1, "max": 2}},
        "fixed": {"model": "/fixed", "replicas": {"min": 3, "max": 3}},
    },
    "ingress": {"replicas": {"min": 1, "max": 4, "target_streams": 10}},
}


MONDAY = 1_795_392_000.0  # 2026-11-23T00:00:00Z


class Controller:
    """Calls the policy as Serve's controller does: with what members reported, the targets that it got, and its own state."""

    def __init__(self, settings: Mapping[str, Any] = SETTINGS) -> None:
        self.at = 1000.0
        self.notes: list[ScalingNote] = []
        self.policy = DemandPolicy(settings, now=lambda: self.at, wall=lambda: MONDAY + self.at, tell=self.notes.append)
        self.targets = {INGRESS: 1, TINY: 0, BIG: 1}
        self.state: dict[Any, Any] = {}
        self.configs: dict[Deployment, AutoscalingConfig] = {}
        self.reports: dict[Deployment, dict[str, dict[str, float]]] = {INGRESS: {"i1": {}}, TINY: {}, BIG: {"b1": {}}}

    def report(self, deployment: Deployment, member: str, **values: float) -> None:
        self.reports[deployment].setdefault(member, {}).update({n.replace("__", "/"): v for n, v in values.items()})

    def contexts(self) -> dict[Deployment, Context]:
        found = {}
        for deployment, target in self.targets.items():
            series: dict[str, dict[str, list[Point]]] = {}
            for member, values in self.reports[deployment].items():
                for name, value in values.items():
                    series.setdefault(name, {})[member] = [Point(self.at - 9, -1.0), Point(self.at, value)]
            state, config = self.state.get(deployment, {}), self.configs.get(deployment)
            found[deployment] = Context(target, tuple(self.reports[deployment]), series, state, config)
        return found

    def tick(self, seconds: float = OBSERVE_S) -> dict[Any, int]:
        self.at += seconds
        decided, self.state = self.policy(self.contexts())
        self.targets |= decided
        return decided


@pytest.fixture
def controller() -> Controller:
    controller = Controller()
    controller.report(INGRESS, "i1", streams=0.0, cpu_s=0.0, requests__tiny=0.0, requests__big=0.0)
    controller.report(BIG, "b1", steps=0.0, busy_s=0.0, running=0.0, waiting=0.0, kv_usage=0.0)
    controller.tick()
    controller.tick()  # from here on there is something to count from
    return controller


def test_the_first_request_starts_a_model_from_zero(controller: Controller) -> None:
    assert controller.tick() == {INGRESS: 1, TINY: 0, BIG: 1}
    controller.report(INGRESS, "i1", requests__tiny=1.0, waiting__tiny=1.0)
    assert controller.tick() == {INGRESS: 1, TINY: 1, BIG: 1}


def test_between_two_observations_the_decision_stands(controller: Controller) -> None:
    controller.report(INGRESS, "i1", requests__tiny=1.0, waiting__tiny=1.0)
    controller.tick()
    controller.report(INGRESS, "i1", streams=35.0)
    assert controller.tick(0.1) == {INGRESS: 1, TINY: 1, BIG: 1}
    assert controller.tick()[INGRESS] == 4


def test_ingresses_are_summed_and_each_models_numbers_are_its_own(controller: Controller) -> None:
    controller.report(INGRESS, "i1", streams=11.0, requests__tiny=5.0, waiting__tiny=1.0)
    controller.report(INGRESS, "i2", streams=12.0, requests__tiny=900.0)
    assert controller.tick() == {INGRESS: 3, TINY: 1, BIG: 1}
    (memory,) = (state["memory"] for state in controller.state.values())
    assert memory.ingresses.silent(["i1", "i2"], now=controller.at) == ()


class Seen(DecisionLog):
    """A log that nothing is written to, and that keeps whether the last observation of tiny was partial."""

    is_partial = False

    def observe(self, scaler: FleetScaler, seen: FleetObservation, *, time: float) -> dict[str, Decision]:
        self.is_partial = seen.models["tiny"].load.is_partial
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
    assert seen.is_partial  # before an ingress has told of it, too
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


def test_of_an_ingress_that_went_nobody_knows_when_its_last_stream_ends(controller: Controller, seen: Seen) -> None:
    controller.report(INGRESS, "i2", streams=1.0)
    controller.tick()
    del controller.reports[INGRESS]["i2"]
    controller.tick()
    controller.tick(599.0)
    assert seen.is_partial
    controller.tick()
    assert not seen.is_partial


def test_a_silent_ingress_takes_nothing_away(controller: Controller) -> None:
    controller.report(INGRESS, "i1", streams=35.0)
    controller.tick()
    controller.report(INGRESS, "i1", streams=1.0)
    controller.reports[INGRESS]["i2"] = {}  # runs, and has never reported
    for _ in range(300):
        assert controller.tick()[INGRESS] == 4
    del controller.reports[INGRESS]["i2"]
    assert controller.tick()[INGRESS] == 1


def test_a_new_controller_goes_on_with_the_targets_that_there_are(controller: Controller) -> None:
    controller.targets[TINY] = 5
    controller.state = {}
    controller.policy = DemandPolicy(SETTINGS, now=lambda: controller.at)
    assert controller.tick() == {}, "nothing to compare with yet"
    assert controller.tick()[TINY] == 5


def test_what_is_logged_says_why(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    controller.report(INGRESS, "i1", requests__tiny=1.0, waiting__tiny=1.0)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        controller.tick()
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith("tiny: 0 -> 1 replicas (first): {")


def test_each_change_of_a_target_is_told_once(controller: Controller) -> None:
    controller.report(INGRESS, "i1", requests__tiny=1.0, waiting__tiny=1.0)
    controller.tick()
    controller.tick()
    assert controller.notes == [ScalingNote(MONDAY + controller.at - OBSERVE_S, "tiny", 0, 1, "first")]


def test_a_model_may_have_the_ingress_deployments_name() -> None:
    model = {"model": "/m", "replicas": {"min": 0, "max": 3}, "required": False}
    controller = Controller({"models": {"ingress": model}})
    named = Deployment("replica-ingress")
    controller.targets, controller.reports = {INGRESS: 1, named: 0}, {INGRESS: {"i1": {}}, named: {}}
    controller.report(INGRESS, "i1", requests__ingress=0.0)
    controller.tick()
    controller.tick()
    controller.report(INGRESS, "i1", requests__ingress=1.0, waiting__ingress=1.0)
    assert controller.tick() == {named: 1}


def test_what_replicas_and_ingresses_report_is_what_a_models_demand_is_made_of(controller: Controller) -> None:
    """Each second 10 requests of 100 + 20 tokens; the one replica steps 10 times, 0.02 s each and 1 ms for each token made."""
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
    """Reports that cannot be read, and how often it was tried."""

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


def test_a_wrong_configuration_scales_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = DemandPolicy({"modles": []})
    assert policy({INGRESS: Context(1)}) == ({}, {})
    assert [r.getMessage() for r in caplog.records] == [
        "autoscaling policy without effect: modles: unknown key; did you mean models?"
    ]


@pytest.mark.parametrize("cold_start_s", [None, 20.0, 300.0])
def test_a_schedule_raises_the_minimum_a_cold_start_ahead_and_does_not_flap(cold_start_s: float | None) -> None:
    schedule = [{"days": ["mon"], "start": "00:30", "end": "00:31", "min": 3}]
    model = {"model": "/tiny", "replicas": {"min": 0, "max": 8, "schedule": schedule}, "required": False}
    controller = Controller({"models": {"tiny": model}})
    controller.reports = {INGRESS: {"i1": {"streams": 0.0}}, TINY: {}}
    controller.targets = {INGRESS: 1, TINY: 0}
    wanted = []
    while controller.at < 1900.0:
        controller.tick()
        wanted.append((controller.at, controller.targets[TINY]))
        if cold_start_s is not None and controller.targets[TINY]:
            controller.reports[TINY] = {f"t{n}": {"running": 0.0, "cold_start_s": cold_start_s} for n in range(3)}
    began = next(at for at, replicas in wanted if replicas == 3)
    assert began == 1800.0 - DEFAULT_COLD_START_S, "nothing was measured before"
    assert {replicas for at, replicas in wanted if at >= began} == {3}
    while controller.at < 4000.0:
        controller.tick()
        controller.reports[TINY] = {f"t{n}": {"running": 0.0} for n in range(controller.targets[TINY])}
    assert controller.targets[TINY] == 0


def test_of_what_a_schedule_lowers_the_share_of_silent_members_stays(controller: Controller) -> None:
    schedule = [{"start": "00:30", "end": "01:00", "max": 1}]
    model = {"model": "/tiny", "replicas": {"min": 1, "max": 8, "schedule": schedule}}
    controller.policy = DemandPolicy({"models": {"tiny": model}}, now=lambda: controller.at, wall=lambda: MONDAY + controller.at)
    controller.targets = {INGRESS: 1, TINY: 4}
    controller.reports[TINY] = {f"t{n}": {"running": 0.0} for n in range(4)}
    controller.reports[INGRESS]["i2"] = {}
    controller.at = 1795.0
    for _ in range(60):
        controller.tick()
    assert controller.targets[TINY] == 2, "one of two ingresses does not say what it has"
    del controller.reports[INGRESS]["i2"]
    controller.tick()
    assert controller.targets[TINY] == 1


def test_an_itl_limit_that_no_number_of_replicas_keeps_is_said_once(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    controller.reports[TINY] = {"t1": {}}
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        for second in range(1, 60):
            counted = {"requests__tiny": 1.0, "prefilled_tokens__tiny": 9.0, "output_tokens__tiny": 5.0, "finished__tiny": 1.0}
            counted |= {"finished_tokens__tiny": 5.0}
            controller.report(INGRESS, "i1", **{name: second * value for name, value in counted.items()})
            controller.report(TINY, "t1", steps=second * 5.0, busy_s=second * 0.9, running=1.0)
            controller.tick()
    (line,) = (record.getMessage() for record in caplog.records)
    assert re.match(r"tiny: a step takes 0\.1\d\d s even for few requests and replicas\.itl_slo_s is 0\.1: no number of", line)


def operated(minimum: int) -> AutoscalingConfig:
    """Return the bounds of tiny in Serve's config after `serve-app models` has changed them."""
    return AutoscalingConfig(min_replicas=minimum, max_replicas=8)


def test_a_pinned_model_keeps_a_replica_and_an_unloaded_one_none_until_somebody_waits(controller: Controller) -> None:
    controller.configs[TINY] = operated(1)
    assert controller.tick()[TINY] == 1
    controller.report(TINY, "t1", steps=0.0)
    for _ in range(400):
        assert controller.tick()[TINY] == 1  # idle for long, and pinned
    controller.configs[TINY] = operated(0)
    controller.targets[TINY] = 0  # `unload`: Serve sets the target to the entry's initial_replicas
    del controller.reports[TINY]["t1"]
    controller.report(INGRESS, "i1", requests__tiny=3.0)  # they were on the replica that drains
    assert controller.tick(0.1).get(TINY, 0) == 0  # between two observations the older decision must not come back
    assert controller.tick()[TINY] == 0
    controller.report(INGRESS, "i1", waiting__tiny=1.0)
    assert controller.tick()[TINY] == 1


def test_the_minimum_of_the_configuration_does_not_load_an_unloaded_model(controller: Controller) -> None:
    controller.configs[BIG] = operated(0)
    controller.targets[BIG] = 0
    del controller.reports[BIG]["b1"]
    for _ in range(100):
        assert controller.tick()[BIG] == 0
    controller.configs[BIG] = operated(1)  # `load`
    assert controller.tick()[BIG] == 1
