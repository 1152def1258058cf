"""This script makes helm/batch/values.schema.json, as tools/chart_schema.py does for serve-app.

Run as `python -m tools.batch_chart_schema`; tests/chart/test_batch_chart.py fails if the file is outdated.
"""

import json
from pathlib import Path

import yaml

from tools.chart_schema import BY_KEY, Schema, descriptions, schema_of

CHART = Path(__file__).parents[1] / "helm" / "batch"

_PEERS: Schema = {"type": "array", "items": {"type": "object"}, "minItems": 1}  # in a policy an empty list would mean all peers
_SECONDS: Schema = {"type": "integer", "minimum": 0}
_OWN: dict[str, Schema] = {
    "url": {"type": "string", "pattern": r"^(https?://.+)?$"},
    "output": {"type": "string", "pattern": r"^((s3|gs)://.+|[A-Za-z0-9][A-Za-z0-9._-]*)$"},
    "options": {"type": "array", "items": {"type": "string"}},
    "run": {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?)?$"},
    "apiKeySecretKey": {"type": "string", "minLength": 1},
    "backoffLimit": _SECONDS,
    "activeDeadlineSeconds": _SECONDS,
    "accessMode": {"enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]},
    "targets": _PEERS,
    "dns": _PEERS,
    "inputCidrs": BY_KEY["apiServerCidrs"],
    **dict.fromkeys(("targetPorts", "inputPorts"), BY_KEY["apiServerPorts"]),
}


def values_schema() -> Schema:
    """Return the whole schema."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    described = dict(descriptions(CHART))
    properties = {key: schema_of(value, (key,), described, BY_KEY | _OWN) for key, value in values.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart batch",
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": {"global": {"type": "object", "description": "Helm's own, for parent charts."}, **properties},
    }


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(json.dumps(values_schema(), indent=2) + "\n", encoding="utf-8")
