"""This module draws the figure of one scenario of the autoscaling benchmark."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.plots import MUTED, SERIES, STYLE

Timeline = Sequence[tuple[float, int, int, float]]
SMOOTH_S = 15


def plot_replicas(ax: Axes, timelines: Mapping[str, Timeline], rate_per_replica: float) -> None:
    """Draw the wanted replicas over time, and the replicas that the arrivals of each 15 s keep busy."""
    at = np.array([t for t, _, _, _ in next(iter(timelines.values()))])
    arrived = np.array([n for _, _, _, n in next(iter(timelines.values()))], dtype=float)
    mean = np.convolve(arrived, np.ones(SMOOTH_S) / SMOOTH_S, mode="same")
    ax.fill_between(at, mean / rate_per_replica, color=MUTED, alpha=0.25, linewidth=0, label="arrivals / rate of one replica")
    for (label, timeline), colour in zip(timelines.items(), SERIES, strict=False):
        ax.step([t for t, _, _, _ in timeline], [wanted for _, wanted, _, _ in timeline], where="post", label=label, color=colour)
    ax.set(xlabel="seconds", ylabel="replicas wanted", ylim=(0, None), xlim=(0, float(at[-1])))
    ax.legend(loc="upper left", fontsize="small")


def draw(path: Path, name: str, timelines: Mapping[str, Timeline], rate_per_replica: float) -> None:
    """Write the figure as a PNG."""
    style: Any = STYLE  # matplotlib's type lists the keys
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        ax = figure.subplots()
        plot_replicas(ax, timelines, rate_per_replica)
        ax.set_title(f"{name}, simulated")
        figure.savefig(path, dpi=110)
