"""This command draws the dashboards without Grafana: every panel at its place, from a Prometheus's answers to its expressions.

`python -m tools.monitoring.preview --prometheus http://127.0.0.1:9090 --out build/preview`, beside `make run` and `make observe`. Layout,
titles, legends, units, limits and data are the dashboard's; fonts and colours are those of the load test's report.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import matplotlib as mpl
import numpy as np
import requests
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadtest.report.plots import SERIES, STYLE
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import default_facts, filled

COLUMNS = 24
"""The width of Grafana's grid."""
COLUMN_IN, LINE_IN, DPI = 0.6, 0.4, 100
"""Inches of one of these columns and of one unit of height; dots per inch."""
_TICK_STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 345600)
_UNITS = {
    "s": (1.0, " s"),
    "percentunit": (100.0, " %"),
    "bytes": (1 / 2**30, " GiB"),
    "Bps": (1e-6, " MB/s"),
    "reqps": (1.0, " req/s"),
    "ops": (1.0, "/s"),
}


class Line(NamedTuple):
    """One series of a panel. ``times`` is Unix time, ascending."""

    legend: str
    times: Sequence[float]
    values: Sequence[float]

    def named(self, unit: str) -> str:
        """Return the legend with the last value that is a number, as in Grafana's legends."""
        known = [value for value in self.values if not np.isnan(value)]
        return f"{self.legend}  {shown(known[-1], unit) if known else 'no value'}".strip()


class Source(Protocol):
    """The source of a panel's series, all within ``span``: the first and the last second, as Unix time."""

    span: tuple[float, float]

    def lines(self, panel: Mapping[str, Any]) -> Iterator[Line]: ...


class Prometheus:
    """A Prometheus that evaluates the dashboards' expressions for one release on this machine."""

    def __init__(self, url: str, minutes: float) -> None:
        now = time.time()
        self.span = (now - minutes * 60, now)
        self._url, self._step_s = url, max(5.0, minutes / 4)
        self._chosen = {"$namespace": "local", "$release": "serve-app", "$model": ".*", "$__rate_interval": "30s"}

    def lines(self, panel: Mapping[str, Any]) -> Iterator[Line]:
        """Yield the series of a panel."""
        for target in panel["targets"]:
            promql = target["expr"]
            for name, value in self._chosen.items():
                promql = promql.replace(name, value)
            asked = {"query": promql, "start": self.span[0], "end": self.span[1], "step": self._step_s}
            answer = requests.get(f"{self._url}/api/v1/query_range", params=asked, timeout=20)
            answer.raise_for_status()
            for series in answer.json()["data"]["result"]:
                times, values = zip(*((at, float(value)) for at, value in series["values"]), strict=True)
                yield Line(legend_of(target["legendFormat"], series["metric"]), times, values)


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """Return the legend with the values of the series' labels in place of their names, as Grafana does."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), template).strip()


def shown(value: float, unit: str) -> str:
    """Return the value with its unit."""
    factor, word = _UNITS.get(unit, (1.0, ""))
    return f"{value * factor:.4g}{word}"


def clock_ticks(first: float, last: float) -> list[float]:
    """Return 2 to 7 round times of the local clock in a span of up to four weeks; fewer in a span of less than 30 s."""
    step = next((step for step in _TICK_STEPS_S if last - first <= 6 * step), _TICK_STEPS_S[-1])
    offset = time.localtime(last).tm_gmtoff
    return [at - offset for at in np.arange(np.ceil((first + offset) / step) * step, last + offset + 0.001, step)]


def clock(at: float, span_s: float) -> str:
    """Return a time as a clock shows it: with seconds on a span of a few minutes, with the day on one of days."""
    form = "%H:%M:%S" if span_s < 180 else "%H:%M" if span_s < 86400 else "%d %H:%M"
    return time.strftime(form, time.localtime(at))


def draw(panel: Mapping[str, Any], lines: Sequence[Line], ax: Axes, span: tuple[float, float]) -> None:
    """Draw one panel on ``ax``, over all of ``span``."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    ax.set_title(panel["title"], fontsize=9, loc="left")
    lines = [line for line in lines if any(np.isfinite(line.values))]
    if not lines or panel["type"] != "timeseries":
        ax.set_axis_off()
        rows = [line.named(unit) for line in lines] or ["no data yet"]
        ax.text(
            0.5, 0.5, "\n".join(rows[:8]), ha="center", va="center", fontsize=8 if len(rows) > 1 else 13, transform=ax.transAxes
        )
        return
    for line in lines:
        # A line of a single value would not be seen.
        marker = "." if np.isfinite(line.values).sum() == 1 else ""
        ax.plot(line.times, line.values, linewidth=1, marker=marker, label=line.named(unit))
    drawn = [value for line in lines for value in line.values if np.isfinite(value)]
    lowest, highest = min(drawn, default=0.0), max(drawn, default=0.0)
    extent = (max(0.0, highest) - min(0.0, lowest)) or 1.0 / _UNITS.get(unit, (1.0, ""))[0]
    ax.set_ylim(1.1 * min(0.0, lowest), max(0.0, highest) + extent * (0.1 + 0.09 * min(len(lines), 8)))  # room for the legend
    factor, lowest, highest = _UNITS.get(unit, (1.0, ""))[0], *ax.get_ylim()
    ticks = (tick / factor for tick in MaxNLocator(6).tick_values(lowest * factor, highest * factor))  # round in the shown unit
    ax.set_yticks([tick for tick in ticks if lowest <= tick <= highest])
    ax.set_xlim(*span)
    ax.set_xticks(clock_ticks(*span))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: clock(at, span[1] - span[0])))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    ax.tick_params(labelsize=7)
    ax.legend(fontsize=7, labelspacing=0.25, loc="upper left", frameon=False, ncols=1 + (len(lines) > 8))


