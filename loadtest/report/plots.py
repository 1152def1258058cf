"""These figures draw distributions of the requests of one run, or of two. Each function draws on the axis it is given.

The functions read and save nothing. All times are seconds; failed requests stay in each distribution as its largest values.
The colours of series are Okabe and Ito's, which people with all common kinds of colour vision can distinguish. Ink and paper are those
of the chat page and the fleet page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from loadtest.judge.stats import Floats, dkw_half_width, rank

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, GRID, PAPER = "#1e293b", "#64748b", "#e2e8f0", "#ffffff"

STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "font.family": ["sans-serif"],
    "text.color": INK,
    "text.parse_math": False,  # names come from scenarios and targets, so a $ is no formula
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.5,
    "legend.facecolor": PAPER,
    "legend.edgecolor": GRID,
    "legend.framealpha": 0.85,
    "legend.fontsize": 8.0,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text, which can be searched and takes the page's colour
    "svg.hashsalt": "loadtest",
}
"""Style of every figure; in dark mode the report's page replaces these colours by its own."""

MAX_POINTS = 600
"""Points of a curve: more than the pixels it covers, and a page of ten curves stays below 1 MB."""


@dataclass(frozen=True)
class Sample:
    """One metric over the requests in the window."""

    label: str
    values_s: Floats
    """The known values, ascending."""
    num_failed: int
    n_eff: float = 0.0
    """Number of independent samples that the values are worth; 0 draws no band."""

    @property
    def n(self) -> int:
        return self.values_s.size + self.num_failed

    @property
    def legend(self) -> str:
        return f"{self.label} (n={self.n}, failed={self.num_failed})"


class SecondsLocator(LogLocator):
    """A locator with ticks at 1, 2 and 5 of each decade; only at 1 if the labels would overlap; a few round ticks in a narrow range."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        if 0 < vmin <= vmax < 5 * vmin:
            return MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(vmin, vmax)
        many = vmin <= 0 or vmax / vmin > 10**2.4
        self.set_params(subs=(1.0,) if many else (1.0, 2.0, 5.0), numticks=12)
        return super().tick_values(vmin, vmax)


def seconds_axis(axis: Axis, *, log: bool = True) -> None:
    """Format the ticks like ``200 ms``."""
    if log:
        axis.set_major_locator(SecondsLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(EngFormatter(unit="s"))


def percent_axis(axis: Axis) -> None:
    """Format the ticks of shares like ``99.9 %``."""
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:.4g} %"))


def legend_above(ax: Axes, *, columns: int = 1) -> None:
    """Put the legend above the axis, where it covers no curve."""
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2, ncols=columns)


def thinned(size: int) -> NDArray[np.int64]:
    """Return at most `MAX_POINTS` + 100 indices of a sorted array, including both ends and each of the largest 100."""
    if size <= MAX_POINTS:
        return np.arange(size)
    return np.union1d(np.linspace(0, size - 1, MAX_POINTS).astype(np.int64), np.arange(size - 100, size))


def plot_cdf(ax: Axes, sample: Sample, *, color: int = 0, limit_s: float | None = None) -> float | None:
    """Draw the empirical CDF with its 95 % band; return the share of all requests within ``limit_s``.

    The band is that of Dvoretzky, Kiefer, Wolfowitz and Massart at ``n_eff``: it holds for all latencies at once.
    """
    index = thinned(sample.values_s.size)
    x, share = sample.values_s[index], (index + 1) / max(sample.n, 1)
    ax.step(x, share, where="post", color=SERIES[color], label=sample.legend)
    if sample.n_eff > 0 and x.size:
        half = dkw_half_width(sample.n_eff)
        low, high = np.clip(share - half, 0, 1), np.clip(share + half, 0, 1)
        ax.fill_between(x, low, high, step="post", color=SERIES[color], alpha=0.18, linewidth=0)
    ax.set(xscale="log", ylim=(0, 1.02), ylabel="share of requests")
    percent_axis(ax.yaxis)
    seconds_axis(ax.xaxis)
    legend_above(ax)
    if limit_s is None:
        return None
    limit_line(ax, limit_s)
    return float(np.searchsorted(sample.values_s, limit_s, side="right") / max(sample.n, 1))


def limit_line(ax: Axes, limit_s: float, *, horizontal: bool = False) -> None:
    """Draw a line at an SLO's limit, with the limit as text beside it."""
    style: dict[str, Any] = {"linestyle": "--", "linewidth": 1, "color": INK}
    words = f"SLO {EngFormatter(unit='s', places=None)(limit_s)}"
    if horizontal:
        ax.axhline(limit_s, **style)
        ax.annotate(words, (0, limit_s), (3, 2), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8)
        return
    ax.axvline(limit_s, **style)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 8, "rotation": 90}
    ax.annotate(words, (limit_s, 0.4), (-3, 0), ha="right", va="bottom", **place)


