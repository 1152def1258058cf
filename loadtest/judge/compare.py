"""This module compares two runs: ratios of percentiles with intervals. It claims a difference only if the interval excludes 1."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from loadtest.errors import InvalidRun
from loadtest.judge import stats
from loadtest.judge.analysis import has_interval, rate_counts, summary_of
from loadtest.judge.metrics import Records, read_records
from loadtest.judge.pairs import Pairs
from loadtest.judge.series import failed_ratio, log_ratio
from loadtest.judge.summary import Summary
from loadtest.judge.window import Window
from loadtest.plan.recorded import asked_of
from loadtest.wording import percentile, ratio

Claim = Literal["a faster", "b faster", "no difference shown", "mixed", "not estimable"]

METRICS = ("ttft", "tpot", "itl", "e2e")
QUANTILES = stats.QUANTILES[:-1]
"""Percentiles of the pages; p99.9 is in summary.json only."""
STRICT = 1 - (1 - stats.CONFIDENCE) / len(METRICS) / len(QUANTILES)
"""Confidence of each single ratio, chosen for the verdict over all ratios."""
RATES = {"completed": "requests/s completed", "goodput": "requests/s good", "output_tokens": "output tokens/s"}
"""The compared fields of `loadtest.judge.summary.Throughput` and their names; goodput only if both runs have the same SLO."""
NOT_ASKED = ("name", "observe", "workers", "keep_text")
"""Keys of a scenario that change neither the requests nor the judgement of the answers."""


class Ratio(msgspec.Struct, frozen=True):
    """A percentile of ``a`` over that of ``b``; below 1: ``a`` is faster. None: a run cannot bound the percentile, or has 0 there.

    Infinite: the percentile of ``a`` lies among failed requests, and that of ``b`` does not; 0: the other way round.
    """

    metric: str
    q: float
    ratio: float | None
    low: float | None
    high: float | None
    """95 % interval."""
    claim: Claim

    def __str__(self) -> str:
        known = "" if self.ratio is None else f" x{ratio(self.ratio)} ({ratio(self.low)} .. {ratio(self.high)})"
        return f"{self.metric} {percentile(self.q)}{known}: {self.claim}"


class RateRatio(msgspec.Struct, frozen=True):
    """A rate of ``a`` over that of ``b``; above 1: the rate of ``a`` is higher.

    ``low`` and ``high`` are None if a run counts fewer than `stats.MIN_COUNTED` requests (for output tokens: complete answers), or
    counts all of them in one of the `stats.NUM_BATCHES` parts of its window.
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
    """The comparison of two runs. The verdict is over all ratios, each at confidence 1 - 5 % / number of ratios, so that chance alone
    leads to a claim in one of 20 comparisons."""

    a: str
    b: str
    paired: bool
    """Whether both runs had the same schedule, so that each request is compared with itself. For itl, all gaps are compared with all
    gaps, which is less sensitive."""
    num_common: int
    """Requests that were due in the window of both runs; 0 unless paired."""
    num_only_a: int
    """Requests that were due in the window of ``a``, but not in that of ``b``: no ratio of latencies counts them. 0 unless paired."""
    num_only_b: int
    """The same the other way round."""
    ratios: list[Ratio]
    rates: list[RateRatio]
    verdict: Claim
    threats: list[str]

    def lines(self) -> list[str]:
        """Return the comparison as text for a terminal."""
        pairing = f"{self.num_common} requests, each with itself" if self.paired else "different requests"
        only = f"; {self.num_only_a} due only in {self.a}, {self.num_only_b} only in {self.b}"
        return [
            f"{self.a} / {self.b}: {self.verdict} ({pairing}{only if self.num_only_a or self.num_only_b else ''})",
            *(str(ratio) for ratio in self.ratios),
            *(str(rate) for rate in self.rates),
            *self.threats,
        ]


