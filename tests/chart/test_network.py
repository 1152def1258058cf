"""The rendered NetworkPolicies allow who reaches whom by a table written by hand, computed as Kubernetes defines them."""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.chart.render import Rendered, at, merged, render

NAMESPACE = "serving"
ALL = merged(
    at("gcsFaultTolerance.enabled", True),
    at("monitoring.podMonitors", True),
    at("ui.enabled", True),
    {"weights": {"enabled": True, "downloads": [{"path": "m", "source": "hf:o/n", "revision": "a" * 40}]}},
)


@dataclass(frozen=True)
class End:
    """A pod, or with an address something outside."""

    namespace: str = NAMESPACE
    labels: tuple[tuple[str, str], ...] = ()
    address: str | None = None


def ours(component: str) -> End:
    labels = {
        "app.kubernetes.io/name": "serve-app",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": component,
    }
    return End(labels=tuple(labels.items()))


HEAD, INGRESS, MODEL, REDIS = map(ours, ("head", "ingress", "model", "redis"))
JOB, TEST, UNINSTALL, HEADROOM = map(ours, ("weights", "test", "uninstall", "headroom"))
UI = ours("ui")
NEIGHBOUR = End()
CLIENT = End("elsewhere")
OTHER_RELEASE = End(
    labels=(("app.kubernetes.io/name", "serve-app"), ("app.kubernetes.io/instance", "x"), ("app.kubernetes.io/component", "head"))
)
OPERATOR, PROMETHEUS = End("kuberay-system"), End("monitoring")
DNS = End("kube-system", (("k8s-app", "kube-dns"),))
API, HUB = End(address="10.100.0.1"), End(address="3.3.3.3")
NODE_CREDENTIALS, POD_IDENTITY = End(address="169.254.169.254"), End(address="169.254.170.23")


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    equal = selector.get("matchLabels", {}).items() <= labels.items()
    return equal and all(
        (labels.get(e["key"]) in e["values"]) is (e["operator"] == "In") for e in selector.get("matchExpressions", [])
    )


def _is_peer(peer: Mapping[str, Any], end: End) -> bool:
    if (block := peer.get("ipBlock")) is not None:
        if end.address is None:
            return False
        address = ipaddress.ip_address(end.address)
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(e) for e in block.get("except", []))
    if end.address is not None:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": end.namespace})
    else:
        in_namespace = end.namespace == NAMESPACE
    return in_namespace and _matches(peer.get("podSelector", {}), dict(end.labels))


def _named(r: Rendered, pod: End, name: str) -> Iterator[int]:
    """Yield the ports that the containers of the rendered pods with all labels of ``pod`` give this name."""
    for _, template in r.pod_templates():
        if pod.labels and dict(pod.labels).items() <= template["metadata"]["labels"].items():
            ports = [port for container in template["spec"]["containers"] for port in container.get("ports", [])]
            yield from (port["containerPort"] for port in ports if port["name"] == name)


def _is_on(r: Rendered, entry: Mapping[str, Any], target: End, port: int, protocol: str) -> bool:
    first = entry["port"]
    if isinstance(first, str):
        return entry["protocol"] == protocol and port in _named(r, target, first)
    return bool(entry["protocol"] == protocol and first <= port <= entry.get("endPort", first))


def _rules(r: Rendered, pod: End, direction: str) -> Iterator[list[Any]]:
    for policy in r.of("NetworkPolicy").values():
        spec = policy["spec"]
        if (
            direction in spec["policyTypes"]
            and pod.address is None
            and pod.namespace == NAMESPACE
            and _matches(spec["podSelector"], dict(pod.labels))
        ):
            yield spec.get(direction.lower(), [])


