"""Each rule of the order of timeouts is broken by one set of values, by a second, and kept by the set beside it."""

from typing import Any

import pytest

from serve_app.config.timeouts import RULES
from tests.chart.places import ALB
from tests.chart.render import Refused, at, merged, render

TIMEOUTS: list[tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    ("drain-outlasts-wait", at("config.timeouts.drain_s", 20), ("20", "30"), at("config.timeouts.drain_s", 30)),
    ("client-outlasts-drain", at("timeouts.clientSeconds", 599), ("599", "600"), at("timeouts.clientSeconds", 600)),
    (
        "load-balancer-outlasts-silence",
        at("timeouts.loadBalancerIdleSeconds", 89),
        ("89", "30", "60"),
        at("timeouts.loadBalancerIdleSeconds", 90),
    ),
    (
        "load-balancer-outlasts-silence",
        at("timeouts.prefillSeconds", 91),
        ("prefillSeconds is 91", "121"),
        at("timeouts.prefillSeconds", 90),
    ),
    (
        "keep-alive-outlasts-load-balancer",
        at("config.ingress.keep_alive_s", 120),
        ("120",),
        at("config.ingress.keep_alive_s", 121),
    ),
    ("unready-outlasts-probe", at("config.ingress.unready_s", 4), ("is 4",), at("config.ingress.unready_s", 5)),
    (
        "unready-outlasts-health-check",
        merged(ALB, at("config.ingress.unready_s", 11)),
        ("is 11", "is 10"),
        merged(ALB, at("config.ingress.unready_s", 12)),
    ),
    (
        "node-drain-outlasts-serve",
        at("timeouts.overrides.rayDrainSeconds", 615),
        ("615", "616"),
        at("timeouts.overrides.rayDrainSeconds", 616),
    ),
    (
        "pod-grace-outlasts-node-drain",
        at("timeouts.overrides.terminationGracePeriodSeconds", 640),
        ("640", "626", "is 5"),
        at("timeouts.overrides.terminationGracePeriodSeconds", 641),
    ),
    (
        "node-grace-outlasts-pod-grace",
        at("timeouts.nodeDrainSeconds", 640),
        ("nodeDrainSeconds is 640", "terminationGracePeriodSeconds (of config.timeouts.drain_s) is 641", "lower drain_s"),
        at("timeouts.nodeDrainSeconds", 641),
    ),
    (
        "old-cluster-outlasts-drain",
        at("timeouts.overrides.rayClusterDeletionDelaySeconds", 659),
        ("659", "600"),
        at("timeouts.overrides.rayClusterDeletionDelaySeconds", 660),
    ),
    (
        "gcs-reconnect-outlasts-drain",
        at("timeouts.overrides.gcsReconnectSeconds", 600),
        ("600",),
        at("timeouts.overrides.gcsReconnectSeconds", 601),
    ),
    ("head-outlasts-worker-sleep", at("head.preStopSleepSeconds", 19), ("19", "is 5"), at("head.preStopSleepSeconds", 20)),
    (
        "spot-notice-outlasts-drain",
        at("ingressPods.spot", True),
        ("120", "600", "is 6"),
        merged(at("ingressPods.spot", True), at("config.timeouts.drain_s", 114)),
    ),
]


@pytest.mark.parametrize(("rule", "broken", "shown", "kept"), TIMEOUTS, ids=[rule for rule, *_ in TIMEOUTS])
def test_a_timeout_out_of_order_is_refused_with_all_values_and_the_next_second_is_not(
    rule: str, broken: dict[str, Any], shown: tuple[str, ...], kept: dict[str, Any]
) -> None:
    with pytest.raises(Refused, match=rule) as refusal:
        render(broken)
    assert [value for value in shown if value not in str(refusal.value)] == []
    render(kept)


def test_one_refusal_names_the_whole_chain_that_follows_from_a_longer_wait() -> None:
    with pytest.raises(Refused) as refusal:
        render(at("config.timeouts.no_replica_s", 500))
    assert "timeouts.loadBalancerIdleSeconds is 120 and config.timeouts.no_replica_s is 500" in str(refusal.value)
    assert "keep_alive_s is 130 and timeouts.loadBalancerIdleSeconds must be 560: " in str(refusal.value)
    assert "561 or more is needed" in str(refusal.value)


def test_times_that_the_chart_makes_of_a_longer_drain_grow_in_the_same_refusal_and_overrides_stay() -> None:
    longer = {"config.timeouts.no_replica_s": 900, "timeouts.loadBalancerIdleSeconds": 960, "config.ingress.keep_alive_s": 961}
    fixed = {"timeouts.nodeDrainSeconds": 900, "timeouts.overrides.gcsReconnectSeconds": 800}
    wrong = merged(*(at(path, value) for path, value in (longer | fixed).items()))
    with pytest.raises(Refused) as refusal:
        render(wrong)
    said = " ".join(str(refusal.value).split())
    assert "terminationGracePeriodSeconds (of config.timeouts.drain_s) must be 941" in said
    assert "timeouts.overrides.gcsReconnectSeconds is 800 and config.timeouts.drain_s must be 900" in said
    follow = {"config.timeouts.drain_s": 900, "timeouts.clientSeconds": 900}
    ends = {"timeouts.nodeDrainSeconds": 941, "timeouts.overrides.gcsReconnectSeconds": 901}
    render(merged(wrong, *(at(path, value) for path, value in (follow | ends).items())))


def test_the_chart_has_the_rules_of_serve_app_check() -> None:
    derived = {"serve-outlasts-drain"}  # the chart gives no way to set Serve's graceful shutdown
    assert {rule for rule, *_ in TIMEOUTS} == {rule.name for rule in RULES} - derived
