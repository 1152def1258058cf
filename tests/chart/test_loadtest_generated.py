"""The repository holds what is made from the loadtest chart's values.yaml, and every value is described."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.chart.loadtest_chart import CHART
from tests.chart.render import check_readme
from tests.chart.test_generated import leaves
from tools.chart_schema import descriptions
from tools.loadtest_chart_schema import scenario_schema, values_schema

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_schema_is_the_one_that_the_values_make() -> None:
    assert json.loads((CHART / "values.schema.json").read_text()) == values_schema(), "run `make chart-files`"


def test_the_schema_has_the_scenario_as_the_kit_defines_it() -> None:
    made = json.loads((CHART / "values.schema.json").read_text())
    assert made["$defs"] == scenario_schema()["$defs"]
    assert made["properties"]["scenario"]["then"]["required"] == ["name", "arrival"]


def test_every_object_of_the_schema_is_closed_or_a_map_of_one_type() -> None:
    free = {"global", "affinity", "extra_body"}  # Helm's own, a large type of Kubernetes, and what a server takes
    free |= {"tolerations", "extraEnv", "extraVolumes", "extraVolumeMounts", "targets", "viewers", "dns"}  # Kubernetes' own

    def open_objects(schema: Any, key: str) -> Iterator[str]:
        if not isinstance(schema, dict) or key in free:
            return
        if schema.get("type") == "object" and "additionalProperties" not in schema and not {"then", "allOf"} & schema.keys():
            yield key
        for name, entry in (schema.get("properties", {}) | schema.get("$defs", {})).items():
            yield from open_objects(entry, name)
        yield from open_objects(schema.get("then"), key)

    assert list(open_objects(values_schema(), "")) == []


def test_every_value_is_described_and_every_description_is_of_a_value() -> None:
    described = {path for path, _ in descriptions(CHART)}
    paths = set(leaves(VALUES))
    assert [path for path in paths if not any(path[:depth] in described for depth in range(1, len(path) + 1))] == []
    assert [path for path in described if not any(leaf[: len(path)] == path for leaf in paths)] == []


def test_the_readme_is_the_one_that_helm_docs_makes() -> None:
    check_readme(CHART)


def test_templates_are_short_and_hold_no_shell_programs() -> None:
    templates = [p for p in CHART.joinpath("templates").rglob("*") if p.is_file()]
    assert len(templates) > 15
    assert [p.name for p in templates if len(p.read_text().splitlines()) > 150] == []
    assert [p.name for p in templates if any(word in p.read_text() for word in ("/bin/sh", "bash", "sh -c", "python -c"))] == []
