import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.core.autoscaling import desired_replicas
from serve_app.policy import OutstandingTokensPolicy


@dataclass(frozen=True)
class Deployment:
    """Serve's DeploymentID."""

    name: str


@dataclass(frozen=True)
class Point:
    """Serve's TimeStampedValue."""

    value: float


@dataclass(frozen=True)
class Context:
    """The part of Serve's AutoscalingContext that the policy reads. ``raw_metrics``: name -> replica -> series."""

    target_num_replicas: int
    raw_metrics: Mapping[str, Mapping[str, list[Point]]] | None = None


INGRESS, TINY, BIG, FIXED = (Deployment(n) for n in ("ingress", "replica-tiny", "replica-big", "replica-fixed"))
SETTINGS: dict[str, Any] = {
    "models": [
        {"name": "tiny", "model": "/tiny", "replicas": {"min": 0, "max": 8, "target_outstanding_tokens": 100}, "required": False},
        {"name": "big", "model": "/big", "replicas": {"min": 1, "max": 2, "target_outstanding_tokens": 1000}},
        {"name": "fixed", "model": "/fixed", "replicas": {"min": 3, "max": 3}},
    ],
    "ingress": {"replicas": {"min": 1, "max": 4, "target_streams": 10}},
}


def series(*values: float) -> list[Point]:
    return [Point(v) for v in values]


def decide(metrics: Any) -> dict[Any, int]:
    contexts = {INGRESS: Context(1, metrics), TINY: Context(1), BIG: Context(1), FIXED: Context(3)}
    return OutstandingTokensPolicy(SETTINGS)(contexts)[0]


@pytest.mark.parametrize(
    ("outstanding", "replicas"), [(0, 1), (1, 1), (100, 1), (101, 2), (250, 3), (400, 4), (401, 4), (1e9, 4)]
)
def test_replicas_bring_the_tokens_of_each_to_the_target_within_the_bounds(outstanding: float, replicas: int) -> None:
    assert desired_replicas(outstanding, target_outstanding_tokens=100, minimum=1, maximum=4) == replicas


def test_no_work_needs_no_replica_where_zero_is_allowed() -> None:
    assert desired_replicas(0, target_outstanding_tokens=100, minimum=0, maximum=4) == 0


def test_the_newest_value_counts_summed_over_the_ingresses() -> None:
    metrics = {
        "outstanding_tokens/tiny": {"ingress-1": series(9000, 120), "ingress-2": series(150)},
        "outstanding_tokens/big": {"ingress-1": series(0), "ingress-2": series(0)},
        "streams": {"ingress-1": series(11), "ingress-2": series(12)},
    }
    assert decide(metrics) == {TINY: 3, BIG: 1, INGRESS: 3}


def test_replicas_go_only_when_demand_has_stayed_low() -> None:
    clock = iter([0.0, 1.0, 30.5, 61.5])
    policy = OutstandingTokensPolicy(SETTINGS, now=lambda: next(clock))

    def targets(tokens: float, target: int) -> int:
        metrics = {"outstanding_tokens/tiny": {"ingress-1": series(tokens)}}
        return policy({INGRESS: Context(1, metrics), TINY: Context(target, None)})[0][TINY]

    assert targets(500, 1) == 5
    assert targets(20, 5) == 5
    assert targets(150, 5) == 2
    assert targets(20, 2) == 1


def test_a_deployment_without_word_keeps_its_target() -> None:
    metrics = {"outstanding_tokens/tiny": {"ingress-1": series(50), "ingress-2": []}, "outstanding_tokens/big": {"ingress-1": []}}
    assert decide(metrics) == {TINY: 1}
    assert decide({}) == {}
    assert decide(None) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "many"])
def test_a_value_that_is_no_number_changes_nothing_and_raises_nothing(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert decide({"streams": {"ingress-1": series(value)}}) == {}
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_without_the_ingress_nothing_changes_and_nothing_is_raised() -> None:
    assert OutstandingTokensPolicy(SETTINGS)({TINY: Context(1)}) == ({}, {})
    assert OutstandingTokensPolicy(SETTINGS)({}) == ({}, {})


def test_a_wrong_configuration_scales_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = OutstandingTokensPolicy({"modles": []})
    assert policy({INGRESS: Context(1, {"streams": {"ingress-1": series(50)}})}) == ({}, {})
    assert [r.getMessage() for r in caplog.records] == [
        "autoscaling policy without effect: modles: unknown key; did you mean models?"
    ]
