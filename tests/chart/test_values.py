"""Every value of values.yaml shows where it should: one row per value, and no value without a row."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.places import (
    ALB,
    BOARD,
    CLASSES,
    FT,
    GPU,
    INGRESS,
    LOADED,
    LOADED_S3,
    MAPPING,
    MODEL,
    MONITORS,
    OUTER,
    OUTSIDE,
    ROUTE,
    RULES,
    TOLERATION,
    Place,
    Row,
    alert,
    annotations,
    images,
    only,
    pods,
    policy,
    pull_secrets,
    resources,
    secrets_of,
    slo,
)
from tests.chart.render import CHART, Object, Rendered, at, merged, models, render
from tests.chart.stored_rows import REDIS, WEIGHTS
from tests.chart.test_generated import leaves

DIGEST = "sha256:" + "d" * 64
SIMULATED = models({"name": "m", "model": "/opt/m", "simulated": {"profile": "a10g-llama-8b"}})
HOST = merged(INGRESS, at("ingress.hosts", ["h"]))
MODEL_GROUP = "model-smollm2-135m-instruct"
UNNAMED = {"model": "/opt/m", "device": "cuda", "gpus_per_replica": 2}
AMOUNTS = {"requests": {"cpu": "11m", "memory": "12Mi", "ephemeral-storage": "13Mi"}, "limits": {"cpu": "130", "memory": "140Gi"}}

UI = at("ui.enabled", True)
EVERYTHING = merged(GPU, FT, LOADED, MONITORS, at("modelPods.headroom", {"pods": 1, "priorityClassName": "low"}))


def uninstall(r: Rendered) -> Object:
    return dict(r.of("Job")["uninstall"]["spec"]["template"])


def pages(r: Rendered) -> Object:
    return dict(r.of("Deployment")["ui"]["spec"]["template"])


def checked(r: Rendered) -> Object:
    return dict(r.of("Job")["check"]["spec"]["template"])


def containers(spec: Object) -> list[Object]:
    return [*spec["containers"], *spec.get("initContainers", [])]


def accounts(r: Rendered) -> set[str]:
    """Return the accounts that pods run as."""
    return {pod["spec"]["serviceAccountName"] for _, pod in r.pod_templates()}


def all_labels(r: Rendered) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the labels of all objects and pods."""
    for o in r.objects:
        yield f"{o['kind']} {o['metadata']['name']}", o["metadata"]["labels"]
    for where, template in r.pod_templates():
        yield f"pod of {where}", template["metadata"]["labels"]


