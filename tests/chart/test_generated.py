"""The repository holds what is made from values.yaml: the schema, the README; and every value is described."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from serve_app.config import settings_json_schema
from serve_app.config.foreign import plain_name
from serve_app.config.tenants_file import tenants_json_schema
from tests.chart.render import CHART, check_readme, merged, models
from tools.chart_forms import let_zero_through
from tools.chart_schema import chart_rules, descriptions, values_schema
from tools.chart_sections import places, spellings

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_the_schema_is_the_one_that_the_values_make() -> None:
    made = json.loads((CHART / "values.schema.json").read_text())
    assert made == values_schema(), "run `make chart-files`"


def test_the_chart_judges_ports_and_timeouts_by_the_tables_of_serve_app_check() -> None:
    assert yaml.safe_load((CHART / "files" / "rules.yaml").read_text()) == chart_rules(), "run `make chart-files`"


def test_the_schema_has_the_configuration_as_serve_app_defines_it() -> None:
    made = json.loads((CHART / "values.schema.json").read_text())
    own = made["$defs"]["ModelSettings"]["properties"]
    assert own.pop("order")["default"] == 0
    assert own.pop("served")["default"] is True
    assert own.pop("podsOf")["type"] == "string"
    assert own.pop("pods")["properties"].keys() == made["properties"]["modelPods"]["properties"].keys()
    defined = settings_json_schema()
    assert "UiSettings" in defined["$defs"]  # of `serve-app up`; the chart's own value is `ui`
    sections = {name: section for name, section in defined["$defs"].items() if name != "UiSettings"}
    foreign = {name: made["$defs"].pop(name)["pattern"] for name in ("ForeignNames", "ForeignNamesAndArguments")}
    open_to = {name: section.pop("if")["propertyNames"]["anyOf"] for name, section in made["$defs"].items() if "if" in section}
    assert open_to.keys() == {place.section for place in places()} - {"Settings"}
    for name, (*ours, others) in open_to.items():
        section = made["$defs"][name]
        closed = section.pop("then")
        of_chart = {"order", "pods", "podsOf", "served"} if name == "ModelSettings" else set()  # taken out above
        assert closed["properties"].keys() == section["properties"].keys() | of_chart
        section |= {key: value for key, value in closed.items() if key != "properties"}
        assert {key for each in ours for key in each["enum"]} < section["properties"].keys()
        takes_arguments = name in ("ModelSettings", "IngressSettings")
        names = {"numGpus": True, "requestGPU": True, "--max-model-len": takes_arguments, "numGpu": False, "max_modellen": False}
        pattern = foreign[others["not"]["$ref"].removeprefix("#/$defs/")]
        assert {key: bool(re.search(pattern, key)) for key in names} == names, name
    for name, form in (("ModelSettings", "ScalingSettings"), ("IngressSettings", "IngressScalingSettings")):
        replicas = made["$defs"][name]["properties"]["replicas"]
        assert (replicas.pop("if"), replicas["else"]) == ({"type": "number"}, {"$ref": f"#/$defs/{form}"})
        replicas["$ref"] = replicas.pop("else")["$ref"]
    adapters = made["$defs"]["ModelSettings"]["properties"]["adapters"]
    refused_by_rule = {"if": {"type": "string"}, "else": {"$ref": "#/$defs/AdapterSettings"}}  # a path alone
    assert adapters["additionalProperties"] == refused_by_rule
    adapters["additionalProperties"] = refused_by_rule["else"]
    let_zero_through(sections)  # the rule max-is-zero refuses it
    del sections["ModelSettings"]["if"], sections["ModelSettings"]["then"]  # the rule required-from-zero refuses it
    assert made["$defs"] == sections | tenants_json_schema()["$defs"]
    assert made["properties"]["config"]["properties"].keys() == defined["properties"].keys() - {"ui"}


def test_a_name_of_other_systems_is_written_into_the_schema_once() -> None:
    """In each of the eleven sections that look for them the names would be a third of the schema."""
    text = (CHART / "values.schema.json").read_text()
    patterns = {pattern for place in places() for pattern in spellings(place.meant())}
    assert [text.count(json.dumps(pattern)) for pattern in patterns] == [1, 1]


@pytest.mark.parametrize(
    ("model", "is_valid"),
    [
        ({}, True),
        ({"devise": "cuda"}, False),
        ({"num_gpus": 1}, True),  # the rule foreign-key refuses it
        ({"num_gpus": 1, "num_cpus": "x"}, False),
        ({"replicas": {"min": 0}}, True),  # the rule required-from-zero refuses it
        ({"replicas": {"min": -1}, "num_gpus": 1}, False),
        ({"pods": {"headroom": {"pods": 1}}}, True),
        ({"pods": {"headroom": {"podz": 1}}}, False),
    ],
    ids=str,
)
def test_the_schema_means_the_same_to_a_validator_of_draft_7_as_helm_before_3_18_has(
    model: dict[str, Any], is_valid: bool
) -> None:
    """Helm from 3.18 on, which the other tests run, has one of draft 2020-12."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = merged(VALUES, models({"name": "m", "model": "/opt/m"} | model))
    assert jsonschema.Draft7Validator(schema).is_valid(values) is is_valid


