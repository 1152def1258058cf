"""How the target followed its load: what was asked for, what was ready, what users felt, second by second. Pure.

Everything lies on a grid of 1 s; second ``t`` holds the last sample in [t, t+1), or the one before. What is desired and ready are
Ray Serve's replicas (of the deployments whose target changed, or of all if none did), else Kubernetes pods.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.records import REJECTIONS, Row, ServerSample
from loadtest.scenario import Arrival, FlashCrowd, OnOff, Scenario, Step
from loadtest.slo import Limit

Grid = NDArray[np.float64]
ValueOf = Callable[[Row, Limit], float | None]

CALM_S = 10
"""The SLO is recovered when it is kept over the next so many seconds, and over all the rest of the step."""
_GAUGES = ("pods_ready", "pods_pending", "pods_starting", "running", "waiting", "kv_usage")


class LoadStep(msgspec.Struct, frozen=True):
    at_s: float
    from_rate: float
    to_rate: float


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of the load, until the next one. Times in seconds; None: it did not happen, or nobody told the replicas."""

    step: LoadStep
    until_s: float
    detection_s: float | None
    """From the step to the first change of desired in its direction."""
    placed_s: float | None
    """From there until more (or fewer) pods run; only Kubernetes tells."""
    provisioning_s: float | None
    """From the first change of desired until so many are ready."""
    settled_s: float | None
    """From the step until as many are ready as were desired at most (at least, for a step down)."""
    recovery_s: float | None
    """From the step until the SLO is kept again; 0 when it always was."""
    num_requests: int
    num_violating: int
    """Outside some limit of the SLO, failed ones included; without an SLO the failed ones."""
    num_lost: int
    """Sent, and neither answered nor rejected with 429 or 503."""
    num_oscillations: int
    """Times desired turned round."""
    replica_s: float | None
    over_provisioned_replica_s: float | None
    """Ready beyond desired."""


class Autoscaling(msgspec.Struct, frozen=True):
    """``steps`` begins with the time before the first step, as a step from and to the same rate."""

    deployments: list[str]
    steps: list[StepResult]
    timeline: dict[str, list[float]]
    """Columns: t_s; offered, violating and lost by due time, completed; desired, ready and gauges where the target told them."""


def load_steps(arrival: Arrival, duration_s: float) -> list[LoadStep]:
    """Return the jumps of the rate; laws that change slowly, or not at all, have none."""
    match arrival:
        case Step():
            steps = [LoadStep(arrival.at_s, arrival.rate, arrival.to_rate)]
        case FlashCrowd():
            falls_s = arrival.at_s + arrival.rise_s + arrival.hold_s
            steps = [LoadStep(arrival.at_s, arrival.rate, arrival.peak_rate), LoadStep(falls_s, arrival.peak_rate, arrival.rate)]
        case OnOff():
            period_s = arrival.on_s + arrival.off_s
            steps = [
                step
                for start_s in np.arange(0.0, duration_s, period_s).tolist()
                for step in (
                    LoadStep(start_s, arrival.off_rate, arrival.rate),
                    LoadStep(start_s + arrival.on_s, arrival.rate, arrival.off_rate),
                )
            ]
        case _:
            steps = []
    return [step for step in steps if 0 < step.at_s < duration_s]


def analyse_autoscale(
    samples: Sequence[ServerSample],
    rows: Sequence[Row],
    scenario: Scenario,
    value_s: ValueOf,
) -> Autoscaling:
    """Return the timeline and what each step of the load led to.

    Args:
        rows: All of the run, in any order.
        value_s: Gives what a row is held against a limit with, in seconds: infinite for a failed one, None where there is none (cancelled).
    """
    users = _Users(rows, scenario, value_s, size=_num_seconds(samples, rows))
    deployments = _deployments(samples)
    desired = _grid(samples, [f"replicas_desired/{name}" for name in deployments], users.size)
    ready = _grid(samples, [f"replicas_ready/{name}" for name in deployments], users.size)
    gauges = {name: _grid(samples, [name], users.size) for name in _GAUGES}
    running_pods = _grid(samples, ["pods_ready", "pods_starting"], users.size)
    if desired is None:
        desired, ready = _grid(samples, ["pods_ready", "pods_pending", "pods_starting"], users.size), gauges["pods_ready"]
    jumps = load_steps(scenario.arrival, scenario.duration_s)
    first_rate = jumps[0].from_rate if jumps else getattr(scenario.arrival, "rate", 0.0)
    steps = [LoadStep(0.0, first_rate, first_rate), *jumps]
    results = [
        _result(step, until_s, users, desired, ready, running_pods)
        for step, until_s in zip(steps, [*(s.at_s for s in jumps), float(users.size)], strict=True)
    ]
    columns: dict[str, Grid | None] = {"t_s": np.arange(users.size, dtype=float), **users.columns()}
    columns |= {"desired": desired, "ready": ready, **gauges}
    return Autoscaling(deployments, results, {name: grid.tolist() for name, grid in columns.items() if grid is not None})


def _num_seconds(samples: Sequence[ServerSample], rows: Sequence[Row]) -> int:
    return 1 + int(max([0.0, *(s.t_s for s in samples), *(r.due_s for r in rows), *(r.end_s or 0.0 for r in rows)]))


