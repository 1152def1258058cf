"""These rules order the timeouts from the client to the pods: each says which timeout must outlast which. Pure.

The chart checks these rules before it installs anything, by a copy that tools/chart_schema.py makes (helm/serve-app/files/rules.yaml).
`serve-app check` checks them in a configuration file, or in manifests. A rule is skipped if one of its times is unknown (None).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.config import Settings

SHUTDOWN_MARGIN_S = 10.0
"""Seconds from the end of the drain to the end of the replica's process."""


def serve_shutdown_s(settings: Settings) -> float:
    """Return Serve's ``graceful_shutdown_timeout_s`` of every deployment: the whole drain and a margin."""
    return settings.ingress.unready_s + settings.timeouts.drain_s + SHUTDOWN_MARGIN_S


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The timeouts of one deployment in seconds; None if unknown."""

    drain_s: float | None = None
    unready_s: float | None = None
    no_replica_s: float | None = None
    keep_alive_s: float | None = None
    serve_shutdown_s: float | None = None
    """Serve's graceful_shutdown_timeout_s."""
    client_s: float | None = None
    """Time after which clients give an answer up."""
    load_balancer_idle_s: float | None = None
    """Silence after which the load balancer closes a connection."""
    prefill_s: float | None = 30.0
    """Time from admission to the first token of the longest prompt; the default is an assumption."""
    node_drain_s: float | None = None
    """RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S of a Ray pod; Ray's own default is 30."""
    pod_grace_s: float | None = None
    """terminationGracePeriodSeconds of a Ray pod; Kubernetes' own default is 30."""
    node_grace_s: float | None = None
    """Time that the drain of a node gives its pods: Karpenter's terminationGracePeriod, 900 in an update of EKS's node groups."""
    prestop_s: float | None = None
    """Sleep of a Ray pod's preStop hook; no process in the pod ends before it is over."""
    head_prestop_s: float | None = None
    """Sleep of the preStop hook of the head's pod."""
    probe_s: float | None = None
    """Time until the Service turns away from an ingress: failures of its readiness probe times the probe's period."""
    health_check_s: float | None = None
    """Time until a load balancer that asks /readyz itself turns away from an ingress: failures of its health check times their period."""
    spot_notice_s: float | None = None
    """Time between the notice that a node goes and its end, for a pod that may run on such a node."""
    old_cluster_s: float | None = None
    """rayClusterDeletionDelaySeconds of a RayService; KubeRay's own default is 60."""
    gcs_reconnect_s: float | None = None
    """RAY_gcs_rpc_server_reconnect_timeout_s of a Ray pod; Ray's own default is 60."""


def timeouts_of(settings: Settings, *, client_s: float | None = None, load_balancer_idle_s: float | None = None) -> Timeouts:
    """Return the timeouts that a configuration file fixes."""
    return Timeouts(
        drain_s=settings.timeouts.drain_s,
        unready_s=settings.ingress.unready_s,
        no_replica_s=settings.timeouts.no_replica_s,
        keep_alive_s=settings.ingress.keep_alive_s,
        serve_shutdown_s=serve_shutdown_s(settings),
        client_s=client_s,
        load_balancer_idle_s=load_balancer_idle_s,
    )


class TimeoutRule(NamedTuple):
    """A rule: ``longer`` is at least the sum of ``shorter`` and ``margin_s``."""

    name: str
    longer: str
    shorter: tuple[str, ...]
    margin_s: float
    reason: str
    way_out: str = ""
    """What to do where ``longer`` cannot be raised."""


