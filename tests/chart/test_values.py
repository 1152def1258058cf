"""Every value of values.yaml has its effect: one row per value, and no value without a row."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.edge_rows import EDGE, POLICIES, SECRETS
from tests.chart.places import (
    ALB,
    BOARD,
    CLASSES,
    FT,
    LOADED,
    MAPPING,
    MODEL,
    MONITORS,
    ROUTE,
    RULES,
    TOLERATION,
    Place,
    Row,
    alert,
    annotations,
    only,
    resources,
    slo,
)
from tests.chart.pod_rows import CONFIG, EVERYTHING, PODS
from tests.chart.render import CHART, Object, Rendered, at, merged, render
from tests.chart.stored_rows import REDIS, WEIGHTS
from tests.chart.test_generated import leaves

MODEL_GROUP = "model-smollm2-135m-instruct"
UI = at("ui.enabled", True)
JOBS = merged(UI, FT, LOADED)


def jobs(r: Rendered) -> dict[str, Object]:
    """Return the templates of the pods beside the serving ones, by component."""
    found = [template for _, template in r.pod_templates()]
    components = {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in found}
    return {name: components[name] for name in ("weights", "check", "test", "uninstall", "ui")}


def pages(r: Rendered) -> Object:
    return dict(r.of("Deployment")["ui"]["spec"]["template"])


def checked(r: Rendered) -> Object:
    return dict(r.of("Job")["check"]["spec"]["template"])


def accounts(r: Rendered) -> set[str]:
    """Return the accounts that pods run as."""
    return {pod["spec"]["serviceAccountName"] for _, pod in r.pod_templates()}


def all_labels(r: Rendered) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the labels of all objects and pods."""
    for o in r.objects:
        yield f"{o['kind']} {o['metadata']['name']}", o["metadata"]["labels"]
    for where, template in r.pod_templates():
        yield f"pod of {where}", template["metadata"]["labels"]


OVERRIDES = {
    **{"rayDrainSeconds": 700, "gcsReconnectSeconds": 999},
    **{"terminationGracePeriodSeconds": 900, "rayClusterDeletionDelaySeconds": 800},
}

TIMEOUTS: list[Row] = [
    ("timeouts.clientSeconds", 901, lambda r: only(r.of("HTTPRoute"))["spec"]["rules"][0]["timeouts"]["request"], "901s", ROUTE),
    (
        "timeouts.loadBalancerIdleSeconds",
        121,
        lambda r: annotations("Ingress")(r)["alb.ingress.kubernetes.io/load-balancer-attributes"],
        "idle_timeout.timeout_seconds=121",
        ALB,
    ),
    ("timeouts.preStopSleepSeconds", 6, lambda r: r.container("ingress")["lifecycle"]["preStop"], {"sleep": {"seconds": 6}}, {}),
    (
        "timeouts.overrides",
        OVERRIDES,
        lambda r: {
            "rayDrainSeconds": int(r.environment("ingress")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]),
            "gcsReconnectSeconds": int(r.environment("head")["RAY_gcs_rpc_server_reconnect_timeout_s"]),
            "terminationGracePeriodSeconds": r.pod("ingress")["terminationGracePeriodSeconds"],
            "rayClusterDeletionDelaySeconds": r.service["rayClusterDeletionDelaySeconds"],
        },
        OVERRIDES,
        {},
    ),
]

CLUSTER: list[Row] = [
    ("upgradeStrategy", "None", lambda r: r.service["upgradeStrategy"], {"type": "None"}, {}),
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
    ("priorityClasses.values.head", 7, lambda r: r.of("PriorityClass")["head.serving"]["value"], 7, CLASSES),
    ("priorityClasses.values.worker", 7, lambda r: r.of("PriorityClass")["worker.serving"]["value"], 7, CLASSES),
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
    ("jobs.nodeSelector", MAPPING, lambda r: [t["spec"]["nodeSelector"] for t in jobs(r).values()], [MAPPING] * 5, JOBS),
    ("jobs.tolerations", TOLERATION, lambda r: [t["spec"]["tolerations"] for t in jobs(r).values()], [TOLERATION] * 5, JOBS),
    ("jobs.podLabels", MAPPING, lambda r: [t["metadata"]["labels"]["a/b"] for t in jobs(r).values()], ["c"] * 5, JOBS),
    ("check.enabled", False, lambda r: "check" in r.of("Job"), False, {}),
    ("check.timeoutSeconds", 99, lambda r: r.of("Job")["check"]["spec"]["activeDeadlineSeconds"], 99, {}),
    ("ui.enabled", True, lambda r: "ui" in r.of("Deployment"), True, {}),
    ("ui.port", 99, lambda r: r.of("Service")["ui"]["spec"]["ports"][0]["port"], 99, UI),
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
ONLY_CHECKED = {"timeouts.prefillSeconds", "timeouts.nodeDrainSeconds"}
"""Values that no object shows: rules check others against them (test_lint_timeouts.py)."""


@pytest.mark.parametrize(("path", "value", "place", "expected", "context"), ROWS, ids=[row[0] for row in ROWS])
def test_a_value_shows_in_its_place(path: str, value: Any, place: Place, expected: Any, context: dict[str, Any]) -> None:
    assert place(render(merged(context, at(path, value)))) == expected


def test_every_value_has_a_row_and_every_row_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert sorted([*(row[0] for row in ROWS), *ONLY_CHECKED]) == sorted(".".join(path) for path in leaves(values))


def test_no_row_sets_what_is_the_default_anyway() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = {".".join(path): functools.reduce(lambda value, key: value[key], path, values) for path in leaves(values)}
    assert [path for path, value, *_ in ROWS if value == defaults[path]] == []


@pytest.mark.parametrize(("drain_s", "seconds"), [(30, "600"), (600, "701")])
def test_workers_outlive_the_time_in_which_a_head_is_replaced(drain_s: int, seconds: str) -> None:
    release = render(at("config.timeouts.drain_s", drain_s))
    assert release.environment("ingress")["RAY_gcs_rpc_server_reconnect_timeout_s"] == seconds