class _Users:
    """What users felt, counted per second of their due times."""

    def __init__(self, rows: Sequence[Row], scenario: Scenario, value_s: ValueOf, *, size: int) -> None:
        self.size = size
        rows = [row for row in rows if row.state != "cancelled"]
        limits = scenario.slo.limits
        inside = [[(value_s(row, limit) or 0.0) <= limit.limit_s for row in rows] for limit in limits]
        if not limits:
            inside = [[row.state == "ok" for row in rows]]
        self._quantiles = [limit.quantile for limit in limits] or [0.99]
        self._offered = self._count([row.due_s for row in rows])
        self._inside = [self._count([r.due_s for r, good in zip(rows, kept, strict=True) if good]) for kept in inside]
        bad = [row.due_s for row, *kept in zip(rows, *inside, strict=True) if not all(kept)]
        self._violating = self._count(bad)
        lost = [row for row in rows if row.state not in ("ok", "never_sent") and row.status not in REJECTIONS]
        self._lost = self._count([row.due_s for row in lost])
        self._completed = self._count([row.end_s for row in rows if row.state == "ok" and row.end_s is not None])

    def columns(self) -> dict[str, Grid | None]:
        return {"offered": self._offered, "completed": self._completed, "violating": self._violating, "lost": self._lost}

    def counts(self, begin: int, end: int) -> tuple[int, int, int]:
        """Return the requests due in [begin, end): all, those outside the SLO, those lost."""
        return tuple(int(grid[begin:end].sum()) for grid in (self._offered, self._violating, self._lost))  # type: ignore[return-value]

    def recovered(self, begin: int, end: int) -> int | None:
        """Return the first second from which on the SLO is kept until ``end``, `CALM_S` before it at the latest."""
        end = min(end, 1 + int(np.flatnonzero(self._offered).max(initial=-1)))  # nobody is hurt when nobody comes
        for second in range(begin, end - CALM_S + 1):
            if self._kept(second, second + CALM_S) and self._kept(second, end):
                return second
        return None

    def _kept(self, begin: int, end: int) -> bool:
        num = self._offered[begin:end].sum()
        return all(kept[begin:end].sum() >= q * num - 1e-9 for kept, q in zip(self._inside, self._quantiles, strict=True))

    def _count(self, times_s: Sequence[float]) -> Grid:
        cells = np.floor(np.asarray(times_s, dtype=float)).astype(int)
        return np.bincount(cells[(cells >= 0) & (cells < self.size)], minlength=self.size).astype(float)


def _result(
    step: LoadStep,
    until_s: float,
    users: _Users,
    desired: Grid | None,
    ready: Grid | None,
    running_pods: Grid | None,
) -> StepResult:
    begin, end = int(step.at_s), math.ceil(until_s)
    sign = np.sign(step.to_rate - step.from_rate)
    detected = provisioned = settled = placed = None
    turns, replica_s, over_s = 0, None, None
    if desired is not None and ready is not None:
        before, moved = desired[max(begin - 1, 0)], np.diff(desired[max(begin - 1, 0) : end])
        turns = sum(a != b for a, b in pairwise(np.sign(moved[moved != 0]).tolist()))
        replica_s = float(ready[begin:end].sum())
        over_s = float(np.maximum(0, ready - desired)[begin:end].sum())
        detected = _first(sign * (desired - before) > 0, begin, end) if sign else None
        if detected is not None:
            provisioned = _first(sign * (ready - desired[detected]) >= 0, detected, end)
            settled = _first(sign * ready >= (sign * desired[begin:end]).max(), detected, end)
            if running_pods is not None:
                placed = _first(sign * (running_pods - running_pods[max(begin - 1, 0)]) > 0, detected, end)
    return StepResult(
        step, until_s, _since(detected, step.at_s), _since(placed, detected), _since(provisioned, detected),
        _since(settled, step.at_s), _since(users.recovered(begin, end), step.at_s),
        *users.counts(begin, end), turns, replica_s, over_s,
    )  # fmt: skip


def _first(holds: NDArray[np.bool_], begin: int, end: int) -> int | None:
    found = np.flatnonzero(holds[begin:end])
    return begin + int(found[0]) if found.size else None


def _since(second: int | None, from_s: float | None) -> float | None:
    return None if second is None or from_s is None else max(0.0, second - from_s)


def _deployments(samples: Sequence[ServerSample]) -> list[str]:
    """Return those whose target changed; all of them if none did."""
    seen: dict[str, set[float]] = {}
    for sample in samples:
        for name, value in sample.values.items():
            if name.startswith("replicas_desired/"):
                seen.setdefault(name.partition("/")[2], set()).add(value)
    return sorted(name for name in seen if len(seen[name]) > 1) or sorted(seen)


def _grid(samples: Sequence[ServerSample], names: Sequence[str], size: int) -> Grid | None:
    """Return the sum of the named values in each second; None if no sample has any. Before the first sample it is that one's."""
    grid = np.full(size, np.nan)
    for sample in sorted(samples, key=lambda s: s.t_s):
        values = [sample.values[name] for name in names if name in sample.values]
        if values:
            grid[max(0, int(sample.t_s))] = sum(values)
    known = np.flatnonzero(~np.isnan(grid))
    if not known.size:
        return None
    filled: Grid = grid[known[np.maximum(0, np.searchsorted(known, np.arange(size), side="right") - 1)]]
    return filled
