"""This module joins runs of one scenario, each with its own seed, into one result; intervals come from the runs' differences.

A single run near saturation cannot show how much its percentiles depend on the seed (docs/loadtest.md). Replicates can: a percentile is
that of all requests together, and its interval a jackknife over the runs; a rate or a share is the mean of the runs. Both intervals
are Student's, with one degree of freedom less than runs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from loadtest.errors import ExitCode, InvalidRun, UsageError
from loadtest.judge import stats
from loadtest.judge.analysis import summary_of
from loadtest.judge.gaps import Sorted
from loadtest.judge.metrics import read_records
from loadtest.judge.stats import Floats
from loadtest.judge.summary import Quantile, Summary, interval
from loadtest.judge.window import Window
from loadtest.plan.recorded import asked_of, recorded_scenario
from loadtest.plan.scenario import Scenario
from loadtest.quantiles import Ordered, rank
from loadtest.records import Manifest, read_manifest
from loadtest.wording import percentile, share

METRICS = ("ttft", "tpot", "itl", "e2e")
QUANTILES = stats.QUANTILES[:-1]
MIN_RUNS = 3
"""Smallest number of runs: Student's interval from two runs is thirteen times their distance."""
RATES = {
    "offered": "requests/s offered",
    "completed": "requests/s completed",
    "goodput": "requests/s good",
    "output_tokens": "output tokens/s",
}


class Percentile(msgspec.Struct, frozen=True):
    """A percentile over all requests of all runs."""

    metric: str
    at: Quantile
    per_run_s: list[float | None]
    """The percentile of each run; None: too many requests failed, or the run had none."""

    def __str__(self) -> str:
        words = interval(self.at) if self.at.value_s is not None else "beyond all that was measured: too many failed"
        return f"{self.metric} {percentile(self.at.q)} {words}"


class Mean(msgspec.Struct, frozen=True):
    """The mean of a figure that each run has once."""

    name: str
    value: float
    low: float
    high: float
    per_run: list[float]

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


class Attained(msgspec.Struct, frozen=True):
    """Share of the requests inside a limit. The interval is, on each side, the wider of Student's over the runs and that of all samples."""

    limit: str
    verdict: Literal["pass", "fail", "undecided"]
    value: float
    low: float
    high: float
    per_run: list[float]

    def __str__(self) -> str:
        return f"{self.limit}: {self.verdict}, inside {share(self.value)} [{share(self.low)}, {share(self.high)}]"


class Replicates(msgspec.Struct, frozen=True):
    """The joint result of several runs."""

    runs: list[str]
    seeds: list[int]
    num_ok: list[int]
    """For each run, the number of complete answers that were due in its window."""
    slo: list[Attained]
    rates: list[Mean]
    percentiles: list[Percentile]
    threats: list[str]

    def lines(self) -> list[str]:
        """Return the result as text for a terminal."""
        head = (
            f"{len(self.runs)} replicates, seeds {', '.join(map(str, self.seeds))}; 95 % intervals from what differs between them"
        )
        return [head, *map(str, self.slo), *map(str, self.rates), *map(str, self.percentiles), *self.threats]

    def exit_code(self) -> ExitCode:
        verdicts = {attained.verdict for attained in self.slo}
        if "fail" in verdicts:
            return ExitCode.SLO_MISSED
        # As for a single run: without a complete answer there is no pass.
        return ExitCode.UNDECIDED if "undecided" in verdicts or not all(self.num_ok) else ExitCode.PASS


def pool(runs: Sequence[Path]) -> Replicates:
    """Pool the runs; see `Replicates`.

    Raises:
        UsageError: There are fewer than `MIN_RUNS` runs, scenarios differ in more than the seed, a seed occurs twice, a run was
            interrupted, or a folder holds no run.
        InvalidRun: A run is invalid.
    """
    if len(runs) < MIN_RUNS:
        raise UsageError("RUN", f"{len(runs)} runs are not enough to see how much they differ; give {MIN_RUNS} or more")
    _check_alike(runs, [read_manifest(run) for run in runs])
    read = [_read(run) for run in runs]
    if sick := [
        f"{run.resolve().name}: {gate.text}"
        for run, each in zip(runs, read, strict=True)
        for gate in each.summary.gates
        if not gate.ok
    ]:
        raise InvalidRun(sick)
    return Replicates(
        runs=[run.resolve().name for run in runs],
        seeds=[each.scenario.seed for each in read],
        num_ok=[each.summary.states.get("ok", 0) for each in read],
        slo=list(_attained(read)),
        rates=list(_rates([each.summary for each in read])),
        percentiles=list(_percentiles(read)),
        threats=list(_threats(read)),
    )


