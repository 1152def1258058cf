"""These rows of test_lint.py are about what values open to the world, or set in vain."""

from tests.chart.lint_rows import Check
from tests.chart.places import ALB, OUTER
from tests.chart.render import at, merged

BALANCER = merged(OUTER, at("service.type", "LoadBalancer"))
NO_KEYS = at("apiKeys.enabled", False)
SCHEME = {"alb.ingress.kubernetes.io/scheme": "internet-facing"}
INTERVAL = "alb.ingress.kubernetes.io/healthcheck-interval-seconds"
FAILURES = "alb.ingress.kubernetes.io/unhealthy-threshold-count"
BALANCER_ATTRIBUTES = "alb.ingress.kubernetes.io/load-balancer-attributes"
TARGET_ATTRIBUTES = "alb.ingress.kubernetes.io/target-group-attributes"
REDIS = {"enabled": True, "address": "redis://r"}

EDGE: list[Check] = [
    (
        "an annotation that opens the models to the internet",
        merged(NO_KEYS, at("ingress", {"enabled": True, "annotations": SCHEME})),
        ("alb.ingress.kubernetes.io/scheme in ingress.annotations is internet-facing", "apiKeys.enabled is false"),
        at("ingress", {"enabled": True, "annotations": {**SCHEME, "alb.ingress.kubernetes.io/inbound-cidrs": "10.0.0.0/8"}}),
    ),
    (
        "a Service for everybody",
        merged(NO_KEYS, BALANCER),
        ("service.type is LoadBalancer, apiKeys.enabled is false", "loadBalancerSourceRanges is empty", "enable the keys"),
        merged(NO_KEYS, BALANCER, at("service.loadBalancerSourceRanges", ["10.0.0.0/8"])),
    ),
    *[
        (
            f"{value} of a health check",
            merged(ALB, at("ingress.annotations", {name: value})),
            (f'{name}: "{value}"', "write digits alone"),
            merged(ALB, at("ingress.annotations", {name: "2"})),
        )
        for name, value in ((INTERVAL, "30s"), (FAILURES, "two"))
    ],
    *[
        (
            f"{attribute} of the chart and of an annotation",
            merged(ALB, at("ingress.annotations", {name: f"a.b=c, {attribute}=30"})),
            (f"{name} with {attribute}=30", f"{way} makes it {made}", "remove the former"),
            merged(ALB, at("ingress.annotations", {name: f"a.b=c,{attribute}={made}"})),
        )
        for name, attribute, way, made in (
            (BALANCER_ATTRIBUTES, "idle_timeout.timeout_seconds", "timeouts.loadBalancerIdleSeconds", 120),
            (TARGET_ATTRIBUTES, "deregistration_delay.timeout_seconds", "config.timeouts.drain_s", 600),
        )
    ],
    (
        "an AWS load balancer that finds no certificate",
        merged(ALB, at("ingress.hosts", [])),
        ("ingress.albCertificateArn and ingress.hosts are empty", "name the certificate"),
        merged(ALB, at("ingress", {"hosts": [], "albCertificateArn": "arn:aws:acm:eu-west-1:1:certificate/a"})),
    ),
    (
        "a Redis of many shards",
        at("gcsFaultTolerance", {"enabled": True, "address": "rediss://a-b.serverless.euw1.cache.amazonaws.com:6379"}),
        ("gcsFaultTolerance.address is rediss://a-b.serverless.euw1", "name a node-based one"),
        at("gcsFaultTolerance", {"enabled": True, "address": "rediss://master.a.b.euw1.cache.amazonaws.com:6379"}),
    ),
    (
        "values of other charts below a section",
        merged(at("monitoring.release", ""), at("ingress.certificateArn", "arn:a")),
        (
            "foreign-key: monitoring.release: unknown key; set monitoring.labels: {release: NAME}",
            "foreign-key: ingress.certificateArn: unknown key; set ingress.albCertificateArn",
        ),
        at("monitoring.labels", {"release": "r"}),
    ),
    (
        "a certificate of no host",
        at("ingress", {"enabled": True, "tlsSecretName": "t"}),
        ("ingress.tlsSecretName is t, but ingress.hosts is empty", "name the hosts"),
        at("ingress", {"enabled": True, "tlsSecretName": "t", "hosts": ["h"]}),
    ),
    (
        "a route without a gateway",
        at("httpRoute.enabled", True),
        ("httpRoute.enabled is true, but httpRoute.parentRefs is empty", "name yours"),
        at("httpRoute", {"enabled": True, "parentRefs": [{"name": "gateway"}]}),
    ),
]

