"""These tests check that the schema and the page agree with the parser."""

import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from typer.testing import CliRunner

import loadtest
from loadtest.cli import app
from loadtest.plan.laws import ARRIVALS
from loadtest.plan.reference import json_schema, page
from loadtest.plan.request_class import Length, RequestClass
from loadtest.plan.scenario import Fault, Observe, Scenario

SHIPPED = sorted(Path(loadtest.__file__).with_name("scenarios").glob("*.yaml"))


def test_the_page_in_docs_is_the_one_that_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["schema", "--markdown"]).output
    docs = Path(__file__).parents[3] / "docs" / "scenario.md"
    assert docs.read_text() == printed == page()


def test_the_page_has_each_key_and_each_law() -> None:
    text = page()
    for section in (Scenario, RequestClass, Length, Fault, Observe, *ARRIVALS.values()):
        assert [name for name in section.model_fields if f"| `{name}` |" not in text and name != "law"] == []
    assert [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |") and " mapping " in line] == []
    assert [law for law in ARRIVALS if f"### {law}\n" not in text] == []
    assert '| `usage` | `"continuous"` | `continuous`, `final` |' in text


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_each_shipped_scenario_is_valid_by_the_schema(file: Path) -> None:
    schema = json.loads(CliRunner().invoke(app, ["schema"]).output)
    assert schema == json.loads(json_schema())
    jsonschema.validate(yaml.safe_load(file.read_text()), schema)


@pytest.mark.parametrize("wrong", [{"durations_s": 5}, {"arrival": {"law": "poison", "rate": 1}}, {"timeout_s": 0}])
def test_a_mistake_is_refused_by_the_schema(wrong: dict[str, object]) -> None:
    right = yaml.safe_load(SHIPPED[0].read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(right | wrong, json.loads(json_schema()))