def _check_alike(runs: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    names = [str(run) for run in runs]
    scenarios = [recorded_scenario(*pair) for pair in zip(runs, manifests, strict=True)]
    asked = [asked_of(*pair) for pair in zip(scenarios, manifests, strict=True)]
    owners: dict[int, str] = {}
    for name, scenario, manifest, keys in zip(names, scenarios, manifests, asked, strict=True):
        if differing := [key for key in keys if keys[key] != asked[0][key]]:
            what = f"differs from {names[0]} in {', '.join(differing)}; replicates differ in the seed only"
            raise UsageError(name, what)
        if manifest.state != "finished":
            raise UsageError(name, "did not come to its end; leave it out")
        if scenario.seed in owners:
            what = f"has the seed {scenario.seed}, as {owners[scenario.seed]} has; a replicate has a seed of its own"
            raise UsageError(name, what)
        owners[scenario.seed] = name


@dataclass(frozen=True)
class _Read:
    """The kept data of one run: for its window, eight bytes per request and metric, and the count of each gap."""

    name: str
    scenario: Scenario
    target: str
    summary: Summary
    latencies_s: dict[str, Floats]
    """Latencies by metric, without itl; infinite for failed requests."""
    gaps: Sorted


def _read(run: Path) -> _Read:
    records = read_records(run)
    summary = summary_of(records)
    window = Window.of(records).between(*summary.window_s)
    latencies_s = {metric: window.bounds(metric).high for metric in METRICS if metric != "itl"}
    return _Read(run.resolve().name, records.scenario, records.manifest.target, summary, latencies_s, window.sorted_gaps())


def _attained(runs: Sequence[_Read]) -> Iterator[Attained]:
    for number, limit in enumerate(runs[0].scenario.slo.limits):
        results = [run.summary.slo[number] for run in runs]
        shares, sizes = (np.array(values) for values in zip(*((r.attained, r.n_eff) for r in results), strict=True))
        (low, _), (_, high) = (
            _interval(np.array([getattr(r, bound) for r in results]), sizes) for bound in ("at_least", "at_most")
        )
        verdict: Literal["pass", "fail", "undecided"] = "undecided"
        if high < limit.quantile:
            verdict = "fail"
        elif low >= limit.quantile:
            verdict = "pass"
        yield Attained(str(limit), verdict, float(shares.mean()), low, high, shares.tolist())


def _interval(shares: Floats, sizes: Floats) -> tuple[float, float]:
    """Return the interval of a share from each run's value; ``sizes`` are the numbers of independent samples of the runs."""
    _, low, high = stats.mean_interval(shares)
    alone = stats.share_interval(float(np.average(shares, weights=sizes)) if sizes.any() else 0.0, float(sizes.sum()))
    return max(0.0, min(low, alone[0])), min(1.0, max(high, alone[1]))


def _rates(summaries: Sequence[Summary]) -> Iterator[Mean]:
    for field, words in RATES.items():
        values = np.array([getattr(s.throughput, field) if s.throughput else 0.0 for s in summaries], dtype=np.float64)
        value, low, high = stats.mean_interval(values)
        yield Mean(words, value, max(0.0, low), high, values.tolist())


def _percentiles(runs: Sequence[_Read]) -> Iterator[Percentile]:
    for metric in METRICS:
        if not all(_together([run], metric).size for run in runs):
            continue
        pooled = _quantiles(runs, metric)
        left_out = np.array([_quantiles([*runs[:k], *runs[k + 1 :]], metric) for k in range(len(runs))])
        per_run = np.array([_quantiles([run], metric) for run in runs])
        for number, q in enumerate(QUANTILES):
            value, low, high = stats.jackknife_interval(pooled[number], left_out[:, number])
            known = math.isfinite(high)
            low_s, high_s = (max(0.0, low), max(0.0, high)) if known else (None, None)
            at = Quantile(q, _finite(value), low_s, high_s, high_failed=not known)
            yield Percentile(metric, at, [_finite(v) for v in per_run[:, number].tolist()])


def _quantiles(runs: Sequence[_Read], metric: str) -> list[float]:
    """Return the metric at `QUANTILES` of all requests of these runs together."""
    values = _together(runs, metric)
    return [float(values[rank(values.size, q) - 1]) for q in QUANTILES]


def _together(runs: Sequence[_Read], metric: str) -> Ordered:
    if metric == "itl":
        return Sorted.merged([run.gaps for run in runs])
    return np.sort(np.concatenate([run.latencies_s[metric] for run in runs]))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _threats(runs: Sequence[_Read]) -> Iterator[str]:
    if len(targets := {run.target for run in runs}) > 1:
        yield f"The runs asked different addresses ({', '.join(sorted(targets))}): they are replicates if the same was behind all of them."
    if empty := [run.name for run in runs if not run.summary.states.get("ok")]:
        yield f"No request was answered completely in {', '.join(empty)}: the runs together pass nothing."
    for run in runs:
        cut_s, warmup_s = run.summary.warmup_cut_s, run.scenario.warmup_s
        if cut_s > warmup_s:
            yield f"The warm-up of {run.name} took {cut_s:.0f} s, not the {warmup_s:.0f} s of the scenario; all of it is left out."
    if num := sum(run.summary.steady is False for run in runs):
        yield f"{num} of the runs are not steady: runs of another length would have other percentiles."
    if any(run.summary.schedule_sha256 == runs[0].summary.schedule_sha256 for run in runs[1:]):
        yield "Some runs had the same schedule, whatever their seeds: what chance does to the load is not in the intervals."