RULES = (
    TimeoutRule(
        "drain-outlasts-wait",
        "drain_s",
        ("no_replica_s",),
        0,
        "a stopping ingress would cut requests that still wait for a replica",
    ),
    TimeoutRule(
        "client-outlasts-drain",
        "client_s",
        ("drain_s",),
        0,
        "clients would give up answers that are still being made",
    ),
    TimeoutRule(
        "load-balancer-outlasts-silence",
        "load_balancer_idle_s",
        ("no_replica_s", "prefill_s"),
        0,
        "the load balancer would cut requests without stream, which are silent while they wait for a replica and their prefill",
    ),
    TimeoutRule(
        "keep-alive-outlasts-load-balancer",
        "keep_alive_s",
        ("load_balancer_idle_s",),
        1,
        "the load balancer would send requests into connections that the ingress is closing, and answer 502",
    ),
    TimeoutRule(
        "unready-outlasts-probe",
        "unready_s",
        ("probe_s",),
        1,
        "a stopping ingress would refuse requests before the Service has turned away",
    ),
    TimeoutRule(
        "unready-outlasts-health-check",
        "unready_s",
        ("health_check_s",),
        2,
        "a stopping ingress would refuse requests that the load balancer still sends, which answers 502",
    ),
    TimeoutRule(
        "serve-outlasts-drain",
        "serve_shutdown_s",
        ("drain_s", "unready_s"),
        SHUTDOWN_MARGIN_S,
        "Serve would kill replicas that are draining",
    ),
    TimeoutRule(
        "node-drain-outlasts-serve",
        "node_drain_s",
        ("serve_shutdown_s",),
        0,
        "Ray would end the node under replicas that are draining",
    ),
    TimeoutRule(
        "pod-grace-outlasts-node-drain",
        "pod_grace_s",
        ("node_drain_s", "prestop_s"),
        10,
        "Kubernetes would kill the pod while its node is draining",
    ),
    TimeoutRule(
        "node-grace-outlasts-pod-grace",
        "node_grace_s",
        ("pod_grace_s",),
        0,
        "the drain of a node would cut the streams of its pods, or fail; give the drain more time, or lower drain_s and no_replica_s",
    ),
    TimeoutRule(
        "spot-notice-outlasts-drain",
        "spot_notice_s",
        ("drain_s", "unready_s"),
        0,
        "the node would go under the streams of its ingress",
        "put ingresses on on-demand nodes: the notice is the cloud's (AWS: 120 s), and drain_s has to fit it",
    ),
    TimeoutRule(
        "head-outlasts-worker-sleep",
        "head_prestop_s",
        ("prestop_s",),
        15,
        "the head of a deleted cluster would go before its workers have announced their drain",
    ),
    TimeoutRule(
        "old-cluster-outlasts-drain",
        "old_cluster_s",
        ("drain_s",),
        60,
        "an upgrade would delete the old cluster under its streams",
    ),
    TimeoutRule(
        "gcs-reconnect-outlasts-drain",
        "gcs_reconnect_s",
        ("drain_s",),
        1,
        "workers would end under their streams when the old cluster's head has gone",
    ),
)

KEYS = {
    "drain_s": "timeouts.drain_s",
    "unready_s": "ingress.unready_s",
    "no_replica_s": "timeouts.no_replica_s",
    "keep_alive_s": "ingress.keep_alive_s",
    "serve_shutdown_s": "Serve's graceful_shutdown_timeout_s",
    "client_s": "the clients' timeout",
    "load_balancer_idle_s": "the load balancer's idle timeout",
    "prefill_s": "the longest prompt's prefill",
    "node_drain_s": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
    "pod_grace_s": "terminationGracePeriodSeconds",
    "node_grace_s": "the drain of a node",
    "prestop_s": "the sleep of preStop",
    "head_prestop_s": "the sleep of the head's preStop",
    "probe_s": "the readiness probe's period times its failures",
    "health_check_s": "the load balancer's health check",
    "spot_notice_s": "the notice of a spot node",
    "old_cluster_s": "rayClusterDeletionDelaySeconds",
    "gcs_reconnect_s": "RAY_gcs_rpc_server_reconnect_timeout_s",
}
"""Field of `Timeouts` -> the name of its setting in messages."""


FOLLOWING = frozenset({"serve_shutdown_s", "node_drain_s", "pod_grace_s", "old_cluster_s", "gcs_reconnect_s"})
"""Times that the chart makes of others: they grow with those."""


class Broken(NamedTuple):
    """A rule that does not hold."""

    rule: str
    problem: str
    """A sentence with the values of both sides."""
    hint: str


def broken_rules(timeouts: Timeouts, ignored: Collection[str] = ()) -> Iterator[Broken]:
    """Yield the rules that do not hold, in the order of `RULES`, without those whose names are ``ignored``.

    A time that a broken rule needs longer counts as that long in the rules after it, so that one answer names the whole chain. Times that
    are made of others grow with them, and are judged as they are.
    """
    all_needed: dict[str, float] = {}
    for rule in (rule for rule in RULES if rule.name not in ignored):
        longer: float | None = getattr(timeouts, rule.longer)
        given: dict[str, float | None] = {name: getattr(timeouts, name) for name in rule.shorter}
        are = {name: value for name, value in given.items() if value is not None}
        if longer is None or len(are) < len(given):
            continue
        needed = {name: all_needed[name] for name in are if name in all_needed}
        if rule.longer in FOLLOWING:
            if needed:
                all_needed[rule.longer] = longer + sum(value - are[name] for name, value in needed.items())
            needed = {}
        known = are | needed
        if longer >= (least := sum(known.values()) + rule.margin_s):
            continue
        others = " and ".join(f"{KEYS[name]} {'must be' if name in needed else 'is'} {value:g}" for name, value in known.items())
        problem = f"{KEYS[rule.longer]} is {longer:g} and {others}: {rule.reason}"
        yield Broken(rule.name, problem, rule.way_out or f"{least:g} or more is needed")
        if rule.longer not in FOLLOWING:
            all_needed[rule.longer] = max(all_needed.get(rule.longer, 0), least)
