"""These figures draw a run second by second, and a target's response to rising load.

As in `loadtest.report.plots`, each function draws on the axis it is given, and reads and saves nothing. Times are seconds from the epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from loadtest.judge.stats import Floats, quantile
from loadtest.records import RunEvent
from loadtest.report.plots import INK, MUTED, SERIES, legend_above, limit_line, percent_axis, seconds_axis

DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class ProbePoint:
    """One point of a saturation search."""

    rate: float
    verdict: str
    goodput: float
    completed: float
    latency_s: float | None
    """The latency at the SLO's quantile; None: beyond all measured values."""
    n: int


def bin_edges(start_s: float, end_s: float) -> Floats:
    """Return edges of bins of a second over start..end, or of longer bins so that there are at most 240."""
    width = max(1.0, np.ceil((end_s - start_s) / 240))
    end_s = max(end_s, start_s + width)
    return np.asarray(np.arange(np.floor(start_s), end_s + width, width), dtype=np.float64)


def plot_rates(ax: Axes, edges_s: Floats, times_s: Mapping[str, Floats]) -> None:
    """Draw events per second of each kind over the bins: the first kind, the planned requests, as an area, the others as steps."""
    width = float(edges_s[1] - edges_s[0])
    for i, (name, times) in enumerate(times_s.items()):
        rate = np.histogram(times, edges_s)[0] / width
        label = f"{name} (n={times.size})"
        if i == 0:
            ax.stairs(rate, edges_s, color=SERIES[i], alpha=0.3, fill=True, linewidth=0, label=label)
        else:
            ax.stairs(rate, edges_s, color=SERIES[i % len(SERIES)], linewidth=1.3, baseline=None, label=label)
    ax.set(ylabel="requests/s", ylim=(0, None))
    legend_right(ax)


def plot_in_flight(ax: Axes, sent_s: Floats, ended_s: Floats) -> None:
    """Draw the number of running requests, as the client counted them."""
    times = np.concatenate([sent_s, ended_s])
    order = np.argsort(times, kind="stable")
    steps = np.concatenate([np.ones(sent_s.size), -np.ones(ended_s.size)])[order]
    keep = np.unique(np.linspace(0, max(times.size - 1, 0), 1500).astype(int)) if times.size else np.array([], dtype=int)
    ax.step(
        times[order][keep], np.cumsum(steps)[keep], where="post", color=SERIES[0], linewidth=1.2, label="in flight, by the client"
    )
    ax.set(ylabel="requests", ylim=(0, None))
    legend_right(ax)


def plot_gauges(
    ax: Axes, series: Mapping[str, tuple[Floats, Floats]], *, ylabel: str, steps: bool = False, first: int = 0
) -> None:
    """Draw (times, values) of each name. ``steps``: the values are whole numbers that jump; ``first``: number of the first colour."""
    for i, (name, (times, values)) in enumerate(series.items(), first):
        style = DASHES[(i - first) % len(DASHES)]
        ax.plot(
            times, values, color=SERIES[i % len(SERIES)], linestyle=style, drawstyle="steps-post" if steps else None, label=name
        )
    ax.set(ylabel=ylabel, ylim=(0, None))
    if steps:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    legend_right(ax)


def plot_share(ax: Axes, name: str, times_s: Floats, share: Floats) -> None:
    """Draw a share, 0..1, over time."""
    ax.plot(times_s, share, color=SERIES[3], label=name)
    ax.set(ylabel="share", ylim=(0, max(0.05, 1.05 * float(share.max(initial=0.0)))))
    percent_axis(ax.yaxis)
    legend_right(ax)


