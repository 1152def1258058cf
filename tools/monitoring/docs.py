"""This module makes the tables of docs/monitoring.md from code: series and alerts."""

import re
from pathlib import Path

from serve_app.books.series import TABLE
from tools.monitoring.alerts import ALERTS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def _series() -> str:
    rows = [f"| `{s.shown}` | {s.kind} | {', '.join(s.labels)} | {s.text} |" for s in TABLE]
    return "\n".join(["| series | kind | labels | meaning |", "|---|---|---|---|", *rows])


def _alerts() -> str:
    rows = [f"| [{a.name}](runbook.md#{a.name.lower()}) | {a.severity} | {a.board} |" for a in ALERTS]
    return "\n".join(["| alert | severity | dashboard |", "|---|---|---|", *rows])


def renewed(text: str) -> str:
    """Return the page with renewed tables. A table is between ``<!-- NAME: ... -->`` and ``<!-- end -->``.

    Raises:
        ValueError: The page has no place for a table, or two.
    """
    for name, table in (("series", _series()), ("alerts", _alerts())):
        parts = re.split(rf"(<!-- {name}\b[^\n]*-->\n).*?(?=<!-- end -->)", text, flags=re.DOTALL)
        if len(parts) != 3:
            raise ValueError(f"{PAGE.name} has {len(parts) // 2} places for the table {name}; exactly one is needed")
        text = f"{parts[0]}{parts[1]}\n{table}\n\n{parts[2]}"
    return text