def test_each_spelling_that_the_schema_passes_is_one_name_to_the_rule_that_refuses_it() -> None:
    for place in places():
        (pattern,) = spellings(place.meant())
        meant = [{plain_name(key) for key in written(name)} for name in re.findall(r"(?:\([^()]*\)|[^|()])+", pattern[4:-2])]
        assert sorted(map(sorted, meant)) == [[name] for name in sorted(place.meant())]


def written(name: str) -> Iterator[str]:
    """Yield what a name in the schema's pattern matches: a_b, a-b and aB for ``a(_b|-b|B)``."""
    parts = re.split(r"(\([^()]*\))", name)
    yield from map("".join, itertools.product(*(part.strip("()").split("|") for part in parts)))


def test_every_object_of_the_schema_is_closed_or_a_map_of_one_type() -> None:
    free = {"global", "affinity", "podSecurityContext"}  # Helm's own, and large types of Kubernetes
    entries_are_free = {
        "tolerations",
        "extraEnv",
        "extraVolumes",
        "extraVolumeMounts",
        "parentRefs",
        "clients",
        "dns",
        "extraEgress",
    }

    def open_objects(schema: Any, key: str) -> Iterator[str]:
        if not isinstance(schema, dict) or key in free | entries_are_free:
            return
        if schema.get("type") == "object" and "additionalProperties" not in {**schema, **schema.get("then", {})}:
            yield key
        for name, entry in schema.get("properties", {}).items():
            yield from open_objects(entry, name)

    schema = values_schema()
    assert list(open_objects({key: value for key, value in schema.items() if key != "$defs"}, "")) == []


def test_every_value_is_described() -> None:
    described = {path for path, _ in descriptions()}
    bare = [path for path in leaves(VALUES) if not any(path[:depth] in described for depth in range(1, len(path) + 1))]
    assert bare == []


def test_every_description_is_of_a_value() -> None:
    def exists(path: tuple[str, ...]) -> bool:
        value: Any = VALUES
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False
            value = value[key]
        return True

    assert [path for path, _ in descriptions() if not exists(path)] == []


def test_the_readme_is_the_one_that_helm_docs_makes() -> None:
    check_readme(CHART)


def test_templates_are_short_and_hold_no_shell_programs() -> None:
    templates = [p for p in CHART.joinpath("templates").rglob("*") if p.is_file()]
    lengths: dict[Path, int] = {p: len(p.read_text().splitlines()) for p in templates}
    assert [p.name for p, lines in lengths.items() if lines > 150] == []
    assert [p.name for p in templates if any(word in p.read_text() for word in ("/bin/sh", "bash", "sh -c", "python -c"))] == []


def test_every_table_of_rules_is_judged_and_every_rule_is_a_condition_and_a_sentence() -> None:
    files = [yaml.safe_load(file.read_text()) for file in sorted((CHART / "files/lints").glob("*.yaml"))]
    tables = {name: rows for tables in files for name, rows in tables.items() if "rule" in rows[0]}
    assert sum(map(len, tables.values())) == sum(len(rows) for file in files for rows in file.values() if "rule" in rows[0])
    templates = "".join(template.read_text() for template in sorted((CHART / "templates").glob("_lint*.tpl")))
    assert set(re.findall(r'"table" "(\w+)"', templates)) | set(re.findall(r'set \$args "table" "(\w+)"', templates)) == set(
        tables
    )
    assert {frozenset(rule) for rows in tables.values() for rule in rows} == {frozenset({"rule", "when", "says"})}
