"""Which figures a run has, and their files. `loadtest.plots` and `loadtest.plots_load` draw them; the data come from the rows.

A figure is a function from the run's data to what is drawn on its axes; no axes: this run has no such figure.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest import plots, plots_load
from loadtest.analysis import Item, Records, read_records
from loadtest.attribution import attribution
from loadtest.metrics import value_s
from loadtest.plots import Floats, Sample
from loadtest.records import Row, RunEvent, ServerSample, read_lines
from loadtest.slo import Metric
from loadtest.summary import Summary

Draw = Callable[[Axes], object]


@dataclass(frozen=True)
class RunData:
    """One run, and what was computed of it."""

    records: Records
    summary: Summary
    server: list[ServerSample]

    @cached_property
    def items(self) -> list[Item]:
        """All requests with a due time, in its order."""
        return self.records.items()

    @cached_property
    def window(self) -> list[Item]:
        start, end = self.summary.window_s
        return [item for item in self.items if start <= item.due_s < end]

    @cached_property
    def rows(self) -> list[Row]:
        """Of the window."""
        return [item.row for item in self.window if item.row is not None]

    def value_s(self, item: Item, metric: str) -> float | None:
        """Return as `loadtest.metrics.value_s`."""
        stream = self.records.streams.get(item.request.cls, True)
        return value_s(item.request, item.row, metric, closed=self.records.closed, stream=stream)

    def sample(self, metric: str, *, label: str = "") -> Sample:
        """Return the metric over the window; requests without it although they should have one are the failed ones."""
        values = np.array([value for item in self.window if (value := self.value_s(item, metric)) is not None])
        known = np.sort(values[np.isfinite(values)])
        distribution = self.summary.distributions.get(metric)
        n_eff = distribution.n_eff if distribution else 0.0
        return Sample(label or metric.upper(), known, values.size - known.size, n_eff)

    def limit_s(self, metric: str) -> float | None:
        """Return the tightest limit that the SLO has for the metric."""
        return min((limit.limit_s for limit in self.records.scenario.slo.limits if limit.metric == metric), default=None)

    def series(self, name: str) -> tuple[Floats, Floats] | None:
        """Return times and values of what the target said under this name."""
        points = [(s.t_s, s.values[name]) for s in self.server if name in s.values]
        return (np.array([t for t, _ in points]), np.array([v for _, v in points])) if points else None

    def counter_rate(self, name: str) -> tuple[Floats, Floats] | None:
        """Return times and increments per second of a counter; one that starts again counts from 0."""
        series = self.series(name)
        if series is None or series[0].size < 2:
            return None
        times, values = series
        steps = np.diff(values)
        return times[1:], np.where(steps < 0, values[1:], steps) / np.maximum(np.diff(times), 1e-9)

    def names(self, prefix: str) -> list[str]:
        return sorted({name for s in self.server for name in s.values if name.startswith(prefix)})


def read_run(run: Path, summary: Summary) -> RunData:
    """Read the records of a run.

    Raises:
        UsageError: The folder holds no run, or a record cannot be read.
    """
    server = run / "server.jsonl"
    return RunData(read_records(run), summary, list(read_lines(server, ServerSample)) if server.exists() else [])


@dataclass(frozen=True)
class Kind:
    """One kind of figure."""

    name: str
    """Of its files."""
    title: str
    caption: str
    panels: Callable[[RunData], list[Draw]]
    stacked: bool = False
    """The panels lie one above the other on one time axis that carries the run's events; otherwise side by side."""
    headline: bool = True
    """Shows results: left out of an invalid run."""
    size: tuple[float, float] = (5.6, 3.4)
    """Inches, of one panel."""


