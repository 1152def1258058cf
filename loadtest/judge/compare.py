"""Two runs against each other: ratios of percentiles with intervals. A difference is claimed only if the interval excludes 1."""

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from loadtest.errors import InvalidRun
from loadtest.judge import stats
from loadtest.judge.analysis import is_many, rate_counts, summary_of
from loadtest.judge.metrics import Records, read_records
from loadtest.judge.series import InMemory, LogRatio, Series, log_ratio
from loadtest.judge.summary import Summary
from loadtest.judge.window import Window, last_positions
from loadtest.wording import percentile

Claim = Literal["a faster", "b faster", "no difference shown", "mixed", "not estimable"]

METRICS = ("ttft", "tpot", "itl", "e2e")
QUANTILES = stats.QUANTILES[:-1]
"""Of the pages; p99.9 stands in summary.json only."""
RATES = {"completed": "requests/s completed", "goodput": "requests/s good", "output_tokens": "output tokens/s"}
"""Fields of `loadtest.judge.summary.Throughput` that two runs are compared by, in words."""


class Ratio(msgspec.Struct, frozen=True):
    """One percentile of ``a`` over that of ``b``; below 1: ``a`` is faster. None: one of the runs cannot bound it."""

    metric: str
    q: float
    ratio: float | None
    low: float | None
    high: float | None
    """95 % interval."""
    claim: Claim

    def __str__(self) -> str:
        known = "" if self.ratio is None else f" x{self.ratio:.3f} ({self.low:.3f} .. {self.high:.3f})"
        return f"{self.metric} {percentile(self.q)}{known}: {self.claim}"


class RateRatio(msgspec.Struct, frozen=True):
    """A rate of ``a`` over that of ``b``; above 1: ``a`` does more.

    ``low`` and ``high`` are None if a run counts fewer than `stats.MIN_COUNTED` requests, or nearly all of them in one part.
    """

    name: str
    ratio: float | None
    low: float | None
    high: float | None
    """95 % interval."""

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.name}: not estimable"
        known = "no interval" if self.low is None else f"{self.low:.3f} .. {self.high:.3f}"
        return f"{self.name} x{self.ratio:.3f} ({known})"


class Comparison(msgspec.Struct, frozen=True):
    """Two runs. The verdict is over all ratios together: each at 1 - 5 % / number of ratios, so that chance claims one in 20 times."""

    a: str
    b: str
    paired: bool
    """Both had the same schedule, and each request is compared with itself; of itl all gaps with all gaps, which is less sharp."""
    num_common: int
    """Requests that were due in the window of both runs; 0 unless paired."""
    ratios: list[Ratio]
    rates: list[RateRatio]
    verdict: Claim
    threats: list[str]

    def lines(self) -> list[str]:
        """Return it as text for a terminal."""
        pairing = f"{self.num_common} requests, each with itself" if self.paired else "different requests"
        return [
            f"{self.a} / {self.b}: {self.verdict} ({pairing})",
            *(str(ratio) for ratio in self.ratios),
            *(str(rate) for rate in self.rates),
            *self.threats,
        ]


def compare(a: Path, b: Path) -> Comparison:
    """Compare two runs; see `Comparison`.

    Raises:
        InvalidRun: One of them is invalid.
        UsageError: One of the folders holds no run.
    """
    runs = read_records(a), read_records(b)
    return compare_records((a.name, b.name), runs, (summary_of(runs[0]), summary_of(runs[1])))


def compare_records(names: tuple[str, str], runs: tuple[Records, Records], summaries: tuple[Summary, Summary]) -> Comparison:
    """Compare two runs whose records are read; as `compare`."""
    for name, summary in zip(names, summaries, strict=True):
        if summary.verdict == "invalid":
            raise InvalidRun([f"{name}: {gate.text}" for gate in summary.gates if not gate.ok])
    paired = summaries[0].schedule_sha256 == summaries[1].schedule_sha256 and not runs[0].closed
    windows = _windows(runs, summaries, paired)
    ratios, strict = [], []
    for metric in METRICS:
        by_request = paired and metric != "itl"
        first, second = _by_request(windows, metric) if by_request else (window.series(metric) for window in windows)
        for q in QUANTILES if first.size and second.size else ():
            found = log_ratio(first, second, q, paired=by_request)
            ratios.append(_ratio(metric, q, found, stats.CONFIDENCE))
            strict.append(_ratio(metric, q, found, 1 - (1 - stats.CONFIDENCE) / len(METRICS) / len(QUANTILES)))
    return Comparison(
        a=names[0],
        b=names[1],
        paired=paired,
        num_common=len(windows[0]) if paired else 0,
        ratios=ratios,
        rates=_rates(runs, summaries, paired),
        verdict=_together([ratio.claim for ratio in strict]),
        threats=_threats(summaries, paired),
    )


