"""The report of axe-core has the outcome of each check of a page."""

import json
from pathlib import Path

import pytest

from tests.ui import axe


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