def compare(a: Path, b: Path, *, anyway: bool = False) -> Comparison:
    """Compare two runs; see `Comparison`. With ``anyway``, an invalid run is compared too: its name and the first threats say so.

    Raises:
        InvalidRun: One of them is invalid.
        UsageError: A folder holds no run.
    """
    names, runs = (a.resolve().name, b.resolve().name), (read_records(a), read_records(b))
    summaries = summary_of(runs[0]), summary_of(runs[1])
    reasons = [reason for name, summary in zip(names, summaries, strict=True) for reason in _invalid(name, summary)]
    if not reasons:
        return compare_records(names, runs, summaries)
    if not anyway:
        raise InvalidRun([*reasons, "compare --anyway shows the ratios with this mark"])
    marked = [f"{n} (INVALID)" if s.verdict == "invalid" else n for n, s in zip(names, summaries, strict=True)]
    found = compare_records((marked[0], marked[1]), runs, summaries, anyway=True)
    warning = "A difference may come from the load generator alone: publish none of these ratios."
    return msgspec.structs.replace(found, threats=[*(f"Invalid: {reason}" for reason in reasons), warning, *found.threats])


def _invalid(name: str, summary: Summary) -> list[str]:
    """Return why a run is invalid; nothing for a valid run."""
    return [f"{name}: {gate.text}" for gate in summary.gates if not gate.ok] if summary.verdict == "invalid" else []


def compare_records(
    names: tuple[str, str], runs: tuple[Records, Records], summaries: tuple[Summary, Summary], *, anyway: bool = False
) -> Comparison:
    """Compare two runs whose records have been read; as `compare`, without its marks."""
    for name, summary in zip(names, summaries, strict=True):
        if not anyway and (reasons := _invalid(name, summary)):
            raise InvalidRun(reasons)
    paired = summaries[0].schedule_sha256 == summaries[1].schedule_sha256 and not runs[0].closed
    first, second = (Window.of(run).between(*span) for run, span in zip(runs, _spans(summaries, paired), strict=True))
    pairs = Pairs.of(first, second) if paired else None
    ratios, verdict = _ratios((first, second), pairs)
    num_only = pairs.num_only if pairs else (0, 0)
    same_arrivals = paired and not bool((runs[0].requests.turn > 0).any())
    return Comparison(
        a=names[0],
        b=names[1],
        paired=paired,
        num_common=pairs.num_common if pairs else 0,
        num_only_a=num_only[0],
        num_only_b=num_only[1],
        ratios=ratios,
        rates=_rates(runs, summaries, paired=paired, same_arrivals=same_arrivals),
        verdict=verdict,
        threats=list(_threats(names, runs, summaries, pairs, same_arrivals=same_arrivals)),
    )


def _ratios(windows: tuple[Window, Window], pairs: Pairs | None) -> tuple[list[Ratio], Claim]:
    """Return the ratio of each metric and percentile, and the claim of all ratios together."""
    ratios: list[Ratio] = []
    strict: list[Ratio] = []
    for metric in METRICS:
        by_request = pairs is not None and metric != "itl"  # a request has many gaps, so there is no single ITL to pair
        if pairs and by_request:
            first, second = pairs.series(metric)
        else:
            first, second = (window.series(metric) for window in (pairs.windows if pairs else windows))
        for q in QUANTILES if first.size and second.size else ():
            found = log_ratio(first, second, q, paired=by_request)
            for listed, confidence in ((ratios, stats.CONFIDENCE), (strict, STRICT)):
                known = found.interval(confidence) if found else failed_ratio(first, second, q, confidence)
                listed.append(_ratio(metric, q, known))
    return ratios, _together([ratio.claim for ratio in strict])


def _ratio(metric: str, q: float, known: tuple[float, float, float] | None) -> Ratio:
    if known is None:
        return Ratio(metric, q, None, None, None, "not estimable")
    _, low, high = known
    return Ratio(metric, q, *known, "a faster" if high < 1 else "b faster" if low > 1 else "no difference shown")


