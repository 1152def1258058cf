"""This module lists the figures of a run, of a comparison, and of a search for the capacity. Functions of `loadtest.report.plots` and
`loadtest.report.plots_load` draw each figure from the rows.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from loadtest.judge import stats
from loadtest.judge.attribution import attribution
from loadtest.judge.compare import Comparison
from loadtest.judge.stats import Floats
from loadtest.plan.slo import Metric
from loadtest.report import plots, plots_load
from loadtest.report.figures import Draw, Kind, RunData
from loadtest.report.plots_load import ProbePoint
from loadtest.wording import percentile

CDF_WORDS: dict[Metric, str] = {
    "ttft": "time to first token since due",
    "tpot": "time per output token after the first",
    "e2e": "time to the end of the answer since due",
}


def _cdf(metric: Metric, words: str) -> Kind[RunData]:
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
    tokens = np.fromiter((tokens for row in data.rows for _, tokens in row.chunks), dtype=np.int64)
    if not gaps.size:
        return []
    return [
        lambda ax: plots.plot_gaps(ax, gaps, stall_s=data.records.scenario.stall_s),
        lambda ax: plots.plot_tokens_per_chunk(ax, tokens),
    ]


def _rates(data: RunData, edges: Floats) -> Draw:
    def ended(ok: bool) -> Floats:
        return np.array(
            [row.due_s if row.end_s is None else row.end_s for i in data.items if (row := i.row) and (row.state == "ok") is ok]
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
    return [lambda ax: plots_load.plot_gauges(ax, series, ylabel="replicas", steps=True)] if series else []


def _autoscaling(data: RunData) -> list[Draw]:
    replicas, edges = _replicas(data), _edges(data)
    if not replicas:
        return []
    timed = [(item.due_s, value) for item in data.items if (value := data.value_s(item, "ttft")) is not None]
    due, ttft = np.array([t for t, _ in timed]), np.array([v for _, v in timed])
    wider = edges[
        :: max(1, int(np.ceil(20 * (edges.size - 1) / max(due.size, 1))))
    ]  # 20 requests per bin; with fewer, a p95 is a maximum
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
        plots_load.mark_events([ax], data.events, words=False)
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
    *(_cdf(metric, words) for metric, words in CDF_WORDS.items()),
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
    Kind(
        "timeline",
        "The run over time",
        "Faults are solid lines; phases, and times from which other classes of requests are drawn, dotted ones.",
        _timeline,
        True,
        False,
        (9.5, 1.6),
    ),
    Kind("autoscaling", "Autoscaling", "Replicas asked for and ready, and what users felt.", _autoscaling, True, size=(9.5, 1.8)),
    Kind(
        "arrivals",
        "Arrivals: planned and sent",
        "Off the diagonal: the generator bent the load. Vertical lines as in the run over time.",
        _arrivals,
        headline=False,
    ),
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
"""All figures that a single run can have, in the order of the page."""


def comparison_kinds(other: RunData, comparison: Comparison) -> list[Kind[RunData]]:
    """Return the figures that show this run beside the other run."""

    def overlay(metric: Metric, data: RunData) -> list[Draw]:
        samples = [data.sample(metric, label=comparison.a), other.sample(metric, label=comparison.b)]

        def draw(ax: Axes) -> None:
            for color, sample in enumerate(samples):
                plots.plot_cdf(ax, sample, color=color)
            ax.set_xlabel(CDF_WORDS[metric])

        return [draw] if all(sample.values_s.size for sample in samples) else []

    ratios = {
        f"{r.metric.upper()} {percentile(r.q)}": (r.ratio, r.low, r.high)
        for r in comparison.ratios
        if r.ratio is not None and r.low is not None and r.high is not None and 0 < r.ratio < math.inf
    }
    kinds = [Kind(f"both-{m}", f"{m.upper()} of both", "Shaded: 95 % bands.", partial(overlay, m)) for m in CDF_WORDS]
    words = "Left of 1: this run is faster. Grey: the interval contains 1, and nothing is claimed."
    return [*kinds, Kind("both-ratios", "Ratios", words, lambda _: [partial(plots.plot_ratios, ratios=ratios)] if ratios else [])]


@dataclass(frozen=True)
class Found:
    """The result of a search: its probes, and the capacity between two rates."""

    points: list[ProbePoint]
    metric: str
    limit_s: float | None
    low: float | None
    high: float | None

    def knees(self) -> dict[str, float]:
        """Return the rates, in requests/s, at which the target's latency begins to rise, by each method that finds such a rate.

        ``power``: the rate with the most completed requests per second of latency. ``bend``: the breakpoint of a segmented regression of
        the logarithm of the latency on the rate.
        """
        known = [(p.rate, p.completed, p.latency_s) for p in self.points if p.latency_s]
        rates, completed, latency_s = np.array(known, dtype=np.float64).reshape(-1, 3).T
        bend = stats.breakpoint_of(rates, np.log(latency_s))
        power = {"power": float(rates[np.argmax(completed / latency_s)])} if len(known) > 2 else {}
        return power | ({} if bend is None else {"bend": bend})


def _against_load(found: Found) -> list[Draw]:
    knees = found.knees()

    def latency(ax: Axes) -> None:
        plots_load.plot_latency_against_load(ax, found.points, limit_s=found.limit_s, metric=found.metric)
        plots_load.mark_capacity(ax, found.low, found.high, knees=knees)

    def goodput(ax: Axes) -> None:
        plots_load.plot_goodput_against_load(ax, found.points)
        plots_load.mark_capacity(ax, found.low, found.high, knees=knees)

    return [latency, goodput] if found.points else []


_LOAD_WORDS = (
    "One mark per probe. Knee by power: the rate with the most completed requests per second of latency; by bend: where two straight "
    "lines through the logarithm of the latency meet (segmented regression), if they fit better than one."
)
LOAD_KINDS = (Kind("load", "Latency and goodput against the offered load", _LOAD_WORDS, _against_load),)
