"""Values of earlier versions are refused by a sentence that names their new place, and UPGRADE.md lists them."""

import re
from typing import Any

import pytest

from tests.chart.render import CHART, Refused, at, merged, models, render
from tools.chart_schema import chart_rules, values_schema

MOVED: dict[str, str] = chart_rules()["moved"]


def test_every_moved_value_is_refused_by_a_sentence_that_names_its_new_place() -> None:
    with pytest.raises(Refused) as refused:
        render(merged(*(at(path, {} if path == "uninstall" else []) for path in MOVED)))
    found = re.findall(r"^  value-moved: (\S+) is now (\S+): move it there \(UPGRADE\.md\)$", str(refused.value), re.MULTILINE)
    assert dict(found) == MOVED
    assert f"break {len(MOVED)} of" in str(refused.value)


def test_moved_values_of_one_models_pods_are_named_at_the_model() -> None:
    pods = {"schedulerName": "s"}
    with pytest.raises(
        Refused, match=r"config\.models\.m\.pods\.schedulerName is now config\.models\.m\.pods\.extra\.schedulerName"
    ):
        render(models({"name": "m", "model": "/opt/m", "pods": pods}))
    render(models({"name": "m", "model": "/opt/m", "pods": {"extra": pods}}))


def test_every_new_place_exists_and_no_old_one_does() -> None:
    def known(path: str) -> bool:
        section: Any = values_schema()
        for key in path.split("."):
            section = section.get("properties", {}).get(key)
            if section is None:
                return False
        return True

    assert [new for new in MOVED.values() if not known(new)] == []
    assert [old for old in MOVED if known(old)] == []


def test_the_guide_to_upgrades_names_every_key_that_moved() -> None:
    guide = (CHART / "UPGRADE.md").read_text().partition("## Values that moved")[2].partition("\n## ")[0]
    names = set(re.findall(r"[A-Za-z0-9]+", guide))
    assert {old.rpartition(".")[2] for old in MOVED} - names == set()
    assert {part for new in MOVED.values() for part in new.split(".")} - names == set()
