"""This script makes helm/loadtest/values.schema.json; `scenario` in it is the load-test kit's own schema.

Run as `python -m tools.loadtest_chart_schema`; tests/chart/test_loadtest_generated.py fails if the file is outdated.
"""

import json
from pathlib import Path

import yaml

from loadtest.plan.scenario import Scenario
from tools.chart_schema import BY_KEY, Schema, descriptions, schema_of

CHART = Path(__file__).parents[1] / "helm" / "loadtest"

_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_PEERS: Schema = _OBJECTS | {"minItems": 1}  # in a policy an empty list would mean all peers
_PORTS: Schema = BY_KEY["apiServerPorts"] | {"minItems": 1}
_CIDRS: Schema = BY_KEY["apiServerCidrs"] | {"minItems": 1}
_OWN: dict[str, Schema] = {
    "mode": {"enum": ["job", "web"]},
    "url": {"type": "string", "pattern": r"^(https?://.+)?$"},
    "uri": {"type": "string", "pattern": r"^(s3://.+)?$"},
    "run": {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?)?$"},
    "replicas": {"type": "integer", "minimum": 1, "maximum": 256},
    "maxRate": {"type": "number", "exclusiveMinimum": 0},
    "workersWaitSeconds": {"type": "integer", "minimum": 1},
    "timeoutSeconds": {"type": "integer", "minimum": 60},
    "activeDeadlineSeconds": {"type": "integer", "minimum": 0},
    "endpoint": BY_KEY["s3Endpoint"],
    "accessMode": {"enum": ["ReadWriteOnce", "ReadWriteMany"]},
    "emptyDirSize": BY_KEY["tmpSize"],
    "targets": _PEERS,
    "dns": _PEERS,
    "viewers": _OBJECTS,
    **dict.fromkeys(("s3Cidrs", "apiServerCidrs"), _CIDRS),
    **dict.fromkeys(("targetPorts", "apiServerPorts"), _PORTS),
}


def scenario_schema() -> Schema:
    """Return the schema of a scenario file: that of the kit's models, with an SLO as text or as a mapping."""
    schema = Scenario.model_json_schema()
    properties = schema["properties"]
    properties["slo"] = {"if": {"type": "string"}, "then": True, "else": {"$ref": properties["slo"]["$ref"]}}
    properties["arrival"] = _by_law(properties["arrival"]["discriminator"]["mapping"])
    return schema


def _by_law(mapping: dict[str, str]) -> Schema:
    """Return the union without `oneOf`, which would report the problems of all laws for one misspelt key."""
    cases = [{"if": {"properties": {"law": {"const": law}}}, "then": {"$ref": ref}} for law, ref in mapping.items()]
    return {"type": "object", "required": ["law"], "properties": {"law": {"enum": list(mapping)}}, "allOf": cases}


def values_schema() -> Schema:
    """Return the whole schema."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    described = dict(descriptions(CHART))
    scenario = scenario_schema()
    defs = scenario.pop("$defs")
    del values["scenario"]
    properties = {key: schema_of(value, (key,), described, BY_KEY | _OWN) for key, value in values.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart loadtest",
        "type": "object",
        "additionalProperties": False,
        "required": ["scenario", *properties],
        "properties": {
            "global": {"type": "object", "description": "Helm's own, for parent charts."},
            **properties,
            # Empty by default; a check of the chart refuses an empty scenario with a better sentence.
            "scenario": {"description": described[("scenario",)], "type": "object", "if": {"minProperties": 1}, "then": scenario},
        },
        "$defs": defs,
    }


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(json.dumps(values_schema(), indent=2) + "\n", encoding="utf-8")
