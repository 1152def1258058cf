"""This module has JSON schemas for kubeconform: Kubernetes' and KubeRay's own, and closed ones of the used parts of three other APIs.

The bed that the cluster tests run on has schemas of its API server, with KubeRay's resources. The Prometheus operator and the
Gateway API are not in it: below are the fields that the chart uses, closed. The same objects were accepted by the resource
definitions of operator 0.93 and of the Gateway API's standard channel, made strict.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.chart.render import tool

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^(0|([0-9]+(h|m|s|ms)){1,4})$"}


def closed(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def listed(entry: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": entry}


_METADATA = closed(name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
_EXPRESSION = closed(key=TEXT, operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}, values=TEXTS)
_SELECTOR = closed(matchLabels=LABELS, matchExpressions=listed(_EXPRESSION))
_RULE = closed(alert=TEXT, record=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS) | {"required": ["expr"]}
_RULE["properties"]["for"] = DURATION
_PARENT = closed(group=TEXT, kind=TEXT, name=TEXT, namespace=TEXT, sectionName=TEXT) | {"required": ["name"]}
_MATCH = closed(path=closed(type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=TEXT))
_ROUTE = closed(
    matches=listed(_MATCH),
    timeouts=closed(request=DURATION, backendRequest=DURATION),
    backendRefs=listed(closed(name=TEXT, port={"type": "integer"})),
)
SPECS: dict[str, tuple[str, Schema]] = {
    "podmonitor-monitoring-v1": (
        "monitoring.coreos.com/v1",
        closed(
            selector=_SELECTOR,
            podTargetLabels=TEXTS,
            podMetricsEndpoints=listed(closed(port=TEXT, path=TEXT, interval=DURATION)),
        ),
    ),
    "prometheusrule-monitoring-v1": (
        "monitoring.coreos.com/v1",
        closed(groups=listed(closed(name=TEXT, interval=DURATION, rules=listed(_RULE)))),
    ),
    "httproute-gateway-v1": (
        "gateway.networking.k8s.io/v1",
        closed(parentRefs=listed(_PARENT), hostnames=TEXTS, rules=listed(_ROUTE)),
    ),
}


def check_with_kubeconform(objects: str, num: int, directory: Path) -> None:
    """Assert that kubeconform accepts the ``num`` objects strictly; skip the test without kubeconform or its schemas.

    Args:
        objects: YAML documents.
        directory: An empty folder, for the schemas above.
    """
    kubeconform, schemas = tool("kubeconform"), _schemas(directory)
    if kubeconform is None or schemas is None:
        pytest.skip("kubeconform or its schemas are neither on the PATH nor in $KUBE_TESTBED")
    locations = [argument for schema in schemas for argument in ("-schema-location", schema)]
    command = [kubeconform, "-strict", "-summary", "-output", "json", *locations, "-"]
    done = subprocess.run(command, input=objects, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert report.get("resources", []) == []
    assert report["summary"] == {"valid": num, "invalid": 0, "errors": 0, "skipped": 0}


def _schemas(directory: Path) -> list[str] | None:
    """Write the schemas above into ``directory``; return kubeconform's locations, None where Kubernetes' own are not to be found."""
    bed = Path(os.environ.get("KUBE_TESTBED") or "~/.cache/kube-testbed").expanduser()
    own = Path(os.environ.get("KUBE_SCHEMAS") or bed / "schemas")
    if not (own / "rayservice-ray-v1.json").is_file():
        return None
    for name, (version, spec) in SPECS.items():
        schema = closed(apiVersion={"const": version}, kind=TEXT, metadata=_METADATA, spec=spec)
        required = ["apiVersion", "kind", "metadata", "spec"]
        (directory / f"{name}.json").write_text(json.dumps(schema | {"required": required}))
    return [f"{place}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json" for place in (own, directory)]