def plot_tail(ax: Axes, sample: Sample, *, color: int = 0) -> None:
    """Draw the share of requests slower than x, both axes logarithmic: a straight line is a power law. Ends at the share that failed."""
    index = thinned(sample.values_s.size)
    slower = 1 - (index + 1) / max(sample.n, 1)
    seen = slower > 0
    ax.step(sample.values_s[index][seen], slower[seen], where="post", color=SERIES[color], label=sample.legend)
    ax.set(xscale="log", yscale="log", xlabel="latency", ylabel="share of requests slower", ylim=(0.5 / max(sample.n, 1), 1.2))
    percent_axis(ax.yaxis)
    seconds_axis(ax.xaxis)
    ax.legend(loc="lower left")


def plot_quantiles(ax: Axes, samples: Sequence[Sample]) -> None:
    """Draw latency over the percentile, with equal width for each further nine; the area between two samples is shaded.

    For latencies from the due time and from sending of the same requests, the shaded area is what coordinated omission would hide.
    """
    finest = max(0.5 / max(s.n, 1) for s in samples)
    slower = np.geomspace(1.0, finest, 400)
    curves = [_quantiles_at(s, 1 - slower) for s in samples]
    for color, (sample, curve) in enumerate(zip(samples, curves, strict=True)):
        ax.plot(slower, curve, color=SERIES[color], label=sample.legend, linestyle="-" if color == 0 else "--")
    if len(curves) == 2:
        ax.fill_between(slower, curves[0], curves[1], color=SERIES[0], alpha=0.15, linewidth=0)
    ax.set(xscale="log", yscale="log", xlim=(1.0, finest), xlabel="percentile", ylabel="latency")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{(1 - share) * 100:.6g}"))
    seconds_axis(ax.yaxis)
    ax.legend(loc="lower right")


def _quantiles_at(sample: Sample, q: Floats) -> Floats:
    """Return the sample's quantiles; nan among the failed requests."""
    return _of_sorted(np.append(sample.values_s, np.full(sample.num_failed, np.nan)), q)


def _of_sorted(values: Floats, q: Floats) -> Floats:
    """Return `stats.quantile` of sorted values for each of ``q``."""
    return values[[rank(values.size, each) - 1 for each in q.tolist()]]


def plot_gaps(ax: Axes, gaps_s: Floats, *, stall_s: float) -> None:
    """Draw the histogram of gaps between two chunks. A comb at one gap means that the server or a proxy batches its output."""
    seen = gaps_s[gaps_s > 0]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (1e-3, 1.0)
    bins = np.geomspace(max(low, 1e-5), max(high, low * 2, 1e-5 * 2), 80)
    counts = np.histogram(np.clip(gaps_s, bins[0], bins[-1]), bins)[0]
    ax.stairs(counts, bins, fill=True, color=SERIES[0], label=f"chunk gaps (n={gaps_s.size})")
    num_stalls = int((gaps_s > stall_s).sum())
    if num_stalls:
        ax.axvline(stall_s, color=INK, linestyle=":", linewidth=1, label=f"stall: above {stall_s:g} s (n={num_stalls})")
    ax.set(xscale="log", yscale="log", xlabel="gap between two chunks", ylabel="number of gaps", ylim=(0.7, None))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    seconds_axis(ax.xaxis)
    legend_above(ax)