EFFECT: list[Check] = [
    *[
        (
            f"{path} in vain",
            at(path, value),
            (f"{path} is {str(value).lower()}, but {other} is {shown}: ", "set the latter, or remove the former"),
            merged(context, at(path, value)),
        )
        for path, value, other, shown, context in (
            ("gcsFaultTolerance.address", "redis://r", "gcsFaultTolerance.enabled", "false", {"gcsFaultTolerance": REDIS}),
            (
                "batches.databaseSecret",
                "s",
                "config.ingress.batch.files",
                "empty",
                {"config": {"ingress": {"batch": {"files": "s3://b/p"}}}},
            ),
            ("gcsFaultTolerance.existingSecret", "s", "gcsFaultTolerance.enabled", "false", {"gcsFaultTolerance": REDIS}),
            ("gcsFaultTolerance.username", "u", "gcsFaultTolerance.address", "empty", {"gcsFaultTolerance": REDIS}),
            ("weights.existingClaim", "c", "weights.enabled", "false", at("weights.enabled", True)),
            ("monitoring.prometheusRules", True, "monitoring.podMonitors", "false", at("monitoring.podMonitors", True)),
        )
    ],
    (
        "a Redis of the chart's that is not made",
        at("gcsFaultTolerance.redis", {"podLabels": {"a": "b"}, "persistence": {"storageClass": "gp3"}}),
        ("gcsFaultTolerance.redis sets podLabels, persistence.storageClass, but gcsFaultTolerance.enabled is false: ",),
        # Values with an address may be laid over values of the chart's own Redis.
        at("gcsFaultTolerance", REDIS | {"redis": {"podLabels": {"a": "b"}}}),
    ),
    (
        "a Secret of keys that nobody is asked for",
        merged(NO_KEYS, at("apiKeys.existingSecret", "s")),
        ("apiKeys.existingSecret is s, but apiKeys.enabled is false: ",),
        at("apiKeys.existingSecret", "s"),
    ),
    (
        "a Secret of tenants that nobody is asked for",
        merged(NO_KEYS, at("tenants.existingSecret", "s")),
        ("tenants.existingSecret is s, but apiKeys.enabled is false: ",),
        at("tenants.existingSecret", "s"),
    ),
    (
        "tenants whose keys nobody is asked for",
        merged(NO_KEYS, at("tenants.inline", {"blue": {}, "red": {}})),
        ("tenants.inline is blue, red, but apiKeys.enabled is false: ",),
        at("tenants.inline", {"blue": {}, "red": {}}),
    ),
    (
        "a Secret of keys beside tenants",
        merged(at("apiKeys.existingSecret", "k"), at("tenants.existingSecret", "s")),
        ("apiKeys.existingSecret is k, but there are tenants",),
        at("tenants.existingSecret", "s"),
    ),
    (
        "tenants twice",
        at("tenants", {"existingSecret": "s", "inline": {"red": {}}}),
        ("tenants.existingSecret is s, but tenants.inline has tenants too",),
        at("tenants.inline", {"red": {}}),
    ),
    (
        "source ranges that keep nobody out",
        at("service.loadBalancerSourceRanges", ["10.0.0.0/8"]),
        ("loadBalancerSourceRanges is 10.0.0.0/8, but service.type is ClusterIP",),
        merged(BALANCER, at("service.loadBalancerSourceRanges", ["10.0.0.0/8"])),
    ),
]
