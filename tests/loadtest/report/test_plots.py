import io
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import combinations
from typing import Any, cast

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from loadtest.proof.coverage import Queue
from loadtest.records import RunEvent
from loadtest.report import plots, plots_load
from loadtest.report.figure_kinds import Found
from loadtest.report.plots import Sample
from loadtest.report.plots_load import ProbePoint


def drawn(draw: Callable[[Axes], object], *, width: float = 5.6) -> tuple[Axes, str]:
    """Draw in the report's style; return the axis and its figure as SVG."""
    with matplotlib.rc_context(cast(Any, plots.STYLE)):
        figure = Figure(figsize=(width, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.add_subplot()
        draw(ax)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        figure.canvas.draw()
    return ax, out.getvalue()


def sample(*values_s: float, failed: int = 0, label: str = "TTFT", n_eff: float = 0.0) -> Sample:
    return Sample(label, np.array(sorted(values_s)), failed, n_eff)


def legend(ax: Axes) -> list[str]:
    found = ax.get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


def ticks(ax: Axes) -> list[str]:
    low, high = ax.get_xlim()
    return [t.get_text() for t, at in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True) if low <= at <= high]


def test_failed_requests_count_as_over_the_limit_and_keep_the_cdf_below_one() -> None:
    shares: list[float | None] = []
    ax, _ = drawn(lambda ax: shares.append(plots.plot_cdf(ax, sample(0.1, 0.2, 0.3, failed=1), limit_s=0.2)))
    assert shares == [0.5]
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [0.25, 0.5, 0.75]
    assert legend(ax) == ["TTFT (n=4, failed=1)"]


def test_the_band_of_a_cdf_is_as_wide_as_the_effective_sample_allows() -> None:
    ax, _ = drawn(lambda ax: plots.plot_cdf(ax, sample(*np.linspace(0.1, 1, 1000), n_eff=100)))
    middle = ax.collections[0].get_paths()[0].vertices
    at_half = np.asarray(middle)[np.abs(np.asarray(middle)[:, 0] - 0.55) < 0.001][:, 1]
    assert np.ptp(at_half) == pytest.approx(2 * 0.1358, abs=0.01)  # sqrt(ln(40) / 200)


def test_a_tail_ends_at_the_share_that_failed() -> None:
    ax, _ = drawn(lambda ax: plots.plot_tail(ax, sample(0.1, 0.2, 0.4, failed=1)))
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [0.75, 0.5, 0.25]


def test_quantiles_stop_where_the_failed_ones_begin() -> None:
    due, send = sample(*np.linspace(1, 2, 99), failed=1), sample(*np.linspace(0.1, 0.2, 99), failed=1)
    ax, _ = drawn(lambda ax: plots.plot_quantiles(ax, [due, send]))
    slower, latency = (np.asarray(data) for data in ax.lines[0].get_data())
    assert np.isnan(latency[slower < 0.01 - 1e-9]).all()
    assert latency[slower > 0.011].max() == pytest.approx(2.0, abs=0.02)


def test_a_thinned_curve_keeps_both_ends_and_each_of_the_largest_hundred() -> None:
    index = plots.thinned(50_000)
    assert index.size <= plots.MAX_POINTS + 100
    assert index[0] == 0
    assert index[-100:].tolist() == list(range(49_900, 50_000))
    assert plots.thinned(3).tolist() == [0, 1, 2]
    assert plots.thinned(0).size == 0


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0009, 0.011, ["1 ms", "2 ms", "5 ms", "10 ms"]),
        (0.00009, 12.0, ["100 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s"]),
    ],
)
def test_ticks_are_round_and_name_their_unit(low: float, high: float, words: list[str]) -> None:
    def draw(ax: Axes) -> None:
        ax.set(xscale="log", xlim=(low, high))
        plots.seconds_axis(ax.xaxis)

    assert ticks(drawn(draw)[0]) == words


