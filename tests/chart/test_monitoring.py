"""The chart renders alerts and dashboards; tests/monitoring checks what they say."""

import json
import re
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from serve_app.autoscaling.series import PREFIX
from serve_app.core.events import HeartbeatArrived, LinkOpened
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.load import EngineLoad
from serve_app.ingress.books.metrics import CanaryCollector, Configured, FleetCollector
from tests.chart.places import alert
from tests.chart.render import Refused, Rendered, at, merged, render
from tests.monitoring.expressions import OF_RAYS_NODES, selectors
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import default_facts, filled
from tools.monitoring.rules import rules_file

MONITORED = merged(at("monitoring.podMonitors", True), at("monitoring.prometheusRules", True), at("monitoring.dashboards", True))


def rules(rendered: Rendered) -> list[dict[str, Any]]:
    """Return all rules of the release."""
    return [rule for group in rendered.of("PrometheusRule")[""]["spec"]["groups"] for rule in group["rules"]]


def boards(rendered: Rendered) -> dict[str, Any]:
    """Return the dashboards by the names of their files."""
    return {name: json.loads(text) for name, text in rendered.of("ConfigMap")["dashboard"]["data"].items()}


def test_the_chart_fills_in_what_make_observe_fills_in() -> None:
    r = render(merged(MONITORED, at("config.timeouts.drain_s", 600)))
    uid = boards(r)["demo-overview.json"]["uid"].removesuffix("-overview")
    facts = default_facts(namespace="serving", release="demo") | {"uid": uid}
    assert r.of("PrometheusRule")[""]["spec"] == yaml.safe_load(filled(rules_file(), facts))
    made = {f"demo-{b.name}.json": json.loads(filled(board_file(b), facts)) | {"uid": f"{uid}-{b.name}"} for b in BOARDS}
    assert boards(r) == made


def test_no_place_is_left_open() -> None:
    r = render(MONITORED)
    text = json.dumps([r.of("PrometheusRule"), boards(r)])
    assert set(re.findall(r"\$\{\w+\}", text)) == {"${datasource}"}


def test_alerts_ask_the_jobs_that_the_pod_monitors_make() -> None:
    r = render(MONITORED)
    assert r.of("PodMonitor").keys() >= {"ingress", "ray"}
    others = ("serve_app:", "DCGM_")  # recorded series, and those of NVIDIA's exporter, whose job the cluster names
    asked = [selector for rule in rules(r) for selector in selectors(rule["expr"]) if not selector.name.startswith(others)]
    strangers = [s.text for s in asked if 'job="serving/demo-ingress"' not in s.text]
    of_ray = {"up", f"ray_{PREFIX}desired", *OF_RAYS_NODES}  # whose pods have the GPUs; what the autoscaler wants; memory
    assert set(strangers) <= {f'{name}{{job="serving/demo-ray"}}' for name in of_ray}


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
        fleet.handle(HeartbeatArrived(replica_id, EngineLoad(1, 0, 0, 0.0), draining=drains), now=0.0)
    return fleet


def test_the_outage_of_an_idle_model_shows_in_the_series_of_the_alert() -> None:
    """`A unless on (job, model) B`: A has every model, waiting requests or not, and B none that the ingress cannot give a request."""
    registry = CollectorRegistry()
    fleets = [fleet_with("none"), fleet_with("drains", a=True), fleet_with("one", a=True, b=False)]
    registry.register(FleetCollector(fleets, {"none": Configured(1, 2), "drains": Configured(0, 1)}))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    asked = {s.labels["model"] for s in samples if s.name == "serve_app_waiting_requests"}
    taking = {s.labels["model"] for s in samples if s.name == "serve_app_replica_draining" and 1 - s.value > 0}
    assert asked - taking == {"none", "drains"}
    expr = alert(render(MONITORED), "ServeAppNoReplica")["expr"]
    parts = re.split(r" (?:unless|and) on \((?:job, )?model\) ", expr)
    left, right, canaries, bound, unwanted = (re.sub(r"{.*}", "", part) for part in parts)
    assert (left, right) == (
        "count by (job, model) (serve_app_waiting_requests)",
        "(sum by (job, model) (1 - serve_app_replica_draining) > 0)",
    )
    assert (canaries, bound) == ("serve_app_canary_state", "(max by (job, model) (serve_app_replica_bound) > 0)")
    assert unwanted == f"(max by (model) (ray_{PREFIX}desired) == 0)"
    least = {s.labels["model"]: s.value for s in samples if s.name == "serve_app_replica_bound" and s.labels["bound"] == "min"}
    assert {model for model in asked - taking if least.get(model, 0) > 0} == {"none"}


def test_a_canary_has_an_alert_of_its_own() -> None:
    registry = CollectorRegistry()
    registry.register(CanaryCollector({"next": lambda: {"of": "chat", "state": "bad", "requests": 5}}))
    (bad,) = [s for metric in registry.collect() for s in metric.samples if s.labels.get("state") == "bad"]
    assert bad.value == 1
    assert f"max by (job, model, of) ({bad.name}{{" in alert(render(MONITORED), "ServeAppCanaryIsBad")["expr"]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"ttft": {"seconds": 3}}, "/monitoring/slo/ttft/seconds"),
        ({"itl": {"seconds": 0.12}}, "/monitoring/slo/itl/seconds"),
        ({"availability": 0.9}, "/monitoring/slo/availability"),
        ({"availability": 1}, "/monitoring/slo/availability"),
    ],
)
def test_an_objective_that_nothing_can_count_is_refused(objective: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        render(at("monitoring.slo", objective))


def test_the_dashboards_of_two_releases_are_two_to_grafana() -> None:
    def uids(release: str) -> set[str]:
        (board,) = [
            o for o in render(at("monitoring.dashboards", True), release=release).objects if "-dashboard" in o["metadata"]["name"]
        ]
        return {json.loads(text)["uid"] for text in board["data"].values()}

    assert len(uids("demo")) == len(BOARDS)
    assert not uids("demo") & uids("other")
    assert max(map(len, uids("demo"))) <= 40  # Grafana's limit


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
