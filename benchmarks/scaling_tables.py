"""This module has the autoscaling benchmark's rows, their means over seeds with 95 % intervals, and their table. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from loadtest.judge.stats import mean_interval

ATTAINMENT = 0.99
COUNT = "request count"
"""The labels of the tuned policy begin with this text."""


@dataclass(frozen=True)
class Row:
    """The result of one policy on one scenario with one seed."""

    scenario: str
    policy: str
    seed: int
    requests: int
    attainment: float
    ttft_p95_s: float
    replica_s: float
    changes_per_hour: float
    most: int
    first_change_s: float | None
    """Seconds from the first rise of the law's rate to the first ordered replica."""
    cpu_s: float
    bound_s: float
    """The fewest replica-seconds with which any policy serves the requests of this run (`scaling_bound.py`)."""


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, and the half width of its 95 % interval; infinite for a single seed."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        """Return the mean of the values with Student's interval."""
        array = np.array([*values])
        if array.size < 2:
            return cls(float(array[0]), math.inf)
        mean, low, _ = mean_interval(array)
        return cls(mean, mean - low)

    def text(self, form: str) -> str:
        """Return the mean as text, each number in ``form``; without an interval for a single seed."""
        return format(self.value, form) + (f" ± {self.half:{form}}" if math.isfinite(self.half) else "")


@dataclass(frozen=True)
class Summary:
    """The results of one policy on one scenario: means over seeds, unless a field says otherwise."""

    policy: str
    attainment: Mean
    worst_attainment: float
    ttft_p95_s: float
    replica_s: Mean
    changes_per_hour: float
    most: int
    """Largest number of replicas over all seeds."""
    first_change_s: float | None
    """Mean over the seeds with a change."""
    bound_s: float


def summaries(rows: list[Row], scenario: str) -> dict[str, Summary]:
    """Return the summary of each policy."""
    found: dict[str, Summary] = {}
    for policy in dict.fromkeys(row.policy for row in rows if row.scenario == scenario):
        own = [row for row in rows if (row.scenario, row.policy) == (scenario, policy)]
        delays = [row.first_change_s for row in own if row.first_change_s is not None]
        found[policy] = Summary(
            policy=policy,
            attainment=Mean.of(row.attainment for row in own),
            worst_attainment=min(row.attainment for row in own),
            ttft_p95_s=fmean(row.ttft_p95_s for row in own),
            replica_s=Mean.of(row.replica_s for row in own),
            changes_per_hour=fmean(row.changes_per_hour for row in own),
            most=max(row.most for row in own),
            first_change_s=fmean(delays) if delays else None,
            bound_s=fmean(row.bound_s for row in own),
        )
    return found


def best_count(counts: Mapping[str, tuple[float, float]], ours: float) -> str:
    """Return the label of the cheapest request count that is as good as ours or good enough; if there is none, of the best one.

    Args:
        counts: By label, the share of first tokens in time, and the replica-seconds.
        ours: Our share in time. A share of `ATTAINMENT` or more is good enough.
    """
    good = [label for label, (share, _) in counts.items() if share >= min(ours, ATTAINMENT)]
    return min(good, key=lambda label: counts[label][1]) if good else max(counts, key=lambda label: counts[label][0])


def tuned(found: dict[str, Summary]) -> Summary | None:
    """Return the best request count for a scenario; None if there is none.

    Request counts that ran with fewer seeds than the best one were dropped; only the best has a finite interval then.
    """
    counts = {policy: summary for policy, summary in found.items() if policy.startswith(COUNT)}
    counts = {policy: count for policy, count in counts.items() if math.isfinite(count.replica_s.half)} or counts
    if not counts:
        return None
    pairs = {policy: (count.attainment.value, count.replica_s.value) for policy, count in counts.items()}
    return counts[best_count(pairs, found["serve-app"].attainment.value)]


def table(rows: list[Row], names: list[str]) -> str:
    """Return the table of all policies on the scenarios of these names."""
    lines = [
        "| scenario | policy | in SLO, worst seed | TTFT p95 s | replica-s | x bound | x oracle | changes/h | most | first change |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        found = summaries(rows, name)
        best, tried = tuned(found), sum(policy.startswith(COUNT) for policy in found)
        for row in (*(s for s in found.values() if not s.policy.startswith(COUNT)), *([best] if best else [])):
            label = f"{row.policy} (best of {tried})" if row is best else row.policy
            first = "–" if row.first_change_s is None else f"{row.first_change_s:.0f} s"
            to_oracle = f"{row.replica_s.value / found['oracle'].replica_s.value:.2f}" if "oracle" in found else "–"
            ratios = f"{row.replica_s.value / row.bound_s:.2f} | {to_oracle}"
            lines.append(
                f"| {name} | {label} | {row.attainment.text('.2%')}, {row.worst_attainment:.2%} | {row.ttft_p95_s:.2f} | "
                f"{row.replica_s.text(',.0f')} | {ratios} | {row.changes_per_hour:.0f} | {row.most} | {first} |"
            )
    return "\n".join(lines)