def with_data(panels: Sequence[Mapping[str, Any]], source: Source) -> list[dict[str, Any]]:
    """Return the panels that show something, and the rows that have such a panel. Panels keep their order and height and fill each line.

    A line that is always 0 shows nothing, and the number 0 does.
    """
    kept: list[dict[str, Any]] = []
    bottom = 0
    starts = [number for number, panel in enumerate(panels) if panel["type"] == "row"]
    for start, end in zip(starts, [*starts[1:], len(panels)], strict=True):
        known = [panel for panel in panels[start + 1 : end] if _shows(panel, source)]
        if known:
            kept.append({**panels[start], "gridPos": {**panels[start]["gridPos"], "y": bottom}})
            kept += _in_lines(known, bottom + panels[start]["gridPos"]["h"])
            bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in kept)
    return kept


def _shows(panel: Mapping[str, Any], source: Source) -> bool:
    values = [value for line in source.lines(panel) for value in line.values if np.isfinite(value)]
    return any(values) or (bool(values) and panel["type"] != "timeseries")


def _in_lines(panels: Sequence[Mapping[str, Any]], top: int) -> Iterator[dict[str, Any]]:
    """Yield the panels in lines below ``top``, the panels of each line widened in proportion to its full width."""
    lines: list[list[Mapping[str, Any]]] = [[]]
    for panel in panels:
        if sum(each["gridPos"]["w"] for each in lines[-1]) + panel["gridPos"]["w"] > COLUMNS:
            lines.append([])
        lines[-1].append(panel)
    for line in lines:
        wider = COLUMNS / sum(each["gridPos"]["w"] for each in line)
        left = 0.0
        for panel in line:
            width = panel["gridPos"]["w"] * wider
            yield {**panel, "gridPos": {"x": left, "y": top, "w": width, "h": panel["gridPos"]["h"]}}
            left += width
        top += max(panel["gridPos"]["h"] for panel in line)


def picture(board: Mapping[str, Any], source: Source) -> Figure:
    """Return the whole dashboard as one figure."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = Figure(figsize=(COLUMNS * COLUMN_IN, height * LINE_IN))
    for panel in board["panels"]:
        at = panel["gridPos"]
        bottom = 1 - (at["y"] + at["h"]) / height
        if panel["type"] == "row":
            figure.text(0.005, bottom, panel["title"], fontsize=11, weight="bold")
            continue
        box = ((at["x"] + 1.3) / COLUMNS, bottom + 0.8 / height, (at["w"] - 1.7) / COLUMNS, (at["h"] - 2.0) / height)
        draw(panel, list(source.lines(panel)), figure.add_axes(box), source.span)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a PNG for each dashboard; return 0, or 2 if no Prometheus answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far back")
    parser.add_argument("--out", type=Path, default=Path("build/preview"))
    parser.add_argument("--boards", nargs="*", choices=[board.name for board in BOARDS], help="default: all")
    parser.add_argument("--with-data", action="store_true", help="leave out panels that show nothing")
    given = parser.parse_args(arguments)
    try:
        requests.get(f"{given.prometheus}/-/ready", timeout=20).raise_for_status()
    except requests.RequestException:
        print(f"error: no Prometheus answers at {given.prometheus}; start `make observe` in another terminal", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    facts = default_facts(namespace="local", release="serve-app")
    style: Any = STYLE | {"axes.prop_cycle": cycler(color=SERIES)}
    with mpl.rc_context(style):
        for board in (board for board in BOARDS if not given.boards or board.name in given.boards):
            file = given.out / f"{board.name}.png"
            made = json.loads(filled(board_file(board), facts))
            source = Prometheus(given.prometheus, given.minutes)
            if given.with_data:
                made["panels"] = with_data(made["panels"], source)
            picture(made, source).savefig(file, dpi=DPI)
            print(file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
