"""These rows of test_values.py are about how clients and peers reach the fleet: Services, routes, Secrets and network policies."""

from serve_app.config.tenants_file import parse_tenants
from tests.chart.places import (
    ALB,
    INGRESS,
    LOADED,
    MAPPING,
    MODEL,
    MONITORS,
    OUTER,
    OUTSIDE,
    ROUTE,
    Row,
    annotations,
    only,
    policy,
    secrets_of,
)
from tests.chart.render import Rendered, at, merged


def tenants_of(rendered: Rendered) -> list[tuple[str, str, str, int | None]]:
    """Return tenant, id, last day and context of each key in the Secret that the chart makes, as an ingress reads it."""
    found = parse_tenants(rendered.of("Secret")["tenants"]["stringData"]["tenants.yaml"]).tenants
    return [(name, key.id, str(key.expires), each.limits.max_context) for name, each in found.items() for key in each.keys]


HOST = merged(INGRESS, at("ingress.hosts", ["h"]))

EDGE: list[Row] = [
    ("service.type", "LoadBalancer", lambda r: r.of("Service")[""]["spec"]["type"], "LoadBalancer", OUTER),
    (
        "service.port",
        81,
        lambda r: r.of("Service")[""]["spec"]["ports"],
        [{"name": "http", "port": 81, "targetPort": "http"}],
        {},
    ),
    ("service.annotations", MAPPING, annotations("Service"), MAPPING, {}),
    (
        "service.loadBalancerSourceRanges",
        ["10.0.0.0/8"],
        lambda r: r.of("Service")[""]["spec"]["loadBalancerSourceRanges"],
        ["10.0.0.0/8"],
        merged(OUTER, at("service.type", "LoadBalancer")),
    ),
    ("ingress.enabled", True, lambda r: len(r.of("Ingress")), 1, {}),
    ("ingress.className", "c", lambda r: only(r.of("Ingress"))["spec"]["ingressClassName"], "c", INGRESS),
    (
        "ingress.alb",
        True,
        lambda r: annotations("Ingress")(r)["alb.ingress.kubernetes.io/target-type"],
        "ip",
        merged(ALB, at("ingress.alb", False)),
    ),
    (
        "ingress.albScheme",
        "internet-facing",
        lambda r: annotations("Ingress")(r)["alb.ingress.kubernetes.io/scheme"],
        "internet-facing",
        merged(ALB, at("tenants.existingSecret", "s")),
    ),
    (
        "ingress.albCertificateArn",
        "arn:aws:acm:a",
        lambda r: annotations("Ingress")(r)["alb.ingress.kubernetes.io/certificate-arn"],
        "arn:aws:acm:a",
        ALB,
    ),
    ("ingress.annotations", MAPPING, lambda r: annotations("Ingress")(r)["a/b"], "c", ALB),
    (
        "ingress.hosts",
        ["a", "b"],
        lambda r: [rule["host"] for rule in only(r.of("Ingress"))["spec"]["rules"]],
        ["a", "b"],
        INGRESS,
    ),
    ("ingress.tlsSecretName", "t", lambda r: only(r.of("Ingress"))["spec"]["tls"][0]["secretName"], "t", HOST),
    (
        "ingress.tls",
        [{"hosts": ["a"], "secretName": "t"}],
        lambda r: only(r.of("Ingress"))["spec"]["tls"][0]["secretName"],
        "t",
        HOST,
    ),
    ("httpRoute.enabled", True, lambda r: len(r.of("HTTPRoute")), 1, at("httpRoute.parentRefs", [{"name": "g"}])),
    ("httpRoute.parentRefs", [{"name": "h"}], lambda r: only(r.of("HTTPRoute"))["spec"]["parentRefs"], [{"name": "h"}], ROUTE),
    ("httpRoute.hostnames", ["a"], lambda r: only(r.of("HTTPRoute"))["spec"]["hostnames"], ["a"], ROUTE),
    ("httpRoute.annotations", MAPPING, annotations("HTTPRoute"), MAPPING, ROUTE),
]

SECRETS: list[Row] = [
    ("clusterToken.existingSecret", "s", lambda r: ("cluster-token" in r.of("Secret"), secrets_of(r, MODEL)), (False, ["s"]), {}),
    ("rayToken.existingSecret", "s", lambda r: r.cluster["authOptions"], {"mode": "token", "secretName": "s"}, {}),
    (
        "apiKeys.enabled",
        False,
        lambda r: ("api-keys" in r.of("Secret"), "api_keys_file" in r.config["ingress"]),
        (False, False),
        {},
    ),
    ("apiKeys.existingSecret", "s", lambda r: secrets_of(r, "ingress"), ["demo-cluster-token", "s"], {}),
    (
        "tenants.existingSecret",
        "s",
        lambda r: (secrets_of(r, "ingress"), r.config["ingress"]["tenants_file"], "api-keys" in r.of("Secret")),
        (["demo-cluster-token", "s"], "/etc/serve-app/tenants/tenants.yaml", False),
        {},
    ),
    (
        "tenants.inline",
        {"red": {"keys": [{"id": "r1", "sha256": "0" * 64, "expires": "2027-01-31"}], "limits": {"max_context": 2_000_000}}},
        lambda r: (secrets_of(r, "ingress"), tenants_of(r), "api_keys_file" in r.config["ingress"], "api-keys" in r.of("Secret")),
        (["demo-cluster-token", "demo-tenants"], [("red", "r1", "2027-01-31", 2_000_000)], False, False),
        {},
    ),
    (
        "batches.databaseSecret",
        "s",
        lambda r: secrets_of(r, "ingress"),
        ["demo-cluster-token", "demo-api-keys", "s"],
        at("config.ingress.batch.files", "s3://bucket/prefix"),
    ),
]

PEER = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
RANGE = ["10.1.0.0/16"]

POLICIES: list[Row] = [
    ("networkPolicies.enabled", False, lambda r: r.of("NetworkPolicy"), {}, {}),
    ("networkPolicies.clients", PEER, lambda r: policy("clients")(r)["ingress"][0]["from"], PEER, {}),
    (
        "networkPolicies.operatorNamespace",
        "o",
        lambda r: policy("operator")(r)["ingress"][0]["from"],
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "o"}}}],
        {},
    ),
    (
        "networkPolicies.prometheusNamespace",
        "o",
        lambda r: policy("prometheus-head")(r)["ingress"][0]["from"],
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "o"}}}],
        MONITORS,
    ),
    ("networkPolicies.dns", PEER, lambda r: policy("dns")(r)["egress"][0]["to"], PEER, {}),
    ("networkPolicies.apiServerCidrs", RANGE, lambda r: policy("api-server")(r)["egress"][0]["to"], PEER, {}),
    (
        "networkPolicies.apiServerPorts",
        [444],
        lambda r: policy("api-server")(r)["egress"][0]["ports"],
        [{"protocol": "TCP", "port": 444}],
        {},
    ),
    ("networkPolicies.weightsCidrs", RANGE, lambda r: policy("weights")(r)["egress"][0]["to"], PEER, LOADED),
    ("networkPolicies.redisCidrs", RANGE, lambda r: policy("head-to-redis")(r)["egress"][0]["to"], PEER, OUTSIDE),
    (
        "networkPolicies.weightsPorts",
        [3128],
        lambda r: [p["port"] for p in policy("weights")(r)["egress"][0]["ports"]],
        [443, 3128],
        LOADED,
    ),
    ("networkPolicies.extraEgress", [{"to": PEER}], lambda r: policy("extra-egress")(r)["egress"], [{"to": PEER}], {}),
]