def _windows(runs: tuple[Records, Records], summaries: tuple[Summary, Summary], paired: bool) -> tuple[Window, Window]:
    """Return the requests of each run's window in the order of its due times; if paired, those that are in both.

    Later turns of conversations are due when the answer before them has ended, so that run b may have had them in another order, or
    outside of its window.
    """
    first, second = (Window.of(run).between(*span) for run, span in zip(runs, _spans(summaries, paired), strict=True))
    if not paired:
        return first, second
    return first.where(np.isin(first.ids, second.ids)), second.where(np.isin(second.ids, first.ids))


def _by_request(windows: tuple[Window, Window], metric: str) -> tuple[Series, Series]:
    """Return the upper bounds of the requests that have the metric in both runs, in the order of run a's due times."""
    of_id = []
    for window in windows:
        bounds = window.bounds(metric)
        values = np.full(len(window), np.nan)
        values[bounds.has] = bounds.high
        of_id.append(values)
    first, second = of_id[0], of_id[1][last_positions(windows[1].ids, windows[0].ids)]
    both = ~np.isnan(first) & ~np.isnan(second)
    return InMemory(first[both], first[both]), InMemory(second[both], second[both])


def _ratio(metric: str, q: float, found: LogRatio | None, confidence: float) -> Ratio:
    if found is None:
        return Ratio(metric, q, None, None, None, "not estimable")
    ratio, low, high = found.interval(confidence)
    claim: Claim = "a faster" if high < 1 else "b faster" if low > 1 else "no difference shown"
    return Ratio(metric, q, ratio, low, high, claim)


def _together(claims: list[Claim]) -> Claim:
    shown = set(claims) - {"no difference shown", "not estimable"}
    if len(shown) == 2:
        return "mixed"
    if shown:
        return shown.pop()
    return "no difference shown" if "no difference shown" in claims else "not estimable"


def _rates(runs: tuple[Records, Records], summaries: tuple[Summary, Summary], paired: bool) -> list[RateRatio]:
    """Return the ratios of what both did per second; if paired, over the window that they have in common.

    Where later turns of conversations come when the target allows, the same schedule is not the same arrivals: such rates are compared
    as those of two loads.
    """
    same_arrivals = paired and not (runs[0].requests.turn > 0).any()
    spans = _spans(summaries, paired)
    lengths = [high - low for low, high in spans]
    if min(lengths) <= 0:
        return []
    counts = [rate_counts(run, Window.of(run).between(*span), span) for run, span in zip(runs, spans, strict=True)]
    found = []
    for field, words in RATES.items():
        a, b = (each[field] / length for each, length in zip(counts, lengths, strict=True))
        enough = all(is_many(each, field) for each in counts)
        known = stats.rate_ratio_interval(a, b, paired=same_arrivals) if enough else None
        ratio = float(a.sum() / b.sum()) if b.sum() else None
        found.append(RateRatio(words, *known) if known else RateRatio(words, ratio, None, None))
    return found


def _spans(summaries: tuple[Summary, Summary], paired: bool) -> list[tuple[float, float]]:
    spans = [summary.window_s for summary in summaries]
    return [(max(span[0] for span in spans), min(span[1] for span in spans))] * 2 if paired else spans


def _threats(summaries: tuple[Summary, Summary], paired: bool) -> list[str]:
    found = []
    if not paired:
        found.append("The runs had different schedules (or a closed loop): chance in the load itself is part of each difference.")
    if {s.loop for s in summaries} == {"open", "closed"}:
        found.append("One loop is open and one is closed: their latencies have different meanings.")
    found.append(
        "One run each: what differs from one start of a target to the next is not in the intervals; repeat in the order ABBA."
    )
    return found
