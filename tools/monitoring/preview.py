"""This command draws the dashboards without Grafana: every panel at its place, from a Prometheus's answers to its expressions.

`python -m tools.monitoring.preview --prometheus http://127.0.0.1:9090 --out build/preview`, beside `make run` and `make observe`. Layout,
titles, legends, units, limits and data are the dashboard's; fonts and colours are not Grafana's.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import requests
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import default_facts, filled

COLUMN_IN, LINE_IN = 0.75, 0.42
"""Inches of one of Grafana's 24 columns and of one unit of height."""
_UNITS = {
    "s": (1.0, " s"),
    "percentunit": (100.0, " %"),
    "bytes": (1 / 2**30, " GiB"),
    "reqps": (1.0, " req/s"),
    "ops": (1.0, "/s"),
}


class Line(NamedTuple):
    """One series of a panel. ``times``: seconds before now, so that the newest is 0."""

    legend: str
    times: Sequence[float]
    values: Sequence[float]

    def named(self, unit: str) -> str:
        """Return the legend with the last value that is a number, as in Grafana's legends."""
        known = [value for value in self.values if not np.isnan(value)]
        return f"{self.legend}  {shown(known[-1], unit) if known else 'no value'}".strip()


class Source(Protocol):
    """The source of a panel's series."""

    def lines(self, panel: Mapping[str, Any]) -> Iterator[Line]: ...


class Prometheus:
    """A Prometheus that evaluates the dashboards' expressions for one release on this machine."""

    def __init__(self, url: str, minutes: float) -> None:
        self._url, self._minutes = url, minutes
        self._chosen = {"$namespace": "local", "$release": "serve-app", "$model": ".*", "$__rate_interval": "30s"}

    def lines(self, panel: Mapping[str, Any]) -> Iterator[Line]:
        """Yield the series of a panel."""
        now = time.time()
        for target in panel["targets"]:
            promql = target["expr"]
            for name, value in self._chosen.items():
                promql = promql.replace(name, value)
            asked = {"query": promql, "start": now - self._minutes * 60, "end": now, "step": max(5.0, self._minutes / 4)}
            answer = requests.get(f"{self._url}/api/v1/query_range", params=asked, timeout=20)
            answer.raise_for_status()
            for series in answer.json()["data"]["result"]:
                times, values = zip(*((at - now, float(value)) for at, value in series["values"]), strict=True)
                yield Line(legend_of(target["legendFormat"], series["metric"]), times, values)


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """Return the legend with the values of the series' labels in place of their names, as Grafana does."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), template).strip()


def shown(value: float, unit: str) -> str:
    """Return the value with its unit."""
    factor, word = _UNITS.get(unit, (1.0, ""))
    return f"{value * factor:.4g}{word}"


def draw(panel: Mapping[str, Any], lines: Sequence[Line], ax: Axes) -> None:
    """Draw one panel on ``ax``."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    ax.set_title(panel["title"], fontsize=8, loc="left")
    if not lines or panel["type"] != "timeseries":
        ax.set_axis_off()
        rows = [line.named(unit) for line in lines] or ["nothing"]
        ax.text(
            0.5, 0.5, "\n".join(rows[:8]), ha="center", va="center", fontsize=8 if len(rows) > 1 else 13, transform=ax.transAxes
        )
        return
    for line in lines:
        ax.plot(line.times, line.values, linewidth=1, label=line.named(unit))
    drawn = [value for line in lines for value in line.values if np.isfinite(value)]
    lowest, highest = min(drawn, default=0.0), max(drawn, default=0.0)
    span = (max(0.0, highest) - min(0.0, lowest)) or 1.0
    ax.set_ylim(1.1 * min(0.0, lowest), max(0.0, highest) + span * (0.1 + 0.07 * min(len(lines), 8)))  # room for the legend
    ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / 60:g} min"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    ax.tick_params(labelsize=6)
    ax.legend(fontsize=6, loc="upper left", frameon=False, ncols=1 + (len(lines) > 8))


def picture(board: Mapping[str, Any], source: Source) -> Figure:
    """Return the whole dashboard as one figure."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = Figure(figsize=(24 * COLUMN_IN, height * LINE_IN))
    for panel in board["panels"]:
        at = panel["gridPos"]
        bottom = 1 - (at["y"] + at["h"]) / height
        if panel["type"] == "row":
            figure.text(0.005, bottom, panel["title"], fontsize=11, weight="bold")
            continue
        box = ((at["x"] + 1.2) / 24, bottom + 0.8 / height, (at["w"] - 1.6) / 24, (at["h"] - 2.0) / height)
        draw(panel, list(source.lines(panel)), figure.add_axes(box))
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a PNG for each dashboard; return 0, or 2 if no Prometheus answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far back")
    parser.add_argument("--out", type=Path, default=Path("build/preview"))
    given = parser.parse_args(arguments)
    try:
        requests.get(f"{given.prometheus}/-/ready", timeout=20).raise_for_status()
    except requests.RequestException:
        print(f"error: no Prometheus answers at {given.prometheus}; start `make observe` in another terminal", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    facts = default_facts(namespace="local", release="serve-app")
    for board in BOARDS:
        file = given.out / f"{board.name}.png"
        made = json.loads(filled(board_file(board), facts))
        picture(made, Prometheus(given.prometheus, given.minutes)).savefig(file, dpi=80)
        print(file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
