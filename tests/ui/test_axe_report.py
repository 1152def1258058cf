"""The committed report of axe-core is of the pages and the checker that are here, and has no finding."""

import json
import re
from pathlib import Path

import pytest

from tests.ui import axe

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def test_the_report_has_both_pages_in_both_windows_and_themes_without_violations() -> None:
    report = json.loads(axe.REPORT.read_text())
    shown = {(each["page"], each["window"], each["theme"]) for each in report["pages"]}
    assert shown == {
        (page, window, theme) for page in ("/", "/fleet") for window in ("1280x800", "390x844") for theme in ("light", "dark")
    }
    assert [each for each in report["pages"] if each["rules"]] == []
    assert min(each["passes"] for each in report["pages"]) > 0


def test_the_report_is_of_the_checker_that_is_here() -> None:
    wanted = re.search(r"^AXE_CORE := axe-core@(\S+)$", MAKEFILE.read_text(), re.MULTILINE)
    assert wanted is not None
    assert json.loads(axe.REPORT.read_text())["axe_core"] == wanted[1]


def test_an_outcome_counts_violations_by_impact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"passes": 30, "dark": True, "violations": [{"id": "region", "impact": "moderate"}, {"id": "a", "impact": "serious"}]}
    entry = axe.outcome("http://127.0.0.1:1/fleet?a", {"width": 390, "height": 844}, found, "two replicas")
    assert entry == {
        "page": "/fleet",
        "shows": "two replicas",
        "window": "390x844",
        "theme": "dark",
        "passes": 30,
        "violations": {"minor": 0, "moderate": 1, "serious": 1, "critical": 0},
        "rules": ["a", "region"],
    }
    monkeypatch.setattr(axe, "_CHECKED", [entry])
    monkeypatch.setattr(axe, "_VERSIONS", {"axe_core": "1.2.3"})
    axe.write_report(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["axe_core"], written["pages"]) == ("1.2.3", [entry])
