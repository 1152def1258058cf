"""This module draws the figures of `Comparison` as an SVG: a row for each side, a panel for each figure, a dot for the median of the seeds.

The colours are those of the load test kit's figures (`loadtest/report/plots.py`), whose Matplotlib this package does without.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from serve_app.planning.comparison import Figures, Limits
from serve_app.planning.verdict import Verdict, median, shown_s

SERIES = ("#0072b2", "#d55e00", "#009e73")
"""Together, `routing.apart`, pools."""
INK, MUTED, GRID, PAPER = "#1e293b", "#64748b", "#e2e8f0", "#ffffff"
_WIDTH, _ROW, _NAMES, _GAP, _MARGIN, _LINE = 980, 30, 108, 32, 20, 18
_COLUMNS, _WHAT_COLUMNS = 108, 130
"""Characters of a line of the verdict, and of the line below it."""
_CHARACTER = 6.2
"""Usual width of a character of a label."""


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    of: Callable[[Figures], float]
    shown: Callable[[float], str]
    limit: float
    limit_name: str
    is_log: bool = True


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to places from ``left`` on."""

    left: float
    width: float
    low: float
    high: float
    is_log: bool

    def at(self, value: float) -> float:
        if not self.is_log:
            return self.left + self.width * (value - self.low) / (self.high - self.low)
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.left + self.width * share

    def ticks(self) -> Iterator[float]:
        """Yield round numbers, few enough for their labels."""
        if self.is_log:
            factors = (1, 2, 5) if self.high / self.low < 100 else (1,)
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            yield from (tick for power in powers for factor in factors if self.low <= (tick := factor * 10.0**power) <= self.high)
            return
        step = 10.0 ** math.floor(math.log10(self.high / 2))
        step *= next(factor for factor in (1, 2, 5) if self.high / (factor * step) <= 5)
        yield from (number * step for number in range(int(self.high / step) + 1))


def svg(found: Mapping[str, Sequence[Figures]], judged: Verdict, limits: Limits, what: str) -> str:
    """Return the drawing. ``what`` says in one line what was simulated."""
    offered = median(next(iter(found.values())), lambda run: run.requests_per_s)
    panels = (
        _Panel("goodput, requests/s", lambda run: run.good_per_s, lambda value: f"{value:.1f}", offered, "all", is_log=False),
        _Panel("ITL p99", lambda run: run.itl_p99_s, shown_s, limits.itl_s, "limit"),
        _Panel("TTFT p99", lambda run: run.ttft_p99_s, shown_s, limits.ttft_s, "limit"),
    )
    words, more = textwrap.wrap(judged.sentence, _COLUMNS), textwrap.wrap(what, _WHAT_COLUMNS)
    top = _MARGIN + _LINE * (len(words) + len(more) + 2) + 14
    bottom = top + _ROW * len(found)
    height = bottom + 2 * _LINE + 8 + _MARGIN
    width = (_WIDTH - 2 * _MARGIN - _NAMES - _GAP * len(panels)) / len(panels)
    lefts = [_MARGIN + _NAMES + number * (width + _GAP) for number in range(len(panels))]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}" role="img">',
        f"<title>{escape(judged.sentence)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="{PAPER}"/>',
        *(_text(_MARGIN, _MARGIN + _LINE * (n + 1) - 6, word, size=14, bold=True) for n, word in enumerate(words)),
        *(_text(_MARGIN, _MARGIN + _LINE * (len(words) + n + 1), line, colour=MUTED) for n, line in enumerate(more)),
        *(_text(_MARGIN, top + _ROW * n + _ROW / 2 + 4, name, bold=name == judged.best) for n, name in enumerate(found)),
        *(line for panel, left in zip(panels, lefts, strict=True) for line in _drawn(panel, found, left, width, top, bottom)),
        _text(
            _MARGIN,
            height - _MARGIN + 4,
            "Simulated. Dots are medians of the seeds, lines reach from least to greatest.",
            colour=MUTED,
        ),
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def _drawn(
    panel: _Panel, found: Mapping[str, Sequence[Figures]], left: float, width: float, top: float, bottom: float
) -> Iterator[str]:
    """Yield a panel: its title, the axis, the limit, and a dot in each row."""
    values = [panel.of(run) for runs in found.values() for run in runs]
    low, high = 0.0, 1.15 * max(*values, panel.limit)
    if panel.is_log:
        positive = [value for value in (*values, panel.limit) if value > 0]
        low, high = min(positive) / 1.5, 1.5 * max(positive)
    axis = _Axis(left, width, low, high, panel.is_log)
    yield _text(left, top - 24, panel.title, bold=True)
    for tick in axis.ticks():
        yield _line(axis.at(tick), top, axis.at(tick), bottom, GRID)
        label = shown_s(tick).replace(".0 ", " ").replace(".00 ", " ") if panel.is_log else f"{tick:g}"
        yield _text(axis.at(tick), bottom + _LINE - 2, label, colour=MUTED, anchor="middle", size=11)
    limit = axis.at(panel.limit)
    yield _line(limit, top - 4, limit, bottom, INK, dashes="4 3")
    yield _text(limit, top - 8, f"{panel.limit_name} {panel.shown(panel.limit)}", anchor="middle", size=11)
    for number, (name, runs) in enumerate(found.items()):
        y = top + _ROW * (number + 0.5)
        colour = SERIES[min(number, len(SERIES) - 1)]
        ends = [axis.at(value) for value in (min(map(panel.of, runs)), max(map(panel.of, runs)))]
        middle = median(runs, panel.of)
        if ends[1] > ends[0]:
            yield _line(ends[0], y, ends[1], y, colour, width=3)
        yield f'<circle cx="{axis.at(middle):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"><title>{escape(name)}</title></circle>'
        label = panel.shown(middle)
        if ends[1] + 8 + _CHARACTER * len(label) <= left + width:
            yield _text(ends[1] + 8, y + 4, label, halo=True)
        else:
            yield _text(ends[0] - 8, y + 4, label, anchor="end", halo=True)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    colour: str = INK,
    anchor: str = "start",
    bold: bool = False,
    halo: bool = False,
) -> str:
    """Return a line of text. A halo of the paper's colour keeps it readable over lines."""
    weight = ' font-weight="600"' if bold else ""
    around = f' stroke="{PAPER}" stroke-width="3" paint-order="stroke"' if halo else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f"<text {place}{weight}{around}>{escape(text)}</text>"
