"""These tests compare the autoscaler's Prometheus series with values worked out by hand, and read them once through Ray's metrics agent."""

import tempfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.autoscaling.decision import Decision, Observation
from serve_app.autoscaling.fleet import INGRESSES, FleetObservation, IngressObservation
from serve_app.autoscaling.series import PREFIX, SERIES, Gauges, Sample, samples
from serve_app.autoscaling.signals import ModelLoad
from tests.e2e.fleet import wait_until
from tests.ports import free_port

SEEN = FleetObservation(
    at=1.0,
    models={"chat": Observation(running=4, target=4, minimum=1, maximum=9, load=ModelLoad())},
    ingress=IngressObservation(running=1, target=1, minimum=1, maximum=3, streams=900.0, cpu_s=0.1, interval_s=1.0),
)
DECIDED = {
    "chat": Decision(
        desired=5,
        wish="demand",
        alternatives={"demand": 5, "first": 1},
        inputs={"demand": 2.0, "cold_start_s": 40.0, "utilization": 0.6},
    ),
    INGRESSES: Decision(desired=3, wish="streams", alternatives={"streams": 3}, inputs={}),
}


def test_a_decision_becomes_its_samples() -> None:
    assert list(samples(SEEN, DECIDED)) == [
        Sample("desired", "chat", 5),
        Sample("ready", "chat", 4),
        Sample("because", "chat", 1.0, "demand"),
        Sample("wish", "chat", 5, "demand"),
        Sample("wish", "chat", 1, "first"),
        Sample("demand", "chat", 2.0),
        Sample("cold_start_seconds", "chat", 40.0),
        Sample("utilization_target", "chat", 0.6),
        Sample("utilization", "chat", 0.5),
        Sample("desired", INGRESSES, 3),
        Sample("ready", INGRESSES, 1),
        Sample("because", INGRESSES, 1.0, "streams"),
        Sample("wish", INGRESSES, 3, "streams"),
    ]


def test_a_model_without_replicas_has_no_utilization_left() -> None:
    idle = Observation(running=0, target=0, minimum=0, maximum=9, load=ModelLoad())
    decided = Decision(desired=0, wish="keep", alternatives={}, inputs={"demand": 0.0})
    found = list(samples(FleetObservation(at=1.0, models={"chat": idle}, ingress=None), {"chat": decided}))
    assert [sample.value for sample in found if sample.name == "utilization"] == [0.0]


def test_every_series_has_a_line_in_the_documents() -> None:
    text = Path("docs/autoscaling.md").read_text(encoding="utf-8")
    assert {name for name in SERIES if f"`ray_{PREFIX}{name}" not in text} == set()


def test_outside_ray_nothing_is_set_and_nothing_fails() -> None:
    gauges = Gauges("app")
    gauges.show(SEEN, DECIDED)
    assert gauges._gauges == {}


@pytest.mark.engine
@pytest.mark.timeout(180)
def test_rays_agent_serves_what_was_decided_last(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    port = free_port()
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")

    def served() -> dict[tuple[str, str, str], float]:
        try:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        except httpx.HTTPError:  # the agent starts after the node
            return {}
        found = [s for family in text_string_to_metric_families(text) for s in family.samples if f"ray_{PREFIX}" in s.name]
        assert {s.labels["application"] for s in found} <= {"app"}
        return {(s.name.removeprefix(f"ray_{PREFIX}"), s.labels["model"], s.labels.get("rule", "")): s.value for s in found}

    def expected(decided: dict[str, Decision]) -> dict[tuple[str, str, str], float]:
        return {(s.name, s.model, s.rule): s.value for s in samples(SEEN, decided)}

    # A short path: Ray's sockets are below it, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-series-") as folder:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            _metrics_export_port=port,
        )
        try:
            gauges = Gauges("app")
            gauges.show(SEEN, DECIDED)
            wait_until(lambda: served() == expected(DECIDED), limit_s=60, what="all series")
            chat = replace(DECIDED["chat"], desired=2, wish="queue", alternatives={"queue": 2})
            gauges.show(SEEN, DECIDED | {"chat": chat})
            gone = {("because", "chat", "demand"): 0.0, ("wish", "chat", "demand"): 0.0, ("wish", "chat", "first"): 0.0}
            wait_until(
                lambda: served() == expected(DECIDED | {"chat": chat}) | gone,
                limit_s=60,
                what="the second decision, and 0 for the first",
            )
        finally:
            ray.shutdown()