def _together(claims: list[Claim]) -> Claim:
    shown = set(claims) - {"no difference shown", "not estimable"}
    if len(shown) == 2:
        return "mixed"
    if shown:
        return shown.pop()
    return "no difference shown" if "no difference shown" in claims else "not estimable"


def _rates(
    runs: tuple[Records, Records], summaries: tuple[Summary, Summary], *, paired: bool, same_arrivals: bool
) -> list[RateRatio]:
    """Return the ratios of the rates; for paired runs, over the window that both have in common."""
    spans = _spans(summaries, paired)
    lengths = [high - low for low, high in spans]
    if min(lengths) <= 0:
        return []
    counts = [rate_counts(run, Window.of(run).between(*span), span) for run, span in zip(runs, spans, strict=True)]
    found = []
    one_slo = runs[0].scenario.slo.limits == runs[1].scenario.slo.limits
    for field, words in RATES.items():
        if field == "goodput" and not one_slo:
            continue
        a, b = (each[field] / length for each, length in zip(counts, lengths, strict=True))
        enough = all(has_interval(each, field) for each in counts)
        known = stats.rate_ratio_interval(a, b, paired=same_arrivals) if enough else None
        ratio = float(a.sum() / b.sum()) if b.sum() else None
        found.append(RateRatio(words, *known) if known else RateRatio(words, ratio, None, None))
    return found


def _differing(runs: tuple[Records, Records]) -> list[str]:
    """Return the keys of the scenario in which the runs differ, without `NOT_ASKED` and the seed."""
    a, b = (asked_of(run.scenario, run.manifest) for run in runs)
    return [key for key in a if key not in NOT_ASKED and a[key] != b[key]]


def _spans(summaries: tuple[Summary, Summary], paired: bool) -> list[tuple[float, float]]:
    spans = [summary.window_s for summary in summaries]
    return [(max(span[0] for span in spans), min(span[1] for span in spans))] * 2 if paired else spans


def _threats(
    names: tuple[str, str],
    runs: tuple[Records, Records],
    summaries: tuple[Summary, Summary],
    pairs: Pairs | None,
    *,
    same_arrivals: bool,
) -> Iterator[str]:
    if differing := _differing(runs):
        yield (
            f"The scenarios of the two runs differ in {', '.join(differing)}: a difference between the runs may come from that alone."
        )
    if pairs is None:
        yield "The runs had different schedules (or a closed loop): chance in the load itself is part of each difference."
    elif not same_arrivals:
        yield "Later turns of conversations came when each run's answers allowed: the rates are compared as those of two different loads."
    if pairs and any(pairs.num_only):
        num_a, num_b = pairs.num_only
        yield (
            f"{num_a} requests were due in the window of {names[0]} only and {num_b} in that of {names[1]} only; no ratio of latencies "
            "counts them. Later turns come late after a slow answer and never after a failed one, so the ratios flatter the run that was "
            "slower or failed more."
        )
    failed = [sum(n for state, n in s.states.items() if state not in ("ok", "cancelled", "never_sent")) for s in summaries]
    if any(failed):
        shares = (f"{n} of {sum(s.states.values())} in {name}" for n, s, name in zip(failed, summaries, names, strict=True))
        yield (
            f"Requests failed: {', '.join(shares)}. A percentile that lies among them is infinite: where it surely does in one run only, "
            "the other run is faster there; elsewhere such a percentile has no ratio."
        )
    for name, run, summary in zip(names, runs, summaries, strict=True):
        cut_s, warmup_s = summary.warmup_cut_s, run.scenario.warmup_s
        if cut_s > warmup_s:
            whose = "both runs" if pairs else "that run"
            yield (
                f"The warm-up of {name} took {cut_s:.0f} s, not the {warmup_s:.0f} s of the scenario: earlier requests are left out of "
                f"{whose}."
            )
    if {s.loop for s in summaries} == {"open", "closed"}:
        yield "One loop is open and one is closed: their latencies have different meanings."
    yield "One run each: the intervals do not include differences from one start of a target to the next; repeat in the order ABBA."
