"""These are the values that replace ``${NAME}`` in the files: the chart's values, and the release's name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm" / "serve-app"
RULES = CHART / "files" / "monitoring" / "rules.yaml"
DASHBOARDS = CHART / "files" / "dashboards"

UID = "serve-app"
"""The beginning of every dashboard's uid in the files. The chart appends a hash of the release to it."""


def facts_of(values: Mapping[str, Any], *, namespace: str, release: str, uid: str, drain_s: float = 600.0) -> dict[str, str]:
    """Return the facts by name. ``values`` are the values below ``monitoring`` in values.yaml."""
    slo = values["slo"]
    facts = {
        "availability": slo["availability"],
        "ttft_objective": slo["ttft"]["objective"],
        "ttft_s": slo["ttft"]["seconds"],
        "itl_objective": slo["itl"]["objective"],
        "itl_s": slo["itl"]["seconds"],
        "min_requests": slo["minRequests"],
        "waiting": values["waitingRequestsAlert"],
        "free_bytes": values["freeBytesAlert"],
        "drain_limit_s": round(drain_s) + 300,
        "runbook": values["runbookUrl"],
        "grafana": values["grafanaUrl"],
        "job": f"{namespace}/{release}-ingress",
        "namespace": namespace,
        "release": release,
        "uid": uid,
    }
    return {name: str(value) for name, value in facts.items()}


def default_facts(*, namespace: str, release: str, **changed: Any) -> dict[str, str]:
    """Return the facts of the chart's default values, for a Prometheus that serves one release; ``changed`` are values of monitoring."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["monitoring"]
    return facts_of({**values, **changed}, namespace=namespace, release=release, uid=UID)


def filled(text: str, facts: Mapping[str, str]) -> str:
    """Return the text with every fact filled in. Grafana's own variables, such as ``${datasource}``, stay."""
    for name, value in facts.items():
        text = text.replace(f"${{{name}}}", value)
    return text