CONFIG: list[Row] = [
    ("config.models", {"m": UNNAMED, "n": UNNAMED}, lambda r: [*r.config["models"]], ["m", "n"], {}),
    ("config.ingress.port", 8011, lambda r: r.container("ingress")["ports"][0], {"name": "http", "containerPort": 8011}, {}),
    ("config.ingress.num_cpus", 2.5, lambda r: r.group("ingress")["rayStartParams"]["num-cpus"], "3", {}),
    ("config.ingress.keep_alive_s", 131, lambda r: r.config["ingress"]["keep_alive_s"], 131, {}),
    ("config.ingress.unready_s", 7, lambda r: r.environment("ingress")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"], "627", {}),
    ("config.ingress.replicas.min", 2, lambda r: r.group("ingress")["replicas"], 2, at("config.ingress.replicas.max", 2)),
    ("config.ingress.replicas.max", 3, lambda r: r.config["ingress"]["replicas"]["max"], 3, {}),
    ("config.protocol.port", 8021, lambda r: r.container(MODEL)["ports"][0], {"name": "link", "containerPort": 8021}, {}),
    ("config.timeouts.drain_s", 100, lambda r: r.pod(MODEL)["terminationGracePeriodSeconds"], 141, {}),
    ("config.timeouts.no_replica_s", 31, lambda r: r.config["timeouts"]["no_replica_s"], 31, {}),
]

PODS: list[Row] = [
    (
        "global.imageRegistry",
        "r.example:5000/mirror/",
        lambda r: sorted({c["image"] for _, pod in r.pod_templates() for c in containers(pod["spec"])}),
        [
            f"r.example:5000/mirror/{name}"
            for name in ("aws-cli/aws-cli:2.31.18", "serve-app:0.1.0", "serve-app:0.1.0-cuda", "valkey/valkey:8.1.4-bookworm")
        ],
        merged(EVERYTHING, LOADED_S3),
    ),
    ("global.imagePullSecrets", ["s"], lambda r: {*map(tuple, pull_secrets(r).values())}, {("s",)}, EVERYTHING),
    (
        "cudaImage.pullPolicy",
        "Always",
        lambda r: [r.container(g)["imagePullPolicy"] for g in ("head", MODEL)],
        ["IfNotPresent", "Always"],
        GPU,
    ),
    (
        "cudaImage.pullSecrets",
        ["s"],
        lambda r: [where for where, secrets in pull_secrets(r).items() if secrets == ["s"]],
        ["Deployment demo-headroom-m", "RayService demo model-m"],
        merged(GPU, at("modelPods.headroom", {"pods": 1, "priorityClassName": "low"})),
    ),
    (
        "weights.s3Image.pullSecrets",
        ["s"],
        lambda r: [secrets for where, secrets in pull_secrets(r).items() if where.startswith("Job demo-weights")],
        [["s"]],
        LOADED_S3,
    ),
    *images("image", lambda r: r.container("head"), {}, name="localhost/serve-app"),
    (
        "image.pullSecrets",
        ["s"],
        lambda r: [p["spec"]["imagePullSecrets"] for _, p in r.pod_templates()],
        [[{"name": "s"}]] * 5,
        {},
    ),
    ("cudaImage.repository", "h/i", lambda r: r.container(MODEL)["image"], "h/i:0.1.0-cuda", GPU),
    ("cudaImage.tag", "9.9", lambda r: r.container(MODEL)["image"], "localhost/serve-app:9.9", GPU),
    ("cudaImage.digest", DIGEST, lambda r: r.container(MODEL)["image"], f"localhost/serve-app@{DIGEST}", GPU),
    ("rayVersion", "2.61.0", lambda r: r.cluster["rayVersion"], "2.61.0", {}),
    *pods("head", "head"),
    *resources("head.resources", lambda r: r.container("head")["resources"], disk=True),
    *pods("ingressPods", "ingress"),
    *resources("ingressPods.resources", lambda r: r.container("ingress")["resources"], disk=True),
    *pods("modelPods", MODEL),
    ("modelPods.resources", AMOUNTS, lambda r: r.container(MODEL)["resources"], AMOUNTS, {}),
    ("modelPods.image", "cuda", lambda r: r.container(MODEL)["image"], "localhost/serve-app:0.1.0-cuda", SIMULATED),
    (
        "modelPods.compileCache.existingClaim",
        "c",
        lambda r: r.pod(MODEL)["volumes"][3],
        {"name": "compile-cache", "persistentVolumeClaim": {"claimName": "c"}},
        GPU,
    ),
    ("head.preStopSleepSeconds", 44, lambda r: r.pod("head")["terminationGracePeriodSeconds"], 74, {}),
    (
        "ingressPods.spot",
        True,
        lambda r: r.pod("ingress")["terminationGracePeriodSeconds"],
        141,
        at("config.timeouts.drain_s", 100),
    ),
    (
        "ingressPods.spotNoticeSeconds",
        606,
        lambda r: r.pod("ingress")["terminationGracePeriodSeconds"],
        641,
        at("ingressPods.spot", True),
    ),
    (
        "ingressPods.topologySpread",
        "DoNotSchedule",
        lambda r: [(c["whenUnsatisfiable"], c["nodeTaintsPolicy"]) for c in r.pod("ingress")["topologySpreadConstraints"]],
        [("DoNotSchedule", "Honor")] * 2,
        {},
    ),
    ("modelPods.topologySpread", "", lambda r: r.pod(MODEL).get("topologySpreadConstraints"), None, {}),
    ("modelPods.onePerNode", False, lambda r: r.pod(MODEL).get("affinity"), None, GPU),
    ("modelPods.gpusPerNode", 2, lambda r: r.container(MODEL)["resources"]["limits"]["nvidia.com/gpu"], 2, GPU),
    ("modelPods.gpuResource", "amd.com/gpu", lambda r: r.container(MODEL)["resources"]["limits"]["amd.com/gpu"], 2, GPU),
    ("modelPods.runtimeClassName", "nvidia", lambda r: r.pod(MODEL)["runtimeClassName"], "nvidia", GPU),
    (
        "modelPods.headroom.pods",
        2,
        lambda r: r.of("Deployment")["headroom-smollm2-135m-instruct"]["spec"]["replicas"],
        2,
        at("modelPods.headroom.priorityClassName", "low"),
    ),
    (
        "modelPods.headroom.priorityClassName",
        "low",
        lambda r: r.of("Deployment")["headroom-smollm2-135m-instruct"]["spec"]["template"]["spec"]["priorityClassName"],
        "low",
        at("modelPods.headroom.pods", 1),
    ),
    ("autoscaler.idleTimeoutSeconds", 9, lambda r: r.cluster["autoscalerOptions"]["idleTimeoutSeconds"], 9, {}),
    ("autoscaler.upscalingMode", "Conservative", lambda r: r.cluster["autoscalerOptions"]["upscalingMode"], "Conservative", {}),
    *resources("autoscaler.resources", lambda r: r.cluster["autoscalerOptions"]["resources"]),
    ("objectStore.bytes", 80000000, lambda r: r.group(MODEL)["rayStartParams"]["object-store-memory"], "80000000", {}),
]

TIMEOUTS: list[Row] = [
    ("timeouts.clientSeconds", 901, lambda r: only(r.of("HTTPRoute"))["spec"]["rules"][0]["timeouts"]["request"], "901s", ROUTE),
    (
        "timeouts.loadBalancerIdleSeconds",
        121,
        lambda r: annotations("Ingress")(r)["alb.ingress.kubernetes.io/load-balancer-attributes"],
        "idle_timeout.timeout_seconds=121",
        ALB,
    ),
    ("timeouts.prefillSeconds", 90, lambda r: len(r.objects) > 0, True, {}),  # only checked: test_lint.py
    ("timeouts.preStopSleepSeconds", 6, lambda r: r.container(MODEL)["lifecycle"]["preStop"], {"sleep": {"seconds": 6}}, {}),
    (
        "timeouts.rayDrainSeconds",
        700,
        lambda r: r.environment("ingress")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"],
        "700",
        {},
    ),
    ("timeouts.gcsReconnectSeconds", 999, lambda r: r.environment("head")["RAY_gcs_rpc_server_reconnect_timeout_s"], "999", {}),
    ("timeouts.terminationGracePeriodSeconds", 900, lambda r: r.pod("ingress")["terminationGracePeriodSeconds"], 900, {}),
    ("timeouts.rayClusterDeletionDelaySeconds", 800, lambda r: r.service["rayClusterDeletionDelaySeconds"], 800, {}),
]

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
        ALB,
    ),
    (
        "ingress.albCertificateArn",
        "arn",
        lambda r: annotations("Ingress")(r)["alb.ingress.kubernetes.io/certificate-arn"],
        "arn",
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

CLUSTER: list[Row] = [
    ("podDisruptionBudgets.keepLast", True, lambda r: [*r.of("PodDisruptionBudget")], ["ingress", MODEL_GROUP], {}),
    (
        "podDisruptionBudgets.enabled",
        False,
        lambda r: r.of("PodDisruptionBudget"),
        {},
        at("config.ingress.replicas", {"min": 3, "max": 3}),
    ),
    ("podDisruptionBudgets.head", True, lambda r: r.of("PodDisruptionBudget")["head"]["spec"]["minAvailable"], 1, {}),
    (
        "priorityClasses.create",
        True,
        lambda r: [r.pod(g)["priorityClassName"] for g in ("head", MODEL)],
        ["demo-head.serving", "demo-worker.serving"],
        {},
    ),
    ("priorityClasses.headValue", 7, lambda r: r.of("PriorityClass")["head.serving"]["value"], 7, CLASSES),
    ("priorityClasses.workerValue", 7, lambda r: r.of("PriorityClass")["worker.serving"]["value"], 7, CLASSES),
    *[
        row
        for account in ("head", "worker", "weights")
        for row in (
            (f"serviceAccounts.{account}.annotations", MAPPING, annotations("ServiceAccount", account), MAPPING, LOADED),
            (
                f"serviceAccounts.{account}.create",
                False,
                lambda r, account=account: account in r.of("ServiceAccount"),
                False,
                merged(LOADED, at(f"serviceAccounts.{account}.name", "s")),
            ),
            (
                f"serviceAccounts.{account}.name",
                "s",
                lambda r, account=account: ("s" in r.of("ServiceAccount"), "s" in accounts(r), f"demo-{account}" in accounts(r)),
                (True, True, False),
                EVERYTHING,
            ),
        )
    ],
    (
        "fullnameOverride",
        "demo-x",
        lambda r: sorted({name.partition("-")[0] for o in r.objects if (name := o["metadata"]["name"].removeprefix("demo-"))}),
        ["x"],
        merged(EVERYTHING, CLASSES),
    ),
    (
        "commonAnnotations",
        MAPPING,
        lambda r: [o["kind"] for o in r.objects if o["metadata"].get("annotations", {}).get("a/b") != "c"],
        [],
        EVERYTHING,
    ),
    ("monitoring.podMonitors", True, lambda r: sorted(r.of("PodMonitor")), ["ingress", "ray"], {}),
    ("monitoring.prometheusRules", True, lambda r: len(r.of("PrometheusRule")), 1, MONITORS),
    ("monitoring.dashboards", True, lambda r: "dashboard" in r.of("ConfigMap"), True, {}),
    ("monitoring.labels", MAPPING, lambda r: r.of("PodMonitor")["ray"]["metadata"]["labels"]["a/b"], "c", MONITORS),
    (
        "monitoring.dashboardLabels.grafana_dashboard",
        "2",
        lambda r: r.of("ConfigMap")["dashboard"]["metadata"]["labels"]["grafana_dashboard"],
        "2",
        BOARD,
    ),
    (
        "monitoring.scrapeIntervalSeconds",
        9,
        lambda r: r.of("PodMonitor")["ray"]["spec"]["podMetricsEndpoints"][0]["interval"],
        "9s",
        MONITORS,
    ),
    ("monitoring.waitingRequestsAlert", 77, lambda r: alert(r, "ServeAppRequestsWait")["expr"].endswith("> 77"), True, RULES),
    (
        "monitoring.freeBytesAlert",
        10**10,
        lambda r: alert(r, "ServeAppDiskIsFull")["expr"].endswith("< 10000000000"),
        True,
        RULES,
    ),
    slo("availability", 0.99, "ServeAppRequestsFail", "> 14.4 * (1 - 0.99)"),
    slo("ttft.objective", 0.96, "ServeAppFirstTokensAreLate", "> 14.4 * (1 - 0.96)"),
    slo("ttft.seconds", 5, "serve_app:ttft_errors:ratio_rate5m", 'le=~"5([.]0)?"'),
    slo("itl.objective", 0.96, "ServeAppTokensAreLate", "> 14.4 * (1 - 0.96)"),
    slo("itl.seconds", 0.5, "serve_app:itl_errors:ratio_rate5m", 'le=~"0.5([.]0)?"'),
    slo("minRequests", 7, "ServeAppRequestsFail", ">= 7"),
    (
        "monitoring.runbookUrl",
        "https://r",
        lambda r: alert(r, "ServeAppDown")["annotations"]["runbook_url"],
        "https://r#serveappdown",
        RULES,
    ),
    (
        "monitoring.grafanaUrl",
        "https://g/",
        lambda r: alert(r, "ServeAppDown")["annotations"]["dashboard_url"].startswith("https://g/d/serve-app-"),
        True,
        RULES,
    ),
    ("test.apiKeySecret", "s", lambda r: only(r.of("Pod"))["spec"]["volumes"][1]["secret"]["secretName"], "s", {}),
    ("test.nodeSelector", MAPPING, lambda r: only(r.of("Pod"))["spec"]["nodeSelector"], MAPPING, {}),
    ("test.tolerations", TOLERATION, lambda r: only(r.of("Pod"))["spec"]["tolerations"], TOLERATION, {}),
    ("test.podLabels", MAPPING, lambda r: only(r.of("Pod"))["metadata"]["labels"]["a/b"], "c", {}),
    ("uninstall.nodeSelector", MAPPING, lambda r: uninstall(r)["spec"]["nodeSelector"], MAPPING, FT),
    ("uninstall.tolerations", TOLERATION, lambda r: uninstall(r)["spec"]["tolerations"], TOLERATION, FT),
    ("uninstall.podLabels", MAPPING, lambda r: uninstall(r)["metadata"]["labels"]["a/b"], "c", FT),
    ("check.enabled", False, lambda r: "check" in r.of("Job"), False, {}),
    ("check.timeoutSeconds", 99, lambda r: r.of("Job")["check"]["spec"]["activeDeadlineSeconds"], 99, {}),
    ("check.nodeSelector", MAPPING, lambda r: checked(r)["spec"]["nodeSelector"], MAPPING, {}),
    ("check.tolerations", TOLERATION, lambda r: checked(r)["spec"]["tolerations"], TOLERATION, {}),
    ("check.podLabels", MAPPING, lambda r: checked(r)["metadata"]["labels"]["a/b"], "c", {}),
    ("ui.enabled", True, lambda r: "ui" in r.of("Deployment"), True, {}),
    ("ui.port", 99, lambda r: r.of("Service")["ui"]["spec"]["ports"][0]["port"], 99, UI),
    ("ui.nodeSelector", MAPPING, lambda r: pages(r)["spec"]["nodeSelector"], MAPPING, UI),
    ("ui.tolerations", TOLERATION, lambda r: pages(r)["spec"]["tolerations"], TOLERATION, UI),
    ("ui.podLabels", MAPPING, lambda r: pages(r)["metadata"]["labels"]["a/b"], "c", UI),
    *resources("ui.resources", lambda r: pages(r)["spec"]["containers"][0]["resources"], UI),
    *resources("check.resources", lambda r: checked(r)["spec"]["containers"][0]["resources"]),
    (
        "ignoredRules",
        ["image-latest"],
        lambda r: r.container("head")["image"],
        "localhost/serve-app:latest",
        at("image.tag", "latest"),
    ),
    ("commonLabels", MAPPING, lambda r: [where for where, labels in all_labels(r) if labels.get("a/b") != "c"], [], EVERYTHING),
    (
        "podSecurityContext",
        {"runAsNonRoot": True},
        lambda r: [w for w, template in r.pod_templates() if template["spec"]["securityContext"] != {"runAsNonRoot": True}],
        [],
        EVERYTHING,
    ),
    (
        "extraObjects",
        [{"kind": "A", "metadata": {"name": "demo-a"}}, 'kind: A\nmetadata: {name: "{{ .Release.Name }}-b"}'],
        lambda r: sorted(r.of("A")),
        ["a", "b"],
        {},
    ),
    ("test.timeoutSeconds", 99, lambda r: only(r.of("Pod"))["spec"]["activeDeadlineSeconds"], 159, {}),
    *resources("test.resources", lambda r: only(r.of("Pod"))["spec"]["containers"][0]["resources"]),
]


ROWS: list[Row] = [*CONFIG, *PODS, *TIMEOUTS, *EDGE, *SECRETS, *REDIS, *WEIGHTS, *POLICIES, *CLUSTER]


@pytest.mark.parametrize(("path", "value", "place", "expected", "context"), ROWS, ids=[row[0] for row in ROWS])
def test_a_value_shows_in_its_place(path: str, value: Any, place: Place, expected: Any, context: dict[str, Any]) -> None:
    assert place(render(merged(context, at(path, value)))) == expected


def test_every_value_has_a_row_and_every_row_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert sorted(row[0] for row in ROWS) == sorted(".".join(path) for path in leaves(values))


def test_no_row_sets_what_is_the_default_anyway() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = {".".join(path): functools.reduce(lambda value, key: value[key], path, values) for path in leaves(values)}
    assert [path for path, value, *_ in ROWS if value == defaults[path]] == []


@pytest.mark.parametrize(("drain_s", "seconds"), [(30, "600"), (600, "701")])
def test_workers_outlive_the_time_in_which_a_head_is_replaced(drain_s: int, seconds: str) -> None:
    release = render(at("config.timeouts.drain_s", drain_s))
    assert release.environment("ingress")["RAY_gcs_rpc_server_reconnect_timeout_s"] == seconds
