"""Alerts and the dashboard ask for series that exist, of the jobs that the PodMonitors make."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from vllm.v1.metrics import loggers

from serve_app.core.events import HeartbeatArrived, LinkOpened
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.ingress import metrics as metrics_of_ingress
from serve_app.ingress.connection import CROWDED_CONNECTIONS, STALLED_CLIENTS
from serve_app.ingress.ledger_file import LOST
from serve_app.ingress.metrics import FREE_DISK, CanaryCollector, FleetCollector
from tests.chart.places import alert
from tests.chart.render import Refused, Rendered, at, merged, models, render

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
    """Name -> labels of the series of an ingress, as its collectors name them."""
    collectors = FleetCollector([FleetState(FleetSettings(model="m"))]), CanaryCollector({})
    metrics: list[Metric] = [metric for collector in collectors for metric in collector.collect()]
    found = {m.name + ("_total" if m.type == "counter" else ""): set(m._labelnames) for m in metrics}  # type: ignore[attr-defined]
    buckets = {f"{m.name}_bucket": found[m.name] for m in metrics if m.type == "histogram"}
    counted = (metrics_of_ingress._engines_lost, metrics_of_ingress._requests)
    single = (STALLED_CLIENTS, CROWDED_CONNECTIONS, LOST, *counted)
    counters = {f"{c._name}_total": set(c._labelnames) for c in single}
    return {**found, **buckets, **counters, FREE_DISK._name: set()}


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
    ports = {g: {p["name"] for p in r.container(g)["ports"]} for g in ("head", "ingress", "model")}
    assert all("metrics" in found for found in ports.values())
    assert [e["port"] for e in r.of("PodMonitor")["ingress"]["spec"]["podMetricsEndpoints"]] == ["http"]
    assert "http" in ports["ingress"]


def fleet_with(model: str, **draining: bool) -> FleetState:
    """A fleet of these replicas."""
    fleet = FleetState(FleetSettings(model=model))
    for replica_id, drains in draining.items():
        fleet.handle(LinkOpened(replica_id, credit=1), now=0.0)
        fleet.handle(HeartbeatArrived(replica_id, 1, 0, 0, 0.0, draining=drains), now=0.0)
    return fleet


def test_the_outage_of_an_idle_model_shows_in_the_series_of_the_alert() -> None:
    """`A unless on (model) B`: A has every model, waiting requests or not, and B none that the ingress cannot give a request."""
    registry = CollectorRegistry()
    registry.register(FleetCollector([fleet_with("none"), fleet_with("drains", a=True), fleet_with("one", a=True, b=False)]))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    asked = {s.labels["model"] for s in samples if s.name == "serve_app_waiting_requests"}
    taking = {s.labels["model"] for s in samples if s.name == "serve_app_replica_draining" and 1 - s.value > 0}
    assert asked - taking == {"none", "drains"}
    left, _, right = alert(render(MONITORED), "ServeAppNoReplica")["expr"].partition("unless on (model)")
    assert re.sub(r"{.*}", "", left).split() == ["count", "by", "(model)", "(serve_app_waiting_requests)"]
    assert re.sub(r"{.*}", "", right).strip() == "(sum by (model) (1 - serve_app_replica_draining) > 0)"


def test_a_model_that_may_have_no_replica_is_none_that_misses_one() -> None:
    def rules(*mins: int) -> list[str]:
        common = {"model": "/opt/m", "required": False}
        optional = [common | {"name": f"m{i}+.a", "replicas": {"min": n, "max": 2}} for i, n in enumerate(mins)]
        rendered = render(merged(MONITORED, models(*optional)))
        found = rendered.of("PrometheusRule")[""]["spec"]["groups"][0]["rules"]
        return [rule["expr"] for rule in found if rule["alert"] == "ServeAppNoReplica"]

    (both,) = rules(1, 0, 2)
    assert re.findall(r'model=~"(.*?)"', both) == ["m0[+][.]a|m2[+][.]a"]
    assert rules(0) == []


def test_a_canary_has_an_alert_of_its_own_and_is_not_missed() -> None:
    chat = {"name": "chat", "model": "/opt/m"}
    rendered = render(merged(MONITORED, models(chat, chat | {"name": "next", "canary": {"of": "chat"}})))
    rules = {rule["alert"]: rule["expr"] for rule in rendered.of("PrometheusRule")[""]["spec"]["groups"][0]["rules"]}
    assert 'model=~"chat"' in rules["ServeAppNoReplica"]
    registry = CollectorRegistry()
    registry.register(CanaryCollector({"next": lambda: {"of": "chat", "state": "bad", "requests": 5}}))
    (bad,) = [s for metric in registry.collect() for s in metric.samples if s.labels.get("state") == "bad"]
    assert bad.value == 1
    assert f"max by (model, of) ({bad.name}{{" in rules["ServeAppCanaryIsBad"]


def test_the_dashboards_of_two_releases_are_two_to_grafana() -> None:
    def uid(release: str) -> str:
        (board,) = [
            o for o in render(at("monitoring.dashboards", True), release=release).objects if "-dashboard" in o["metadata"]["name"]
        ]
        (text,) = board["data"].values()
        return str(json.loads(text)["uid"])

    assert uid("demo") != uid("other")
    assert len(uid("demo")) <= 40  # Grafana's limit


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (at("monitoring.podMonitors", True), "monitoring.coreos.com/v1/PodMonitor"),
        (at("httpRoute", {"enabled": True, "parentRefs": [{"name": "g"}]}), "gateway.networking.k8s.io/v1/HTTPRoute"),
    ],
)
def test_a_cluster_without_a_kind_is_told_what_to_install(values: dict[str, Any], kind: str) -> None:
    ray = "ray.io/v1/RayService"
    with pytest.raises(Refused, match=f"the cluster has no {kind}: install"):
        render(values, kinds=(ray,))
    render(values, kinds=(ray, kind))