def plot_tokens_per_chunk(ax: Axes, tokens: NDArray[np.int64]) -> None:
    """Draw the share of chunks for each number of tokens; more than 16 tokens share one bar."""
    counts = np.bincount(np.minimum(tokens, 17), minlength=2)[1:]
    x = np.arange(1, counts.size + 1)
    ax.bar(x, counts / max(tokens.size, 1), color=SERIES[2], label=f"chunks (n={tokens.size}), mean {tokens.mean():.2f} tokens")
    ax.set(xlabel="tokens in a chunk", ylabel="share of chunks", ylim=(0, 1.02))
    ax.set_xticks(x, [str(i) if i < 17 else ">16" for i in x])
    percent_axis(ax.yaxis)
    legend_above(ax)


def plot_gap_qq(ax: Axes, planned_s: Floats, sent_s: Floats) -> None:
    """Draw quantiles of the gaps between sendings against those between due times; on the diagonal the load was as planned."""
    planned, sent = (np.sort(np.maximum(np.diff(np.sort(times)), 1e-5)) for times in (planned_s, sent_s))
    q = (np.arange(1, 201) - 0.5) / 200
    x, y = _of_sorted(planned, q), _of_sorted(sent, q)
    ends = [min(x[0], y[0]), max(x[-1], y[-1])]
    ax.plot(ends, ends, color=MUTED, linewidth=1, label="as planned")
    ax.plot(x, y, ".", color=SERIES[0], markersize=4, label=f"gaps (n={sent.size})")
    ax.set(xscale="log", yscale="log", xlabel="planned gap between requests", ylabel="sent gap")
    for axis in (ax.xaxis, ax.yaxis):
        seconds_axis(axis)
    ax.legend(loc="upper left")


def plot_lengths(ax: Axes, prompt_tokens: Floats, output_tokens: Floats, e2e_s: Floats) -> None:
    """Draw one dot per answered request; the colour shows its duration."""
    # One raster image: thousands of vector dots would be most of the page's size.
    middle = ListedColormap(colormaps["viridis"](np.linspace(0.3, 0.78, 64)))  # visible on white and on black
    look: dict[str, Any] = {"s": 9, "cmap": middle, "alpha": 0.8, "linewidths": 0, "rasterized": True}
    dots = ax.scatter(prompt_tokens, output_tokens, c=np.maximum(e2e_s, 1e-4), norm="log", **look)
    bar = ax.figure.colorbar(dots, ax=ax, label="E2E from the due time")
    seconds_axis(bar.ax.yaxis)
    ax.set(xlabel="prompt tokens", ylabel=f"output tokens (n={e2e_s.size})")


def plot_ratios(ax: Axes, ratios: Mapping[str, tuple[float, float, float]]) -> None:
    """Draw ratio, low and high per line of text: left of 1 the first run is faster; an interval that contains 1 claims nothing."""
    for row, (ratio, low, high) in enumerate(ratios.values()):
        color = MUTED if low <= 1 <= high else SERIES[2] if high < 1 else SERIES[1]
        ax.plot([low, high], [row, row], color=color, linewidth=3, solid_capstyle="butt", alpha=0.6)
        ax.plot([ratio], [row], "o", color=color, markersize=5)
    ax.axvline(1.0, color=INK, linewidth=1)
    ax.set(xlabel="ratio of this run to the other, with its 95 % interval", ylim=(len(ratios) - 0.5, -0.5))
    ax.set_yticks(range(len(ratios)), list(ratios))
