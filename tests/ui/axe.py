"""This module checks pages with axe-core, and keeps what it found for the report that `make test-ui` writes."""

import gzip
import json
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

AXE_CORE = Path(__file__).with_name("axe.min.js.gz")
"""Deque's checker of pages for people who cannot see, or use a mouse; `make axe-core` renews it. Under the MPL 2.0, as its head says."""
REPORT = Path(__file__).with_name("axe-report.json")
"""The outcome of the latest `make test-ui` whose result was committed."""
IMPACTS = ("minor", "moderate", "serious", "critical")
_CHECKED: list[dict[str, Any]] = []
_VERSIONS: dict[str, str] = {}


def findings(page: Any, shows: str = "") -> list[str]:
    """Return what axe-core finds serious or critical on the page as it is shown: rule, elements and why. Waits for fading colours.

    Args:
        shows: What the page shows, under which the report has the outcome; empty for a page that is not in the report.
    """
    page.evaluate(gzip.decompress(AXE_CORE.read_bytes()).decode())
    found = page.evaluate(
        """async () => {
          const ends = (animation) => Number.isFinite(animation.effect.getComputedTiming().endTime);
          await Promise.allSettled(document.getAnimations().filter(ends).map((animation) => animation.finished));
          const { violations, passes, testEngine } = await axe.run(document, { resultTypes: ["violations"] });
          return { violations, passes: passes.length, version: testEngine.version, dark: document.body.classList.contains("dark") };
        }"""
    )
    if shows:
        _VERSIONS.update(axe_core=found["version"], chromium=page.context.browser.version, gradio=metadata.version("gradio"))
        _CHECKED.append(outcome(page.url, page.viewport_size, found, shows))
    return [
        f"{each['id']}: {[(node['target'], node['failureSummary']) for node in each['nodes']]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
    ]


def findings_in_both_themes(page: Any, shows: str) -> list[str]:
    """Return axe-core's findings in the theme that is shown, and in the other one."""
    found = findings(page, shows)
    page.dispatch_event("#theme", "click")  # on a phone the open sidebar covers it
    return [*found, *findings(page, shows)]


def outcome(url: str, window: dict[str, int], found: dict[str, Any], shows: str) -> dict[str, Any]:
    """Return the report's entry of one check: rules passed, rules violated by impact, and which these are."""
    impacts = Counter(each["impact"] for each in found["violations"])
    return {
        "page": urlsplit(url).path.rstrip("/") or "/",
        "shows": shows,
        "window": f"{window['width']}x{window['height']}",
        "theme": "dark" if found["dark"] else "light",
        "passes": found["passes"],
        "violations": {impact: impacts[impact] for impact in IMPACTS},
        "rules": sorted(each["id"] for each in found["violations"]),
    }


def write_report(path: Path) -> None:
    """Write the outcomes of all checks of this process; nothing if there were none."""
    if _CHECKED:
        report = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **_VERSIONS}
        pages = ",\n".join(json.dumps(each) for each in _CHECKED)
        path.write_text(f'{json.dumps(report)[:-1]}, "pages": [\n{pages}\n]}}\n', encoding="utf-8")
