"""Several runs of one scenario, each with a seed of its own, as one result: intervals from what differs between the runs.

One run near saturation cannot tell how far its own percentiles would have been others with another seed (docs/loadtest.md). Replicates
can: a percentile is that of all requests together, its interval a jackknife over the runs; a rate or a share is the runs' mean. Both
intervals are Student's, with one degree of freedom less than runs.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from loadtest.errors import ExitCode, InvalidRun, UsageError
from loadtest.judge import stats
from loadtest.judge.analysis import summary_of
from loadtest.judge.metrics import Records, metric_bounds, read_records
from loadtest.judge.stats import Floats
from loadtest.judge.summary import Quantile, Summary, interval
from loadtest.wording import percentile, share

METRICS = ("ttft", "tpot", "itl", "e2e")
QUANTILES = stats.QUANTILES[:-1]
MIN_RUNS = 3
"""Of two, t's interval is thirteen times their distance."""
RATES = {
    "offered": "requests/s offered",
    "completed": "requests/s completed",
    "goodput": "requests/s good",
    "output_tokens": "output tokens/s",
}


class Percentile(msgspec.Struct, frozen=True):
    """Of all requests of all runs."""

    metric: str
    at: Quantile
    per_run_s: list[float | None]
    """None: too many failed, or the run had none."""

    def __str__(self) -> str:
        words = interval(self.at) if self.at.value_s is not None else "beyond all that was measured: too many failed"
        return f"{self.metric} {percentile(self.at.q)} {words}"


class Mean(msgspec.Struct, frozen=True):
    """Of a figure that each run has one of."""

    name: str
    value: float
    low: float
    high: float
    per_run: list[float]

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


class Attained(msgspec.Struct, frozen=True):
    """Share of the requests inside a limit. Interval: on each side the wider of Student's over the runs and Wilson's of all samples."""

    limit: str
    verdict: Literal["pass", "fail", "undecided"]
    value: float
    low: float
    high: float
    per_run: list[float]

    def __str__(self) -> str:
        return f"{self.limit}: {self.verdict}, inside {share(self.value)} [{share(self.low)}, {share(self.high)}]"


class Replicates(msgspec.Struct, frozen=True):
    """What the runs say together."""

    runs: list[str]
    seeds: list[int]
    slo: list[Attained]
    rates: list[Mean]
    percentiles: list[Percentile]
    threats: list[str]

    def lines(self) -> list[str]:
        """Return it as text for a terminal."""
        head = (
            f"{len(self.runs)} replicates, seeds {', '.join(map(str, self.seeds))}; 95 % intervals from what differs between them"
        )
        return [head, *map(str, self.slo), *map(str, self.rates), *map(str, self.percentiles), *self.threats]

    def exit_code(self) -> ExitCode:
        verdicts = {attained.verdict for attained in self.slo}
        if "fail" in verdicts:
            return ExitCode.SLO_MISSED
        return ExitCode.UNDECIDED if "undecided" in verdicts else ExitCode.PASS


def pool(runs: Sequence[Path]) -> Replicates:
    """Pool the runs; see `Replicates`.

    Raises:
        UsageError: Fewer than `MIN_RUNS`, scenarios that differ in more than the seed, a seed twice, a run that was interrupted, or a
            folder that holds none.
        InvalidRun: One of them is invalid.
    """
    if len(runs) < MIN_RUNS:
        raise UsageError("RUN", f"{len(runs)} runs are not enough to see how much they differ; give {MIN_RUNS} or more")
    records = [read_records(run) for run in runs]
    _check_alike([str(run) for run in runs], records)
    summaries = [summary_of(each) for each in records]
    sick = [f"{run.name}: {gate.text}" for run, s in zip(runs, summaries, strict=True) for gate in s.gates if not gate.ok]
    if sick:
        raise InvalidRun(sick)
    return Replicates(
        runs=[run.name for run in runs],
        seeds=[each.scenario.seed for each in records],
        slo=list(_attained(records, summaries)),
        rates=list(_rates(summaries)),
        percentiles=list(_percentiles(records, summaries)),
        threats=list(_threats(records, summaries)),
    )


