"""This module draws the figures of `benchmarks.fairness` from its phases. Each function but `draw` draws on the axis that it is given."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import fairness_figures as of
from benchmarks.fairness_figures import EQUAL, WEIGHTS, Groups
from benchmarks.overload import FIRST_TOKEN_S
from benchmarks.tenant_fleet import FAIR, FCFS, SIDES
from benchmarks.tenant_loads import Phase
from loadtest.report.plots import SERIES, STYLE, Sample, plot_cdf, seconds_axis


def draw(folder: Path, groups: Groups) -> None:
    """Write the figures as PNG."""
    style: Any = STYLE  # matplotlib's type lists the keys
    with mpl.rc_context(style):
        for ingresses in sorted({key[3] for key in groups}):
            for part in ("noisy", "nearly"):
                if any(key[0] == part and key[3] == ingresses for key in groups):
                    figure, axes = _figure(2)
                    for ax, side in zip(axes, SIDES, strict=True):
                        plot_victims(ax, groups, part, side, ingresses)
                    _save(figure, folder / f"{part}-{ingresses}.png")
            if any(key[0] in ("equal", "weights") and key[3] == ingresses for key in groups):
                figure, axes = _figure(2)
                for ax, (part, weights) in zip(axes, (("equal", EQUAL), ("weights", WEIGHTS)), strict=True):
                    plot_shares(ax, groups, part, weights, ingresses)
                _save(figure, folder / f"shares-{ingresses}.png")
            if any(key[0] == "overload" and key[3] == ingresses for key in groups):
                figure, axes = _figure(2)
                plot_goodput(axes[0], groups, ingresses)
                plot_admitted(axes[1], groups, ingresses)
                _save(figure, folder / f"overload-{ingresses}.png")


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, columns, squeeze=False)[0]
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)


def _sample(label: str, phases: Sequence[Phase], prefix: str) -> Sample:
    found = of.ttft(each for phase in phases for each in of.window(phase, prefix))
    return Sample(label, found.values_s[np.isfinite(found.values_s)], found.refused + found.failed)


def plot_victims(ax: Axes, groups: Groups, part: str, side: str, ingresses: int) -> None:
    """Draw the distributions of the victims' times to the first token, alone and beside the noisy tenant."""
    for color, name in enumerate(("alone", "beside")):
        if phases := groups.get((part, name, side, ingresses)):
            plot_cdf(ax, _sample(f"{side}, {name}", phases, "victim"), color=color)
    ax.set(xlabel="time to the first token of the five tenants within their shares", xlim=(0.03, 100))


def plot_shares(ax: Axes, groups: Groups, part: str, weights: Mapping[str, float], ingresses: int) -> None:
    """Draw each tenant's share of GPU-seconds: a bar for each side (median of the seeds), a line at the share of its weight."""
    total = sum(weights.values())
    for place, side in enumerate(SIDES):
        if found := [of.shares(phase) for phase in groups.get((part, "all", side, ingresses), [])]:
            medians = [statistics.median(each.get(name, 0.0) for each in found) for name in weights]
            at = np.arange(len(weights)) + 0.36 * (place - 0.5)
            ax.bar(at, [100 * each for each in medians], width=0.34, color=SERIES[1 - place], label=side)
    for place, weight in enumerate(weights.values()):
        ax.hlines(100 * weight / total, place - 0.45, place + 0.45, colors="0.2", linestyles="--", linewidth=1)
    ax.set_xticks(range(len(weights)), list(weights))
    ax.set(ylabel="share of GPU-seconds %", ylim=(0, None))
    if ax.containers:
        ax.legend(loc="upper left")


def plot_goodput(ax: Axes, groups: Groups, ingresses: int) -> None:
    """Draw the first tokens in time of each second since the begin of the overload, as means of 5 s."""
    for color, side in ((1, FCFS), (0, FAIR)):
        for number, phase in enumerate(groups.get(("overload", "3x", side, ingresses), [])):
            good = [each.row.due_s for each in phase.sent if of.in_time(each, FIRST_TOKEN_S)]
            counts, edges = np.histogram(good, bins=np.arange(0, phase.until_s + 1, 5))
            ax.step(edges[:-1], counts / 5, where="post", color=SERIES[color], alpha=0.8, label=None if number else side)
    ax.set(
        xlabel="seconds of three times the capacity",
        ylabel=f"requests/s with a first token in {FIRST_TOKEN_S:g} s",
        ylim=(0, None),
    )
    ax.legend()


def plot_admitted(ax: Axes, groups: Groups, ingresses: int) -> None:
    """Draw when each admitted request was due and how long its first token took."""
    for color, side in ((1, FCFS), (0, FAIR)):
        for phase in groups.get(("overload", "3x", side, ingresses), [])[:1]:
            rows = [each.row for each in phase.sent if each.row.first_s is not None]
            times = [(row.first_s or 0.0) - row.due_s for row in rows]
            ax.plot(
                [row.due_s for row in rows], times, ".", markersize=2.5, color=SERIES[color], label=f"{side}, seed {phase.seed}"
            )
    ax.axhline(FIRST_TOKEN_S, linestyle="--", linewidth=1, color="0.4")
    ax.set(xlabel="seconds of three times the capacity", ylabel="time to the first token", yscale="log")
    seconds_axis(ax.yaxis)
    ax.legend()
