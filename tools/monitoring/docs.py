"""The tables of docs/monitoring.md that are made from code: series and alerts."""

import re
from pathlib import Path

from serve_app.series import TABLE
from tools.monitoring.alerts import ALERTS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def _series() -> str:
    rows = [f"| `{s.shown}` | {s.kind} | {', '.join(s.labels)} | {s.text} |" for s in TABLE]
    return "\n".join(["| series | kind | labels | meaning |", "|---|---|---|---|", *rows])


def _alerts() -> str:
    rows = [f"| [{a.name}](runbook.md#{a.name.lower()}) | {a.severity} | {a.board} |" for a in ALERTS]
    return "\n".join(["| alert | severity | dashboard |", "|---|---|---|", *rows])


def renewed(text: str) -> str:
    """Return the page with its tables as they are now. A table is between ``<!-- NAME: ... -->`` and ``<!-- end -->``."""
    for name, table in (("series", _series()), ("alerts", _alerts())):
        text, count = re.subn(
            rf"(<!-- {name}\b[^\n]*-->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for the table {name}; exactly one is needed")
    return text