def _check_alike(names: Sequence[str], records: Sequence[Records]) -> None:
    first = _without_seed(records[0])
    owners: dict[int, str] = {}
    for name, each in zip(names, records, strict=True):
        asked = _without_seed(each)
        if differing := [key for key in asked if asked[key] != first[key]]:
            what = f"differs from {names[0]} in {', '.join(differing)}; replicates differ in the seed only"
            raise UsageError(name, what)
        if each.manifest.state != "finished":
            raise UsageError(name, "did not come to its end; leave it out")
        seed = each.scenario.seed
        if seed in owners:
            raise UsageError(name, f"has the seed {seed}, as {owners[seed]} has; a replicate has a seed of its own")
        owners[seed] = name


def _without_seed(records: Records) -> dict[str, Any]:
    asked = records.scenario.model_dump(mode="json", exclude={"seed"})
    for fault in asked["faults"]:
        fault["below_pid"] = None  # of the target's process, which may have been started again
    return asked | {"model": records.manifest.model}


def _attained(records: Sequence[Records], summaries: Sequence[Summary]) -> Iterator[Attained]:
    for number, limit in enumerate(records[0].scenario.slo.limits):
        results = [summary.slo[number] for summary in summaries]
        shares, sizes = (np.array(values) for values in zip(*((r.attained, r.n_eff) for r in results), strict=True))
        value, low, high = stats.mean_interval(shares)
        alone = stats.wilson(float(np.average(shares, weights=sizes)) if sizes.any() else 0.0, float(sizes.sum()))
        low, high = max(0.0, min(low, alone[0])), min(1.0, max(high, alone[1]))
        verdict: Literal["pass", "fail", "undecided"] = "undecided"
        if high < limit.quantile:
            verdict = "fail"
        elif low >= limit.quantile:
            verdict = "pass"
        yield Attained(str(limit), verdict, value, low, high, shares.tolist())


def _rates(summaries: Sequence[Summary]) -> Iterator[Mean]:
    for field, words in RATES.items():
        values = np.array([getattr(s.throughput, field) if s.throughput else 0.0 for s in summaries], dtype=np.float64)
        value, low, high = stats.mean_interval(values)
        yield Mean(words, value, max(0.0, low), high, values.tolist())


def _percentiles(records: Sequence[Records], summaries: Sequence[Summary]) -> Iterator[Percentile]:
    for metric in METRICS:
        values = [_values(each, summary, metric) for each, summary in zip(records, summaries, strict=True)]
        for q in QUANTILES if all(v.size for v in values) else ():
            value, low, high = stats.replicate_interval(values, q)
            bounds = (max(0.0, low), max(0.0, high)) if math.isfinite(high) else (None, None)
            yield Percentile(metric, Quantile(q, _finite(value), *bounds), [_finite(stats.quantile(v, q)) for v in values])


def _values(records: Records, summary: Summary, metric: str) -> Floats:
    low_s, high_s = summary.window_s
    items = [item for item in records.items() if low_s <= item.due_s < high_s]
    return metric_bounds(records, items, metric)[1]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _threats(records: Sequence[Records], summaries: Sequence[Summary]) -> Iterator[str]:
    if len(targets := {each.manifest.target for each in records}) > 1:
        yield f"The runs asked different addresses ({', '.join(sorted(targets))}): they are replicates if the same was behind all of them."
    if num := sum(summary.steady is False for summary in summaries):
        yield f"{num} of the runs are not steady: runs of another length would have other percentiles."
    if any(other.schedule_sha256 == summaries[0].schedule_sha256 for other in summaries[1:]):
        yield "Some runs had the same schedule, whatever their seeds: what chance does to the load is not in the intervals."
