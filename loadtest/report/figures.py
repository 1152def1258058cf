"""This module draws the figures of a run from its records into files. `loadtest.report.figure_kinds` lists the figures.

A figure is a function from the run's data to the drawings on its axes; without axes, the run has no such figure.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.judge.analysis import summary_of
from loadtest.judge.autoscale import Autoscaling, analyse_autoscale
from loadtest.judge.metrics import Item, Records, item_bounds, metric_bounds, read_records
from loadtest.judge.stats import Floats
from loadtest.judge.summary import Summary
from loadtest.plan.class_times import classes_from
from loadtest.plan.slo import Limit
from loadtest.records import Row, RunEvent, ServerSample
from loadtest.report import plots, plots_load
from loadtest.report.plots import Sample

Draw = Callable[[Axes], object]
D = TypeVar("D")


@dataclass(frozen=True)
class RunData:
    """One run with its computed figures."""

    records: Records
    summary: Summary

    @property
    def server(self) -> list[ServerSample]:
        return self.records.server

    @cached_property
    def items(self) -> list[Item]:
        """Return all requests with a due time, in its order.

        Later turns of conversations that came due after the end of the arrivals and were never sent are left out.
        """
        end_s = self.records.scenario.duration_s if self.records.scenario.has_conversations else math.inf
        return [i for i in self.records.items() if i.row is None or i.row.state != "never_sent" or i.row.due_s < end_s]

    @cached_property
    def window(self) -> list[Item]:
        start, end = self.summary.window_s
        return [item for item in self.items if start <= item.due_s < end]

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows of the window."""
        return [item.row for item in self.window if item.row is not None]

    def value_s(self, item: Item, metric: str, *, q: float = 1.0) -> float | None:
        """Return the metric of one request, infinite unless measured; None if the request does not have the metric."""
        bounds = item_bounds(self.records, item, metric, q=q)
        return None if bounds is None else bounds[1]

    @property
    def events(self) -> list[RunEvent]:
        """Return the marks of plots over time: the run's events, and the times at which the classes of requests change."""
        scenario = self.records.scenario
        changes = classes_from(scenario.requests, duration_s=scenario.duration_s)
        return [*self.records.events, *(RunEvent(at_s, "phase", f"requests: {names}") for at_s, names in changes.items())]

    def autoscaling(self) -> Autoscaling | None:
        """Return the target's response to its load; None if no source reported its replicas."""
        if not self.names("replicas_desired/") and not self.names("pods_"):
            return None
        by_id = {item.request.id: item for item in self.items}
        rows = [item.row for item in self.items if item.row is not None]

        def held_against(row: Row, limit: Limit) -> float | None:
            return self.value_s(by_id[row.id], limit.metric, q=limit.quantile)

        return analyse_autoscale(self.server, rows, self.records.scenario, held_against)

    def sample(self, metric: str, *, label: str = "") -> Sample:
        """Return the metric over the window; requests that should have the metric and do not are the failed ones."""
        _, values = metric_bounds(self.records, self.window, metric)
        known = np.sort(values[np.isfinite(values)])
        distribution = self.summary.distributions.get(metric)
        n_eff = distribution.n_eff if distribution else 0.0
        return Sample(label or metric.upper(), known, values.size - known.size, n_eff)

    def limit_s(self, metric: str) -> float | None:
        """Return the SLO's tightest limit of the metric."""
        return min((limit.limit_s for limit in self.records.scenario.slo.limits if limit.metric == metric), default=None)

    def series(self, name: str) -> tuple[Floats, Floats] | None:
        """Return times and values of the target's series of this name."""
        points = [(s.t_s, s.values[name]) for s in self.server if name in s.values]
        return (np.array([t for t, _ in points]), np.array([v for _, v in points])) if points else None

    def counter_rate(self, name: str) -> tuple[Floats, Floats] | None:
        """Return times and increments per second of a counter, or None if there are too few points or the counter fell.

        A counter that fell is the sum of other processes than before, and their share of a rise is unknown.
        """
        series = self.series(name)
        if series is None or series[0].size < 2:
            return None
        times, values = series
        steps = np.diff(values)
        return None if (steps < 0).any() else (times[1:], steps / np.maximum(np.diff(times), 1e-9))

    def names(self, prefix: str) -> list[str]:
        return sorted({name for s in self.server for name in s.values if name.startswith(prefix)})


def read_run(run: Path, summary: Summary | None = None) -> RunData:
    """Read the records of a run, and compute its summary if there is none yet.

    Raises:
        UsageError: The folder holds no run, or a record cannot be read.
    """
    records = read_records(run)
    return RunData(records, summary or summary_of(records))


@dataclass(frozen=True)
class Kind(Generic[D]):
    """One kind of figure, drawn from a ``D``."""

    name: str
    """Name of the figure's files."""
    title: str
    caption: str
    panels: Callable[[D], list[Draw]]
    stacked: bool = False
    """Whether the panels are stacked on one time axis with the run's events; otherwise they are side by side."""
    headline: bool = True
    """Whether the figure shows results: it is then left out of an invalid run."""
    size: tuple[float, float] = (5.6, 3.4)
    """Size of one panel in inches."""


@dataclass(frozen=True)
class Drawn:
    """A figure in the page. ``svg`` has the page's colours in place of the figure's own."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool


def draw_all(
    kinds: Sequence[Kind[D]], data: D, folder: Path, *, events: Sequence[RunEvent] = (), headline: bool = True
) -> list[Drawn]:
    """Draw the run's figures into ``folder`` as SVG and PNG; files of figures that no longer exist are removed.

    Args:
        headline: If False, leave out figures that show results.
    """
    folder.mkdir(exist_ok=True)
    drawn = []
    for kind in kinds:
        panels = kind.panels(data) if headline or not kind.headline else []
        for suffix in (".svg", ".png"):
            (folder / f"{kind.name}{suffix}").unlink(missing_ok=True)
        if panels:
            drawn.append(_draw(kind, panels, events, folder))
    return drawn


def _draw(kind: Kind[D], panels: list[Draw], events: Sequence[RunEvent], folder: Path) -> Drawn:
    rows, columns = (len(panels), 1) if kind.stacked else (1, len(panels))
    width, height = kind.size
    with matplotlib.rc_context(cast(Any, plots.STYLE)):  # its type wants keys of a Literal of 300 words
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, sharex=kind.stacked, squeeze=False).flat)
        for draw, ax in zip(panels, axes, strict=True):
            draw(ax)
        if kind.stacked:
            axes[-1].set_xlabel("time since the start of the run [s]")
            plots_load.mark_events(axes, events)
        figure.savefig(folder / f"{kind.name}.png", dpi=150, metadata={"Software": None})
        figure.set_layout_engine("none")  # the layout is done; computing it takes half of the time
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    (folder / f"{kind.name}.svg").write_text(svg.getvalue())
    return Drawn(kind.name, kind.title, kind.caption, for_page(svg.getvalue(), kind), wide=kind.stacked or columns > 1)


def for_page(svg: str, kind: Kind[D]) -> str:
    """Return only the <svg> element, with ids that are unique in the page and with the colours of the page's style."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z]+[A-Za-z]*_\d+"', "", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{kind.name}-", svg)
    for i, color in enumerate(plots.SERIES):
        svg = svg.replace(color, f"var(--series-{i})")
    for name in ("INK", "MUTED", "GRID", "PAPER"):
        svg = svg.replace(getattr(plots, name), f"var(--{name.lower()})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{kind.title}" ', 1)
