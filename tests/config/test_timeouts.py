"""The chain of timeouts is broken here by one wrong link at a time."""

import dataclasses

import pytest

from serve_app.config import parse_settings
from serve_app.config.timeouts import KEYS, RULES, Broken, Timeouts, broken_rules, timeouts_of

SOUND = Timeouts(
    drain_s=600,
    unready_s=5,
    no_replica_s=30,
    keep_alive_s=701,
    serve_shutdown_s=615,
    client_s=600,
    load_balancer_idle_s=700,
    node_drain_s=615,
    pod_grace_s=630,
    node_grace_s=630,
    prestop_s=5,
    head_prestop_s=20,
    probe_s=4,
    health_check_s=3,
    spot_notice_s=605,
    old_cluster_s=660,
    gcs_reconnect_s=601,
)


AFTER_UNREADY = ["node-grace-outlasts-pod-grace", "spot-notice-outlasts-drain"]


def test_a_chain_in_order_breaks_no_rule_at_its_very_edges() -> None:
    assert list(broken_rules(SOUND)) == []


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"drain_s": 20, "node_grace_s": None}, ["drain-outlasts-wait"]),
        ({"client_s": 599}, ["client-outlasts-drain"]),
        ({"load_balancer_idle_s": 59}, ["load-balancer-outlasts-silence"]),
        ({"keep_alive_s": 700}, ["keep-alive-outlasts-load-balancer"]),
        ({"serve_shutdown_s": 614}, ["serve-outlasts-drain"]),
        ({"unready_s": 6, "spot_notice_s": None}, ["serve-outlasts-drain"]),
        ({"node_drain_s": 614}, ["node-drain-outlasts-serve"]),
        ({"pod_grace_s": 629}, ["pod-grace-outlasts-node-drain"]),
        ({"node_grace_s": 629}, ["node-grace-outlasts-pod-grace"]),
        ({"prestop_s": 6, "head_prestop_s": None}, ["pod-grace-outlasts-node-drain"]),
        ({"head_prestop_s": 19}, ["head-outlasts-worker-sleep"]),
        ({"probe_s": 5}, ["unready-outlasts-probe", *AFTER_UNREADY]),
        ({"health_check_s": 4}, ["unready-outlasts-health-check", *AFTER_UNREADY]),
        ({"spot_notice_s": 120}, ["spot-notice-outlasts-drain"]),
        ({"old_cluster_s": 659}, ["old-cluster-outlasts-drain"]),
        ({"gcs_reconnect_s": 600}, ["gcs-reconnect-outlasts-drain"]),
    ],
)
def test_each_link_that_is_too_short_breaks_its_rule(change: dict[str, float | None], rules: list[str]) -> None:
    assert [broken.rule for broken in broken_rules(dataclasses.replace(SOUND, **change))] == rules


def test_a_broken_rule_names_both_values_and_the_one_that_is_needed() -> None:
    (broken,) = broken_rules(Timeouts(pod_grace_s=30, node_drain_s=611, prestop_s=5))
    problem = (
        "terminationGracePeriodSeconds is 30 and RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S is 611 and the sleep of preStop is 5: "
        "Kubernetes would kill the pod while its node is draining"
    )
    assert broken == Broken("pod-grace-outlasts-node-drain", problem, "626 or more is needed")


def test_one_answer_names_the_whole_chain_that_follows_from_a_longer_wait() -> None:
    broken = list(broken_rules(dataclasses.replace(SOUND, no_replica_s=550, load_balancer_idle_s=550, keep_alive_s=551)))
    assert [(of.rule, of.hint) for of in broken] == [
        ("load-balancer-outlasts-silence", "580 or more is needed"),
        ("keep-alive-outlasts-load-balancer", "581 or more is needed"),
    ]
    assert broken[1].problem.startswith("ingress.keep_alive_s is 551 and the load balancer's idle timeout must be 580: ")


def test_of_two_rules_that_need_the_same_time_longer_the_larger_need_counts() -> None:
    timeouts = Timeouts(drain_s=60, unready_s=10, probe_s=30, health_check_s=24, spot_notice_s=88)
    broken = {of.rule: of for of in broken_rules(timeouts)}
    assert broken["unready-outlasts-probe"].hint == "31 or more is needed"
    assert broken["spot-notice-outlasts-drain"].hint.startswith("put ingresses on on-demand nodes")
    assert "ingress.unready_s must be 31" in broken["spot-notice-outlasts-drain"].problem


def test_times_that_are_made_of_a_longer_drain_grow_with_it() -> None:
    broken = {of.rule: of for of in broken_rules(dataclasses.replace(SOUND, no_replica_s=900, load_balancer_idle_s=None))}
    assert list(broken) == [
        "drain-outlasts-wait",
        "client-outlasts-drain",
        "node-grace-outlasts-pod-grace",
        "spot-notice-outlasts-drain",
    ]
    assert broken["node-grace-outlasts-pod-grace"].hint == "930 or more is needed"
    assert "terminationGracePeriodSeconds must be 930" in broken["node-grace-outlasts-pod-grace"].problem


def test_a_rule_that_is_broken_on_purpose_needs_nothing_of_the_rules_after_it() -> None:
    waiting = dataclasses.replace(SOUND, no_replica_s=550, load_balancer_idle_s=550, keep_alive_s=551)
    assert list(broken_rules(waiting, {"load-balancer-outlasts-silence"})) == []


def test_what_is_not_known_is_not_judged() -> None:
    assert list(broken_rules(Timeouts())) == []
    for name in KEYS:
        assert list(broken_rules(dataclasses.replace(SOUND, **{name: None}))) == []


def test_every_timeout_has_a_rule_and_a_place_where_it_is_set() -> None:
    fields = {field.name for field in dataclasses.fields(Timeouts)}
    assert set(KEYS) == fields
    assert {name for rule in RULES for name in (rule.longer, *rule.shorter)} == fields


def test_the_defaults_of_the_configuration_are_in_order_behind_a_usual_load_balancer() -> None:
    settings = parse_settings({"models": {"a": {"model": "/a"}}})
    assert list(broken_rules(timeouts_of(settings, client_s=600, load_balancer_idle_s=60))) == []