def reaches(r: Rendered, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Tell whether a connection is let out of ``source`` and into ``target``."""
    out, into = list(_rules(r, source, "Egress")), list(_rules(r, target, "Ingress"))

    def allows(rule: Mapping[str, Any], side: str, end: End) -> bool:
        ports, peers = rule.get("ports"), rule.get(side)
        on_port = ports is None or any(_is_on(r, entry, target, port, protocol) for entry in ports)
        return on_port and (not peers or any(_is_peer(peer, end) for peer in peers))

    leaves = not out or any(allows(rule, "to", target) for rules in out for rule in rules)
    enters = not into or any(allows(rule, "from", source) for rules in into for rule in rules)
    return leaves and enters


ALLOWED = [
    (CLIENT, INGRESS, 8010),
    (NEIGHBOUR, INGRESS, 8010),
    (TEST, INGRESS, 8010),
    (UI, INGRESS, 8010),
    (CLIENT, UI, 8011),
    (INGRESS, MODEL, 8020),
    (INGRESS, HEAD, 6379),
    (MODEL, HEAD, 6379),
    (HEAD, MODEL, 8076),
    (MODEL, INGRESS, 8077),
    (HEAD, INGRESS, 8079),
    (HEAD, MODEL, 52365),
    (HEAD, MODEL, 10002),
    (MODEL, HEAD, 10999),
    (OPERATOR, HEAD, 8265),
    (PROMETHEUS, HEAD, 8080),
    (PROMETHEUS, MODEL, 8080),
    (PROMETHEUS, INGRESS, 8080),
    (PROMETHEUS, INGRESS, 8010),
    (HEAD, API, 443),
    (HEAD, API, 6443),
    (UNINSTALL, API, 443),
    (HEAD, REDIS, 6379),
    (JOB, HUB, 443),
    (JOB, POD_IDENTITY, 80),
    *((end, DNS, 53) for end in (HEAD, INGRESS, MODEL, REDIS, JOB, TEST, UNINSTALL, UI)),
]
DENIED = [
    *(
        (outsider, HEAD, port)
        for outsider in (CLIENT, NEIGHBOUR, OTHER_RELEASE, TEST, JOB)
        for port in (6379, 8265, 10001, 8076, 10002)
    ),
    *(
        (outsider, MODEL, port)
        for outsider in (CLIENT, NEIGHBOUR, OTHER_RELEASE, OPERATOR, TEST)
        for port in (8020, 8080, 52365, 10002)
    ),
    *((outsider, INGRESS, port) for outsider in (CLIENT, NEIGHBOUR) for port in (8080, 52365, 8076, 10001)),
    *((outsider, REDIS, 6379) for outsider in (CLIENT, NEIGHBOUR, OTHER_RELEASE, INGRESS, MODEL, OPERATOR)),
    *((peer, HEAD, 10001) for peer in (INGRESS, MODEL, OPERATOR)),
    (INGRESS, HEAD, 8265),
    (OPERATOR, HEAD, 6379),
    (PROMETHEUS, HEAD, 8265),
    *((serving, HUB, 443) for serving in (INGRESS, MODEL, HEAD, REDIS, TEST, UI)),
    *((serving, API, 443) for serving in (INGRESS, MODEL, REDIS, TEST, UI)),
    *((UI, target, port) for target, port in ((HEAD, 8265), (HEAD, 6379), (MODEL, 8020), (INGRESS, 8080), (REDIS, 6379))),
    *((any_of_ours, NODE_CREDENTIALS, port) for any_of_ours in (HEAD, INGRESS, MODEL, REDIS, JOB, TEST) for port in (80, 443)),
    (UNINSTALL, HEAD, 8265),
    (UNINSTALL, REDIS, 6379),
    (INGRESS, POD_IDENTITY, 80),
    (INGRESS, DNS, 8080),
    *((HEADROOM, target, port) for target, port in ((DNS, 53), (HEAD, 6379), (MODEL, 8020), (API, 443), (HUB, 443))),
    *((source, HEADROOM, port) for source in (CLIENT, NEIGHBOUR, HEAD, INGRESS, OPERATOR, PROMETHEUS) for port in (8010, 8080)),
]


def _spoken(value: object) -> str:
    if not isinstance(value, End):
        return str(value)
    component = dict(value.labels).get("app.kubernetes.io/component")
    instance = dict(value.labels).get("app.kubernetes.io/instance")
    return value.address or (f"{instance}-{component}" if component else value.namespace)


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED, ids=_spoken)
def test_who_must_reaches(source: End, target: End, port: int) -> None:
    assert reaches(render(ALL), source, target, port)


@pytest.mark.parametrize(("source", "target", "port"), dict.fromkeys(DENIED), ids=_spoken)
def test_who_must_not_does_not_reach(source: End, target: End, port: int) -> None:
    assert not reaches(render(ALL), source, target, port)


def test_clients_can_be_narrowed_and_the_test_still_reaches() -> None:
    narrow = render(at("networkPolicies.clients", [{"ipBlock": {"cidr": "10.9.0.0/16"}}]))
    outside = End(address="10.9.1.1")
    assert [reaches(narrow, source, INGRESS, 8010) for source in (CLIENT, outside, TEST)] == [False, True, True]


def test_clients_that_are_narrowed_are_so_for_the_pages_too_and_the_pages_still_reach() -> None:
    narrow = render(merged(at("ui.enabled", True), at("networkPolicies.clients", [{"ipBlock": {"cidr": "10.9.0.0/16"}}])))
    assert [reaches(narrow, source, UI, 8011) for source in (CLIENT, End(address="10.9.1.1"))] == [False, True]
    assert reaches(narrow, UI, INGRESS, 8010)


def test_metrics_are_closed_without_monitors() -> None:
    assert not reaches(render(), PROMETHEUS, HEAD, 8080)


def test_policies_are_the_same_whatever_the_ports_so_that_the_pods_of_an_old_ray_cluster_stay_reachable() -> None:
    moved = render(merged(ALL, at("config.ingress.port", 8011), at("config.protocol.port", 8021)))
    assert moved.of("NetworkPolicy") == render(ALL).of("NetworkPolicy")
    assert [reaches(moved, CLIENT, INGRESS, 8011), reaches(moved, INGRESS, MODEL, 8021)] == [True, True]
    assert [reaches(moved, CLIENT, INGRESS, 8010), reaches(moved, INGRESS, MODEL, 8020)] == [False, False]


def test_replicas_read_kv_of_each_other_on_their_models_ports_alone() -> None:
    weights = {"model": "embedded:smollm2-135m-instruct"}
    models = {
        "a": weights | {"kv": {"transfer": "nixl"}},
        "b": weights | {"kv": {"transfer": "nixl", "port": 20000}},
        "c": weights,
    }
    moving = render(merged(ALL, at("config.models", models)))
    edges = (15599, 15600, 15855, 15856, 19999, 20000, 20255, 20256)
    assert [port for port in edges if reaches(moving, MODEL, MODEL, port)] == [15600, 15855, 20000, 20255]
    outsiders = (CLIENT, NEIGHBOUR, OTHER_RELEASE, INGRESS, HEAD, UI)
    assert [end for end in outsiders if reaches(moving, end, MODEL, 15600) or reaches(moving, MODEL, end, 15600)] == []
    assert not reaches(render(merged(ALL, at("config.models", {"c": weights | {"kv": {"port": 15600}}}))), MODEL, MODEL, 15600)


@pytest.mark.parametrize(
    ("address", "port"),
    [("redis://redis-7", 6379), ("redis://10.0.0.5", 6379), ("rediss://host:6380/0", 6380), ("rediss://host:6380/", 6380)],
)
def test_the_head_reaches_redis_at_the_port_of_its_address(address: str, port: int) -> None:
    rendered = render({"gcsFaultTolerance": {"enabled": True, "address": address}})
    (policy,) = (p for name, p in rendered.of("NetworkPolicy").items() if name.endswith("head-to-redis"))
    assert [p["port"] for rule in policy["spec"]["egress"] for p in rule["ports"]] == [port]


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({"s3Endpoint": "http://minio:9000"}, [443, 9000]),
        ({"huggingFaceEndpoint": "https://mirror:8443/hub"}, [443, 8443]),
        ({"huggingFaceEndpoint": "http://mirror", "s3Endpoint": "https://s3.example.com/a:1"}, [443, 80]),
        ({"huggingFaceEndpoint": "https://mirror:8443", "s3Endpoint": "https://[fd00::1]:8443"}, [443, 8443]),
    ],
    ids=str,
)
def test_downloads_reach_an_endpoint_at_its_port(values: dict[str, str], ports: list[int]) -> None:
    rendered = render(merged(ALL, at("weights", values)))
    assert [port for port in (80, 443, 8443, 9000) if reaches(rendered, JOB, HUB, port)] == sorted(ports)
