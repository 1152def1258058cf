"""This module renders the chart loadtest; `tests.chart.render` does it for serve-app."""

from pathlib import Path
from typing import Any

import yaml

from tests.chart.render import Object, Rendered, Values, at, merged
from tests.chart.render import render as render_chart

CHART = Path(__file__).parents[2] / "helm" / "loadtest"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
SCENARIO: dict[str, Any] = {"name": "s", "arrival": {"law": "poisson", "rate": 4}}
BASE = merged(at("target.url", "http://demo"), at("scenario", SCENARIO))
WEB = at("mode", "web")
KEY = at("target.existingSecret", "s")
S3 = merged(at("results.s3.uri", "s3://b/p"), at("results.persistence.enabled", False))
PODS = at("scenario.observe.kubernetes_selector", "a=b")


def render(values: Values | None = None, **options: Any) -> Rendered:
    """Render with a target and a scenario beside these values."""
    return render_chart(merged(BASE, values or {}), chart=CHART, **options)


def render_file(file: Path) -> Rendered:
    return render_chart(files=(file,), chart=CHART)


def template(rendered: Rendered, kind: str, name: str) -> Object:
    """Return the pod template of a workload, named by its part after the release's name."""
    return dict(rendered.of(kind)[name]["spec"]["template"])


def master(rendered: Rendered) -> Object:
    """The master's pod."""
    web = "master" in rendered.of("Deployment")
    return dict(template(rendered, *(("Deployment", "master") if web else ("Job", "1")))["spec"])


def worker(rendered: Rendered) -> Object:
    """A worker's pod, of whatever run."""
    kind = "Deployment" if "worker" in rendered.of("Deployment") else "Job"
    name = next(name for name in rendered.of(kind) if name.removesuffix("s").endswith("worker"))
    return dict(template(rendered, kind, name)["spec"])


def step(rendered: Rendered, name: str) -> Object:
    """Return the container of this name in the master's pod."""
    pod = master(rendered)
    return next(c for c in [*pod.get("initContainers", []), *pod["containers"]] if c["name"] == name)


def scenario(rendered: Rendered) -> Object:
    return dict(yaml.safe_load(rendered.of("ConfigMap")["scenario"]["data"]["scenario.yaml"]))