@dataclass(frozen=True)
class Drawn:
    """A figure as it stands in the page. ``svg`` has the page's colours in place of its own."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool


def draw_all(kinds: Sequence[Kind], data: RunData, folder: Path) -> list[Drawn]:
    """Draw what the run has into ``folder`` as SVG and PNG; files of figures that it has no longer are removed."""
    folder.mkdir(exist_ok=True)
    drawn = []
    for kind in kinds:
        panels = kind.panels(data) if data.summary.verdict != "invalid" or not kind.headline else []
        for suffix in (".svg", ".png"):
            (folder / f"{kind.name}{suffix}").unlink(missing_ok=True)
        if panels:
            drawn.append(_draw(kind, panels, data.records.events, folder))
    return drawn


def _draw(kind: Kind, panels: list[Draw], events: list[RunEvent], folder: Path) -> Drawn:
    rows, columns = (len(panels), 1) if kind.stacked else (1, len(panels))
    width, height = kind.size
    with matplotlib.rc_context(cast(Any, plots.STYLE)):  # its keys are a Literal of 300 words
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, sharex=kind.stacked, squeeze=False).flat)
        for draw, ax in zip(panels, axes, strict=True):
            draw(ax)
        if kind.stacked:
            axes[-1].set_xlabel("time since the start of the run [s]")
            plots_load.mark_events(axes, events)
        figure.savefig(folder / f"{kind.name}.png", dpi=150, metadata={"Software": None})
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    (folder / f"{kind.name}.svg").write_text(svg.getvalue())
    return Drawn(kind.name, kind.title, kind.caption, for_page(svg.getvalue(), kind), wide=kind.stacked or columns > 1)


def for_page(svg: str, kind: Kind) -> str:
    """Return the <svg> element alone, its ids unique in the page and its colours those of the page's style."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z]+[A-Za-z]*_\d+"', "", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{kind.name}-", svg)
    for i, color in enumerate(plots.SERIES):
        svg = svg.replace(color, f"var(--series-{i})")
    for name in ("INK", "MUTED", "GRID", "PAPER"):
        svg = svg.replace(getattr(plots, name), f"var(--{name.lower()})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{kind.title}" ', 1)


def _cdf(metric: Metric, words: str) -> Kind:
    def panels(data: RunData) -> list[Draw]:
        sample = data.sample(metric)
        if not sample.values_s.size:
            return []

        def draw(ax: Axes) -> None:
            plots.plot_cdf(ax, sample, limit_s=data.limit_s(metric))
            ax.set_xlabel(words)

        return [draw]

    return Kind(
        f"cdf-{metric}",
        f"{metric.upper()}: CDF",
        "Shaded: 95 % band for the whole curve. Failed requests keep it below 100 %.",
        panels,
    )


def _tail(data: RunData) -> list[Draw]:
    samples = [s for s in (data.sample("ttft"), data.sample("e2e")) if s.values_s.size]

    def draw(ax: Axes) -> None:
        for color, sample in enumerate(samples):
            plots.plot_tail(ax, sample, color=color)

    return [draw] if samples else []


def _due_against_send(data: RunData) -> list[Draw]:
    pairs = [
        [data.sample(m, label=f"{m.upper()}, since due"), data.sample(f"send_{m}", label=f"{m.upper()}, since sending")]
        for m in ("ttft", "e2e")
    ]
    return [partial(plots.plot_quantiles, samples=pair) for pair in pairs if pair[0].values_s.size]


def _chunks(data: RunData) -> list[Draw]:
    gaps = np.concatenate([np.empty(0), *(np.diff([ms for ms, _ in row.chunks]) / 1e3 for row in data.rows if row.chunks)])
    tokens = np.array([tokens for row in data.rows for _, tokens in row.chunks], dtype=np.int64)
    if not gaps.size:
        return []
    return [
        lambda ax: plots.plot_gaps(ax, gaps, stall_s=data.records.scenario.stall_s),
        lambda ax: plots.plot_tokens_per_chunk(ax, tokens),
    ]


def _rates(data: RunData, edges: Floats) -> Draw:
    def ended(ok: bool) -> Floats:
        return np.array(
            [row.end_s if row.end_s is not None else row.due_s for row in data.records.rows if (row.state == "ok") is ok]
        )

    kinds = {"offered": np.array([item.due_s for item in data.items]), "completed": ended(True), "not completed": ended(False)}
    return lambda ax: plots_load.plot_rates(ax, edges, {name: times for name, times in kinds.items() if times.size})


def _edges(data: RunData) -> Floats:
    last = max((t for row in data.records.rows for t in (row.end_s or row.due_s,) if row.state != "timeout"), default=1.0)
    return plots_load.bin_edges(0.0, max(last, data.summary.window_s[1]))


def _timeline(data: RunData) -> list[Draw]:
    edges = _edges(data)
    if not data.records.rows:
        return []
    draws = [_rates(data, edges), lambda ax: _in_flight(ax, data)]
    if kv := data.series("kv_usage"):
        draws.append(lambda ax: plots_load.plot_share(ax, "KV cache in use", *kv))
    counters = {
        name: rate
        for name in ("requests_rejected", "requests_failed", "preemptions")
        if (rate := data.counter_rate(name)) is not None
    }
    if any(rate[1].any() for rate in counters.values()):
        words = {"requests_rejected": "rejections", "requests_failed": "failures", "preemptions": "preemptions"}
        named = {f"{words[name]}, by the server": rate for name, rate in counters.items()}
        draws.append(lambda ax: plots_load.plot_gauges(ax, named, ylabel="per second", first=1))
    return draws + _replicas(data)


def _in_flight(ax: Axes, data: RunData) -> None:
    sent = [row for row in data.records.rows if row.sent_s is not None]
    last = max((row.end_s for row in sent if row.end_s is not None and row.state != "timeout"), default=0.0)
    ended = [min(row.end_s, last) for row in sent if row.end_s is not None]
    plots_load.plot_in_flight(ax, np.array([row.sent_s for row in sent], dtype=float), np.array(ended))
    named = {f"{name}, by the server": series for name in ("running", "waiting", "held") if (series := data.series(name))}
    plots_load.plot_gauges(ax, named, ylabel="requests", first=1)


def _replicas(data: RunData) -> list[Draw]:
    series: dict[str, tuple[Floats, Floats]] = {}
    for name in [*data.names("replicas_"), *data.names("pods_")]:
        kind, _, deployment = name.partition("/")
        if found := data.series(name):
            series[f"{deployment or 'pods'}: {kind.partition('_')[2]}"] = found
    return [lambda ax: plots_load.plot_gauges(ax, series, ylabel="count", steps=True)] if series else []


def _autoscaling(data: RunData) -> list[Draw]:
    replicas, edges = _replicas(data), _edges(data)
    if not replicas:
        return []
    timed = [(item.due_s, value) for item in data.items if (value := data.value_s(item, "ttft")) is not None]
    due, ttft = np.array([t for t, _ in timed]), np.array([v for _, v in timed])
    wider = edges[:: max(1, int(np.ceil(20 * (edges.size - 1) / max(due.size, 1))))]  # 20 requests a bin, or a p95 is a maximum
    limit = data.limit_s("ttft")
    return [_rates(data, edges), *replicas, lambda ax: plots_load.plot_latency_over_time(ax, due, ttft, wider, limit_s=limit)]


def _health(data: RunData) -> list[Draw]:
    workers = sorted({s.worker for s in data.records.health})
    if not workers:
        return []
    of = {w: [s for s in data.records.health if s.worker == w] for w in workers}
    times = {w: np.array([s.t_s for s in of[w]]) for w in workers}
    lag = {w: (times[w], np.array([s.lag_max_s for s in of[w]])) for w in workers}
    cpu = {w: (times[w], np.array([s.cpu for s in of[w]])) for w in workers}
    return [lambda ax: plots_load.plot_lag(ax, lag), lambda ax: plots_load.plot_cpu(ax, cpu)]


def _arrivals(data: RunData) -> list[Draw]:
    sent = np.array([row.sent_s for row in data.records.rows if row.sent_s is not None])
    due = np.array([item.due_s for item in data.items])
    if sent.size < 3 or due.size < 3 or data.summary.loop == "closed" or np.ptp(due) == 0:
        return []
    edges = plots_load.bin_edges(0.0, float(max(sent.max(), due.max())))

    def counts(ax: Axes) -> None:
        plots_load.plot_rates(ax, edges, {"planned": due, "sent": sent})
        ax.set_xlabel("time since the start of the run [s]")
        ax.legend(loc="best")

    return [lambda ax: plots.plot_gap_qq(ax, due, sent), counts]


def _lengths(data: RunData) -> list[Draw]:
    answered = [(item.row, data.value_s(item, "e2e")) for item in data.window if item.row is not None and item.row.state == "ok"]
    seen = [(r.prompt_tokens, r.output_tokens, e2e) for r, e2e in answered if r.prompt_tokens and r.output_tokens]
    if len({s[:2] for s in seen}) < 3:
        return []
    prompt, output, e2e = (np.array(column, dtype=float) for column in zip(*seen, strict=True))
    return [lambda ax: plots.plot_lengths(ax, prompt, output, e2e)]


def _waterfall(data: RunData) -> list[Draw]:
    found = attribution(data.server, data.records.rows, data.summary.window_s)
    if found is None:
        return []
    words = {"lag": "generator lag", "edge": "residual: edge", "flush": "residual: flush"}
    parts = {words.get(name, name): part for name, part in found.parts().items()}
    label = f"mean time since due (n={found.num_client} by the client, {found.num_server:.0f} by the server)"

    def draw(ax: Axes) -> None:
        plots_load.plot_waterfall(ax, parts)
        ax.set_xlabel(label)

    return [draw]


KINDS = (
    _cdf("ttft", "time to first token since due"),
    _cdf("tpot", "time per output token after the first"),
    _cdf("e2e", "time to the end of the answer since due"),
    Kind("tail", "The tail", "A straight line is a power law; each curve ends at the share that failed.", _tail),
    Kind("due-send", "Since due against since sending", "Shaded: what coordinated omission would hide.", _due_against_send),
    Kind("chunks", "Chunks", "A comb in the gaps, or many tokens in a chunk: the server or a proxy batches its output.", _chunks),
    Kind("lengths", "Lengths and E2E", "One dot per answered request.", _lengths),
    Kind(
        "waterfall",
        "Where the time goes",
        "Means over the window, by the server's own counters; the residual is not spread.",
        _waterfall,
    ),
    Kind("timeline", "The run over time", "Faults are solid lines, phases dotted ones.", _timeline, True, False, (9.5, 1.6)),
    Kind("autoscaling", "Autoscaling", "Replicas asked for and ready, and what users felt.", _autoscaling, True, size=(9.5, 1.8)),
    Kind("arrivals", "Arrivals: planned and sent", "Off the diagonal: the generator bent the load.", _arrivals, headline=False),
    Kind(
        "health",
        "Worker processes",
        "The largest delay of each second, and CPU seconds per second.",
        _health,
        True,
        False,
        (9.5, 1.5),
    ),
)
"""All figures that a single run may have, in the order of the page."""