def plot_latency_over_time(ax: Axes, due_s: Floats, latency_s: Floats, edges_s: Floats, *, limit_s: float | None) -> None:
    """Draw the 95th percentile per bin of due time. Failed (infinite) requests count; a bin with an infinite percentile has a mark."""
    where = np.digitize(due_s, edges_s) - 1
    p95 = np.full(edges_s.size - 1, np.nan)
    for b in np.unique(where[(where >= 0) & (where < p95.size)]):
        p95[b] = quantile(latency_s[where == b], 0.95)
    ax.stairs(
        np.where(np.isinf(p95), np.nan, p95),
        edges_s,
        color=SERIES[1],
        baseline=None,
        linewidth=1.3,
        label="TTFT p95, by due time",
    )
    failed = (edges_s[:-1] + np.diff(edges_s) / 2)[np.isinf(p95)]
    if failed.size:
        top = ax.get_xaxis_transform()
        ax.plot(
            failed, np.full(failed.size, 0.97), "^", color=SERIES[1], markersize=4, transform=top, label="more than 5 % failed"
        )
    ax.set(yscale="log", ylabel="latency")
    seconds_axis(ax.yaxis)
    if limit_s is not None:
        limit_line(ax, limit_s, horizontal=True)
    legend_right(ax)


def peaks(times: Floats, values: Floats, most: int = 1000) -> tuple[Floats, Floats]:
    """Return the largest value of each of at most ``most`` groups of neighbours, at the group's first time: long runs stay small."""
    if not times.size:
        return times, values
    starts = np.arange(0, times.size, -(-times.size // most))
    return times[starts], np.maximum.reduceat(values, starts)


def plot_lag(ax: Axes, samples: Mapping[int, tuple[Floats, Floats]]) -> None:
    """Draw the largest delay of each worker's event loop in each second."""
    for worker, (times, lag) in ((w, peaks(*series)) for w, series in samples.items()):
        style = DASHES[worker // len(SERIES) % len(DASHES)]
        ax.plot(
            times,
            np.maximum(lag, 1e-5),
            color=SERIES[worker % len(SERIES)],
            linestyle=style,
            linewidth=1.2,
            label=f"worker {worker}",
        )
    ax.set(yscale="log", ylabel="event loop lag")
    seconds_axis(ax.yaxis)
    _legend_of_few(ax, len(samples))


def plot_cpu(ax: Axes, samples: Mapping[int, tuple[Floats, Floats]]) -> None:
    """Draw the share of one core that each worker process used."""
    for worker, (times, cpu) in ((w, peaks(*series)) for w, series in samples.items()):
        style = DASHES[worker // len(SERIES) % len(DASHES)]
        ax.plot(times, cpu, color=SERIES[worker % len(SERIES)], linestyle=style, linewidth=1.2, label=f"worker {worker}")
    ax.set(ylabel="CPU of one core", ylim=(0, 1.05))
    percent_axis(ax.yaxis)
    _legend_of_few(ax, len(samples))


def mark_events(axes: Sequence[Axes], events: Sequence[RunEvent], *, words: bool = True) -> None:
    """Draw phases (dotted), faults and losses as vertical lines through all ``axes``, with labels above the first axis."""
    span = axes[0].get_xlim()
    room = (span[1] - span[0]) / 110  # about one letter: labels that would touch are moved one line up
    free_from = [-np.inf] * 4
    for event in sorted(events, key=lambda e: e.t_s):
        quiet = event.kind in ("phase", "note")
        for ax in axes:
            ax.axvline(event.t_s, color=MUTED if quiet else INK, linewidth=1, linestyle=":" if quiet else "-", zorder=1)
        if not words:
            continue
        said = ("end: " if event.kind == "fault-end" else "") + event.text[:40]
        level = next((i for i, t in enumerate(free_from) if event.t_s >= t), len(free_from) - 1)
        free_from[level] = event.t_s + room * (len(said) + 2)
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 8}
        axes[0].annotate(said, (event.t_s, 1.0), (2, 3 + 10 * level), color=MUTED if quiet else INK, **place)


def plot_latency_against_load(ax: Axes, probes: Sequence[ProbePoint], *, limit_s: float | None, metric: str) -> None:
    """Draw the latency of the SLO at each offered rate; the marks show the verdict of each probe."""
    _probe_marks(ax, [(p, p.latency_s) for p in probes if p.latency_s is not None])
    beyond = [p.rate for p in probes if p.latency_s is None and p.verdict != "invalid"]
    if beyond:
        label = f"beyond all measured (probes={len(beyond)})"
        ax.plot(beyond, [0.97] * len(beyond), "^", color=INK, markersize=5, transform=ax.get_xaxis_transform(), label=label)
    ax.set(xlabel="offered requests/s", ylabel=metric, yscale="log", xlim=(0, None))
    seconds_axis(ax.yaxis)
    if limit_s is not None:
        limit_line(ax, limit_s, horizontal=True)


def plot_goodput_against_load(ax: Axes, probes: Sequence[ProbePoint]) -> None:
    """Draw completed and good requests per second; on the diagonal no request is lost."""
    ordered = sorted((p for p in probes if p.verdict != "invalid"), key=lambda p: p.rate)
    top = max(p.rate for p in probes)
    ax.plot([0, top], [0, top], color=MUTED, linewidth=1, linestyle=":", label="all that is offered")
    ax.plot(
        [p.rate for p in ordered],
        [p.completed for p in ordered],
        "s--",
        color=SERIES[5],
        markersize=4,
        linewidth=1,
        label="completed",
    )
    _probe_marks(ax, [(p, p.goodput) for p in ordered], name="goodput, ")
    ax.set(xlabel="offered requests/s", ylabel="requests/s", xlim=(0, None), ylim=(0, None))
    ax.legend(loc="best")


def _probe_marks(ax: Axes, points: Sequence[tuple[ProbePoint, float]], *, name: str = "") -> None:
    marks = {"pass": ("o", SERIES[2]), "fail": ("X", SERIES[1]), "undecided": ("D", SERIES[4]), "invalid": ("v", MUTED)}
    for verdict, (mark, color) in marks.items():
        chosen = [(p.rate, y) for p, y in points if p.verdict == verdict]
        if chosen:
            label = f"{name}{verdict} (probes={len(chosen)})"
            ax.plot(*zip(*chosen, strict=True), mark, color=color, markersize=6, label=label)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="best")


def mark_capacity(ax: Axes, low: float | None, high: float | None, *, knees: Mapping[str, float]) -> None:
    """Shade the interval of the capacity, up to the axis's end if it is open, and mark each knee with the name of its method."""
    left, right = ax.get_xlim()
    words = f"capacity {'below' if low is None else f'{low:.3g}'} to {'beyond' if high is None else f'{high:.3g}'}/s"
    ax.axvspan(
        left if low is None else low, right if high is None else high, color=SERIES[0], alpha=0.18, linewidth=0, label=words
    )
    for style, (name, knee) in zip(("-.", (0, (1, 1))), knees.items(), strict=False):
        ax.axvline(knee, color=SERIES[3], linewidth=1.2, linestyle=style, label=f"knee by {name} {knee:.3g}/s")
    legend_above(ax, columns=2)


def plot_waterfall(ax: Axes, parts: Mapping[str, float]) -> None:
    """Draw the mean parts of a latency one after the other; the unexplained rest is a part too."""
    start, names = 0.0, list(parts)
    written = EngFormatter(unit="s", places=1)
    for row, (name, part) in enumerate(parts.items()):
        color = MUTED if name.startswith("residual") else SERIES[row % len(SERIES)]
        ax.barh(row, part, left=start, color=color, height=0.7)
        ax.annotate(written(part), (max(start, start + part), row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        start += part
    ax.set(xlabel="mean time since due", ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    ax.margins(x=0.15)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    seconds_axis(ax.xaxis, log=False)


def legend_right(ax: Axes) -> None:
    """Put the legend beside the axis, where it covers no curve."""
    ax.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, borderaxespad=0)


def _legend_of_few(ax: Axes, count: int) -> None:
    """Draw a legend if there are few curves. Sixteen workers do not fit beside an axis, and the curves show if one differs."""
    if count <= 8:
        legend_right(ax)