def test_a_narrow_range_has_ticks_too() -> None:
    def draw(ax: Axes) -> None:
        ax.set(xscale="log", xlim=(0.021, 0.024))
        plots.seconds_axis(ax.xaxis)

    assert len(ticks(drawn(draw)[0])) >= 3


def test_gaps_name_their_stalls_and_chunks_their_mean() -> None:
    gaps = np.array([0.0, 0.02, 0.02, 0.05, 2.0])
    ax, _ = drawn(lambda ax: plots.plot_gaps(ax, gaps, stall_s=1.0))
    assert legend(ax) == ["chunk gaps (n=5)", "stall: above 1 s (n=1)"]
    assert cast(Any, ax.patches[0]).get_data().values.sum() == 5
    ax, _ = drawn(lambda ax: plots.plot_tokens_per_chunk(ax, np.array([1, 1, 4, 90])))
    assert [round(bar.get_height(), 2) for bar in cast(Any, ax.patches)] == [0.5, 0, 0, 0.25] + [0] * 12 + [0.25]
    assert legend(ax) == ["chunks (n=4), mean 24.00 tokens"]


def test_gaps_sent_as_planned_lie_on_the_diagonal() -> None:
    due = np.cumsum(np.random.default_rng(3).exponential(0.1, 500))
    ax, _ = drawn(lambda ax: plots.plot_gap_qq(ax, due, due + 0.25))
    assert np.asarray(ax.lines[1].get_ydata()) == pytest.approx(np.asarray(ax.lines[1].get_xdata()), rel=1e-6)


def test_an_interval_that_contains_one_claims_nothing() -> None:
    ratios = {"faster": (0.8, 0.7, 0.9), "slower": (1.3, 1.1, 1.6), "equal": (1.1, 0.9, 1.2)}
    ax, _ = drawn(lambda ax: plots.plot_ratios(ax, ratios))
    assert [line.get_color() for line in ax.lines[:6:2]] == [plots.SERIES[2], plots.SERIES[1], plots.MUTED]


def test_rates_count_every_event_once() -> None:
    edges = plots_load.bin_edges(0.0, 10.4)
    times = {"offered": np.array([0.1, 0.2, 9.9]), "completed": np.array([1.0, 3.5, 10.4])}
    ax, _ = drawn(lambda ax: plots_load.plot_rates(ax, edges, times))
    assert [cast(Any, patch).get_data().values.sum() for patch in ax.patches] == [3, 3]
    assert legend(ax) == ["offered (n=3)", "completed (n=3)"]


@pytest.mark.parametrize("end_s", [0.0, 0.5, 240.0, 86_400.0])
def test_bins_cover_the_run_and_are_few(end_s: float) -> None:
    edges = plots_load.bin_edges(0.0, end_s)
    assert edges[-1] >= end_s
    assert 2 <= edges.size <= 243


def test_a_bin_whose_percentile_failed_has_a_mark_and_no_value() -> None:
    due, ttft = np.array([0.1, 0.2, 1.1, 1.2]), np.array([0.3, 0.4, 0.3, np.inf])
    ax, _ = drawn(lambda ax: plots_load.plot_latency_over_time(ax, due, ttft, np.array([0.0, 1.0, 2.0]), limit_s=0.5))
    assert cast(Any, ax.patches[0]).get_data().values.tolist() == [0.4, pytest.approx(np.nan, nan_ok=True)]
    assert np.asarray(ax.lines[0].get_xdata()).tolist() == [1.5]


def test_words_of_events_do_not_overlap() -> None:
    events = [RunEvent(t, "fault", f"kill replica {i}") for i, t in enumerate((30.0, 30.5, 33.0, 50.0))]

    def draw(ax: Axes) -> None:
        ax.set_xlim(0, 60)
        plots_load.mark_events([ax], [*events, RunEvent(0.0, "phase", "warm-up"), RunEvent(5.0, "phase", "measured")])

    ax, _ = drawn(draw, width=9.5)
    boxes = [cast(Any, text).get_window_extent() for text in ax.texts if isinstance(text, Annotation)]
    assert len(boxes) == 6
    assert [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)] == []


