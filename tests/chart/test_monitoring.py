"""Alerts and the dashboard ask for series that exist, of the jobs that the PodMonitors make."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric
from vllm.v1.metrics import loggers

from serve_app.core.fleet import FleetSettings, FleetState
from serve_app.ingress.metrics import FleetCollector
from tests.chart.render import Rendered, at, merged, render

MONITORED = merged(at("monitoring.podMonitors", True), at("monitoring.prometheusRules", True), at("monitoring.dashboards", True))


def expressions(r: Rendered) -> Iterator[str]:
    """Yield every PromQL expression of alerts and dashboard."""
    for rule in r.of("PrometheusRule")[""]["spec"]["groups"][0]["rules"]:
        yield rule["expr"]
    board = json.loads(r.of("ConfigMap")["dashboard"]["data"]["demo.json"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def fleet_series() -> dict[str, set[str]]:
    """Name -> labels of the series of an ingress, as the collector names them."""
    metrics: list[Metric] = list(FleetCollector([FleetState(FleetSettings(model="m"))]).collect())
    found = {m.name + ("_total" if m.type == "counter" else ""): set(m._labelnames) for m in metrics}  # type: ignore[attr-defined]
    return found


def test_every_series_exists() -> None:
    source = Path(loggers.__file__).read_text(encoding="utf-8")
    asked = {name for e in expressions(render(MONITORED)) for name in re.findall(r"\b(?:vllm:|serve_app_)\w+", e)}
    ours = {name for name in asked if name.startswith("serve_app_")}
    theirs = {name.removesuffix("_bucket") for name in asked - ours}
    assert len(ours) >= 5
    assert len(theirs) >= 2
    assert ours - fleet_series().keys() == set()
    assert {name for name in theirs if f'name="{name}"' not in source} == set()


def test_every_label_that_is_asked_for_exists() -> None:
    known = {"job", "le", "model_name", "namespace", "app_kubernetes_io_instance"}.union(*fleet_series().values())
    for e in expressions(render(MONITORED)):
        grouped = [label.strip() for group in re.findall(r"by \(([^)]*)\)", e) for label in group.split(",")]
        matched = re.findall(r"[{,](\w+)=~?\"", e)
        assert {*grouped, *matched} - known == set(), e


def test_alerts_ask_the_job_that_the_pod_monitor_of_the_ingress_makes() -> None:
    r = render(MONITORED)
    assert "ingress" in r.of("PodMonitor")
    rules = r.of("PrometheusRule")[""]["spec"]["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules if 'job="serving/demo-ingress"' not in rule["expr"]] == []


def test_every_alert_has_a_severity_and_a_summary() -> None:
    rules = render(MONITORED).of("PrometheusRule")[""]["spec"]["groups"][0]["rules"]
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning"}
    assert all(rule["annotations"]["summary"].endswith(".") for rule in rules)


def test_pod_monitors_scrape_ports_that_their_pods_have() -> None:
    r = render(MONITORED)
    ports = {g: {p["name"] for p in r.container(g)["ports"]} for g in ("head", "ingress", "model-0")}
    assert all("metrics" in found for found in ports.values())
    assert [e["port"] for e in r.of("PodMonitor")["ingress"]["spec"]["podMetricsEndpoints"]] == ["http"]
    assert "http" in ports["ingress"]
