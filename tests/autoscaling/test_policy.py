"""Serve's controller calls the policy; these tests check its decisions and the notes and log lines about them."""

import logging
import re

import pytest

from serve_app.autoscaling.policy import OBSERVE_S, DemandPolicy
from serve_app.membership import ScalingNote
from tests.autoscaling.controller import (
    BIG,
    INGRESS,
    MONDAY,
    SETTINGS,
    TINY,
    Context,
    Controller,
    Deployment,
    reporting_controller,
)


@pytest.fixture
def controller() -> Controller:
    return reporting_controller()


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


def test_a_new_controller_continues_with_the_present_targets(controller: Controller) -> None:
    controller.targets[TINY] = 5
    controller.state = {}
    controller.policy = DemandPolicy(SETTINGS, now=lambda: controller.at)
    assert controller.tick() == {}, "there is no earlier report yet"
    assert controller.tick()[TINY] == 5


def test_what_is_logged_says_why(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    controller.report(INGRESS, "i1", requests__tiny=1.0, waiting__tiny=1.0)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        controller.tick()
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith("tiny: 0 -> 1 replicas (first): {")


def test_each_change_of_a_target_is_noted_once(controller: Controller) -> None:
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


def test_a_wrong_configuration_scales_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = DemandPolicy({"modles": []})
    assert policy({INGRESS: Context(1)}) == ({}, {})
    assert [r.getMessage() for r in caplog.records] == [
        "autoscaling policy without effect: modles: unknown key; did you mean models?"
    ]


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