def test_a_waterfall_lets_a_negative_residual_go_back() -> None:
    parts = {"queue": 0.2, "decode": 0.5, "residual: edge, network": -0.1}
    ax, _ = drawn(lambda ax: plots_load.plot_waterfall(ax, parts))
    assert [round(bar.get_x() + bar.get_width(), 6) for bar in cast(Any, ax.patches)] == [0.2, 0.7, 0.6]
    assert [t.get_text() for t in ax.texts][-1].endswith("100.0 ms")


def test_probes_are_marked_by_their_verdict() -> None:
    probes = [ProbePoint(r, v, r * 0.9, r, 0.1 * r, 100) for r, v in ((1, "pass"), (2, "pass"), (4, "fail"), (3, "undecided"))]

    def draw(ax: Axes) -> None:
        plots_load.plot_goodput_against_load(ax, probes)
        plots_load.mark_capacity(ax, 2.0, 3.0, knees={"power": 2.5, "bend": 2.6})

    ax, _ = drawn(draw)
    assert [word for word in legend(ax) if word.startswith("goodput")] == [
        "goodput, pass (probes=2)",
        "goodput, fail (probes=1)",
        "goodput, undecided (probes=1)",
    ]
    assert legend(ax)[-3:] == ["capacity 2 to 3/s", "knee by power 2.5/s", "knee by bend 2.6/s"]


def test_both_knees_are_found_in_the_curve_of_a_queue_and_neither_in_two_points() -> None:
    """M/M/32 with services of 1 s: the p95 is 3.0 s while there is a free server, and bends upwards at some nine tenths of the load."""
    points = []
    for load in (0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97):
        points.append(ProbePoint(32 * load, "pass", 32 * load, 32 * load, Queue(32, load).quantile(0.95), 1000))
    sick = ProbePoint(64.0, "invalid", 0.0, 0.0, None, 0)
    knees = Found([*points, sick], "TTFT p95", 5.0, None, None).knees()
    assert knees["power"] == pytest.approx(32 * 0.9)
    assert 32 * 0.8 < knees["bend"] < 32 * 0.95
    assert Found(points[:2], "TTFT p95", 5.0, None, None).knees() == {}
    assert Found([sick], "TTFT p95", 5.0, None, None).knees() == {}


def test_names_of_others_are_text_and_nothing_else() -> None:
    evil = "<script>alert('$x$')</script> & \\frac"
    ax, svg = drawn(lambda ax: plots_load.plot_gauges(ax, {evil: (np.array([0.0, 1.0]), np.array([1.0, 1.0]))}, ylabel="count"))
    assert legend(ax) == [evil]
    root = ET.fromstring(svg)
    assert evil in ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))


def test_the_same_data_give_the_same_bytes() -> None:
    values = sample(*np.random.default_rng(5).exponential(1, 3000), n_eff=900)
    assert drawn(lambda ax: plots.plot_cdf(ax, values))[1] == drawn(lambda ax: plots.plot_cdf(ax, values))[1]


def test_long_runs_keep_the_peaks_of_their_workers() -> None:
    lag = np.zeros(7200)
    lag[4321] = 0.3
    times, seen = plots_load.peaks(np.array(range(7200), dtype=np.float64), lag)
    assert (times.size, seen.size) == (900, 900)  # 8 seconds each
    assert times[seen == 0.3].tolist() == [4320]
    assert plots_load.peaks(times[:5], np.array([0.0, 1.0, 2.0, 3.0, 4.0]))[1].tolist() == [0, 1, 2, 3, 4]


def test_replicas_are_counted_in_whole_numbers() -> None:
    replicas = {"ready": (np.array([0.0, 60.0]), np.array([1.0, 2.0]))}
    ax, _ = drawn(lambda ax: plots_load.plot_gauges(ax, replicas, ylabel="replicas", steps=True))
    assert [tick for tick in ax.get_yticks() if 0 <= tick <= 2] == [0, 1, 2]
