"""This module shows, per second, how the target followed its load: replicas desired, replicas ready, what users felt. Pure.

Laws that change slowly have steps as well: each rise from a trough to the crest, and each fall, is a step with a duration. Its times
count from the begin of the change; the rate at which the target reacted, and the time at which users first felt the change, are given
too. The reaction to a rise is looked for until the next rise begins, also while the rate falls again; a request counts for the step in
which it was due.

If the rate has no steps, the times at which classes of requests begin or end are steps, since other requests can be more or less work.
The direction of such a step is not known in advance; the first change of desired decides it.

All values are on a grid of 1 s; second ``t`` has the last sample in [t, t+1), or else the sample before. Desired and ready count
Ray Serve's replicas (of the deployments whose target changed, or of all if none did), else Kubernetes pods. In the timeline and in
replica-seconds a sample holds for `loadtest.judge.cost.MAX_HOLE_S` at most: after that the number of replicas is unknown.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.judge.cost import MAX_HOLE_S
from loadtest.plan.class_times import classes_from
from loadtest.plan.laws import Arrival, Diurnal, FlashCrowd, OnOff, Ramp, Step
from loadtest.plan.scenario import Scenario
from loadtest.plan.slo import Limit
from loadtest.records import REJECTIONS, Row, ServerSample

Grid = NDArray[np.float64]
ValueOf = Callable[[Row, Limit], float | None]

CALM_S = 10
"""Seconds over which the SLO must be kept for a recovery, which must also last for the rest of the step."""
_GAUGES = ("pods_ready", "pods_pending", "pods_starting", "running", "waiting", "kv_usage")


class LoadStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of the offered rate from one value to another, beginning at ``at_s``."""

    at_s: float
    from_rate: float
    to_rate: float
    lasts_s: float = 0.0
    """Duration of the change; 0: a jump."""
    shape: Literal["straight", "sine"] = "straight"
    classes: str = ""
    """Names of the classes of requests that are drawn from then on, if the classes change and the rate does not."""

    @property
    def rises(self) -> bool:
        return self.to_rate > self.from_rate

    def rate_at(self, t_s: float) -> float:
        """Return the law's rate at the time; after the change, the new rate."""
        done = min(1.0, max(0.0, (t_s - self.at_s) / self.lasts_s)) if self.lasts_s else 1.0
        if self.shape == "sine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.from_rate + done * (self.to_rate - self.from_rate)


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of the load, until the next step. Times in seconds; None: the event did not happen, or no source reported replicas.

    A step begins where the rate begins to change.
    """

    step: LoadStep
    until_s: float
    detection_s: float | None
    """From the step to the first change of desired in the step's direction; if the step is a change of classes, in any direction."""
    detection_rate: float | None
    """The law's requests/s at that time; for a jump the new rate."""
    placed_s: float | None
    """From that change until more (or fewer) pods run; only Kubernetes reports that."""
    provisioning_s: float | None
    """From the first change of desired until that number is ready."""
    settled_s: float | None
    """From the step until the largest desired number (for a step down, the smallest) is ready."""
    outside_from_s: float | None
    """From the step until the outage: the SLO was not kept over the last `CALM_S` (or since the step). None: it was always kept."""
    recovery_s: float | None
    """From the step until the SLO is kept for the rest of the step or, if that does not happen, until it is kept for `CALM_S` after the
    step. 0: it was always kept."""
    num_requests: int
    num_violating: int
    """Requests outside a limit of the SLO, failed requests included; without an SLO the failed requests."""
    num_lost: int
    """Requests that were sent and neither answered nor rejected with 429 or 503."""
    num_oscillations: int
    """How often desired changed its direction."""
    replica_s: float | None
    """Ready replicas times seconds, over the seconds with a reported number of ready replicas; None: no second has one."""
    over_provisioned_replica_s: float | None
    """Replicas ready beyond the desired number times seconds, over the same seconds."""


class Autoscaling(msgspec.Struct, frozen=True):
    """The target's response to its load. ``steps`` begins with the time before the first step, as a step from and to the same rate."""

    deployments: list[str]
    steps: list[StepResult]
    timeline: dict[str, list[float | None]]
    """Columns: t_s; offered, violating and lost by due time, completed; desired, ready and gauges if the target reported them.

    None: the target reported no value at that time.
    """


def load_steps(arrival: Arrival, duration_s: float) -> list[LoadStep]:
    """Return the changes of the rate, in order; empty for laws without changes."""
    match arrival:
        case Step():
            steps = [LoadStep(arrival.at_s, arrival.rate, arrival.to_rate)]
        case Ramp():
            steps = [LoadStep(0.0, arrival.rate, arrival.to_rate, duration_s)]
        case FlashCrowd():
            falls_s = arrival.at_s + arrival.rise_s + arrival.hold_s
            steps = [
                LoadStep(arrival.at_s, arrival.rate, arrival.peak_rate, arrival.rise_s),
                LoadStep(falls_s, arrival.peak_rate, arrival.rate, arrival.fall_s),
            ]
        case Diurnal():
            half_s, trough, crest = arrival.period_s / 2, *(arrival.rate * (1 + k * arrival.amplitude) for k in (-1, 1))
            steps = [
                LoadStep(start_s + later_s, *rates, half_s, "sine")
                for start_s in np.arange(0.0, duration_s, arrival.period_s).tolist()
                for later_s, rates in ((0.0, (trough, crest)), (half_s, (crest, trough)))
            ]
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
    # A jump at 0 is no change.
    return [s for s in steps if s.at_s < duration_s and s.from_rate != s.to_rate and (s.at_s > 0 or s.lasts_s)]


def analyse_autoscale(
    samples: Sequence[ServerSample],
    rows: Sequence[Row],
    scenario: Scenario,
    value_s: ValueOf,
) -> Autoscaling:
    """Return the timeline and the result of each step of the load.

    Args:
        rows: All rows of the run, in any order.
        value_s: Returns the seconds that a limit is compared with: infinite for a failed row, None for a cancelled row.
    """
    users = _Users(rows, scenario, value_s, size=_num_seconds(samples, rows))
    deployments = _deployments(samples)
    desired = _grid(samples, [f"replicas_desired/{name}" for name in deployments], users.size)
    ready = _grid(samples, [f"replicas_ready/{name}" for name in deployments], users.size)
    gauges = {name: _grid(samples, [name], users.size) for name in _GAUGES}
    running_pods = _grid(samples, ["pods_ready", "pods_starting"], users.size)
    if desired is None:
        desired, ready = _grid(samples, ["pods_ready", "pods_pending", "pods_starting"], users.size), gauges["pods_ready"]
    rate = getattr(scenario.arrival, "rate", 0.0)
    jumps = load_steps(scenario.arrival, scenario.duration_s) or [
        LoadStep(at_s, rate, rate, classes=names)
        for at_s, names in classes_from(scenario.requests, duration_s=scenario.duration_s).items()
    ]
    first_rate = jumps[0].from_rate if jumps else rate
    before = [] if jumps and jumps[0].at_s == 0 else [LoadStep(0.0, first_rate, first_rate)]
    steps = [*before, *jumps]
    results = []
    for number, step in enumerate(steps):
        later = steps[number + 1 :]
        until_s = later[0].at_s if later else float(users.size)
        watched_s = next((s.at_s for s in later if s.rises == step.rises), float(users.size)) if step in jumps else until_s
        results.append(_result(step, until_s, watched_s, users, desired, ready, running_pods))
    columns: dict[str, Grid | None] = {"t_s": np.arange(users.size, dtype=float), **users.columns()}
    columns |= {"desired": desired, "ready": ready, **gauges}
    return Autoscaling(deployments, results, {name: _told(grid) for name, grid in columns.items() if grid is not None})


def _num_seconds(samples: Sequence[ServerSample], rows: Sequence[Row]) -> int:
    return 1 + int(max([0.0, *(s.t_s for s in samples), *(r.due_s for r in rows), *(r.end_s or 0.0 for r in rows)]))


class _Users:
    """The users' experience: counts of requests per second of due time."""

    def __init__(self, rows: Sequence[Row], scenario: Scenario, value_s: ValueOf, *, size: int) -> None:
        self.size = size
        # Later turns of conversations that were left out at the end of the run were no load.
        rows = [row for row in rows if row.state != "never_sent" or row.due_s < scenario.duration_s]
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

    def recovered(self, begin: int, end: int, watched: int) -> int | None:
        """Return the first second from which the SLO is kept until ``end``; it is at least `CALM_S` before ``end``.

        If there is none, return the first later second before ``watched`` from which the SLO is kept for `CALM_S`.
        """
        last = 1 + int(np.flatnonzero(self._offered).max(initial=-1))  # without requests no user is affected
        for second in range(begin, min(watched, last) - CALM_S + 1):
            inside = second <= end - CALM_S
            if self._kept(second, second + CALM_S) and (not inside or self._kept(second, min(end, last))):
                return second
        return None

    def outside(self, begin: int, end: int) -> int | None:
        """Return the first second since ``begin`` at whose end the SLO was not kept over the last `CALM_S`."""
        return next((second for second in range(begin, end) if not self._kept(max(begin, second + 1 - CALM_S), second + 1)), None)

    def _kept(self, begin: int, end: int) -> bool:
        num = self._offered[begin:end].sum()
        return all(kept[begin:end].sum() >= q * num - 1e-9 for kept, q in zip(self._inside, self._quantiles, strict=True))

    def _count(self, times_s: Sequence[float]) -> Grid:
        cells = np.floor(np.asarray(times_s, dtype=float)).astype(int)
        return np.bincount(cells[(cells >= 0) & (cells < self.size)], minlength=self.size).astype(float)


def _result(
    step: LoadStep,
    until_s: float,
    watched_s: float,
    users: _Users,
    desired: Grid | None,
    ready: Grid | None,
    running_pods: Grid | None,
) -> StepResult:
    begin, end, watched = int(step.at_s), math.ceil(until_s), math.ceil(watched_s)
    sign = np.sign(step.to_rate - step.from_rate)
    detected = provisioned = settled = placed = None
    turns, replica_s, over_s = 0, None, None
    if desired is not None and ready is not None:
        told = ~np.isnan(desired[begin:end]) & ~np.isnan(ready[begin:end])
        if told.any():
            replica_s = float(ready[begin:end][told].sum())
            over_s = float(np.maximum(0, ready - desired)[begin:end][told].sum())
        desired, ready = _held(desired), _held(ready)
        moves = np.diff(desired, prepend=desired[0])
        if step.classes:
            sign = next(iter(np.sign(moves[begin:watched][moves[begin:watched] != 0])), 0.0)
        moved = moves[begin:end]
        turns = sum(a != b for a, b in pairwise(np.sign(moved[moved != 0]).tolist()))
        detected = _first(sign * moves > 0, begin, watched) if sign else None
        if detected is not None:
            provisioned = _first(sign * (ready - desired[detected]) >= 0, detected, watched)
            settled = _first(sign * ready >= (sign * desired[detected : max(end, detected + 1)]).max(), detected, watched)
            if running_pods is not None:
                running_pods = _held(running_pods)
                placed = _first(sign * (running_pods - running_pods[max(begin - 1, 0)]) > 0, detected, watched)
    recovered = users.recovered(begin, end, watched)
    outside = users.outside(begin, end) if recovered != begin else None
    return StepResult(
        step, until_s, _since(detected, step.at_s), None if detected is None else step.rate_at(detected),
        _since(placed, detected), _since(provisioned, detected), _since(settled, step.at_s),
        _since(outside, step.at_s), _since(recovered, step.at_s),
        *users.counts(begin, end), turns, replica_s, over_s,
    )  # fmt: skip


def _first(holds: NDArray[np.bool_], begin: int, end: int) -> int | None:
    found = np.flatnonzero(holds[begin:end])
    return begin + int(found[0]) if found.size else None


def _since(second: int | None, from_s: float | None) -> float | None:
    return None if second is None or from_s is None else max(0.0, second - from_s)


def _deployments(samples: Sequence[ServerSample]) -> list[str]:
    """Return the deployments whose target changed; all deployments if none changed."""
    seen: dict[str, set[float]] = {}
    for sample in samples:
        for name, value in sample.values.items():
            if name.startswith("replicas_desired/"):
                seen.setdefault(name.partition("/")[2], set()).add(value)
    return sorted(name for name in seen if len(seen[name]) > 1) or sorted(seen)


def _grid(samples: Sequence[ServerSample], names: Sequence[str], size: int) -> Grid | None:
    """Return the sum of the named values per second, NaN if none was reported for `MAX_HOLE_S`; None if no sample has any.

    The first sample also holds for as long before its time.
    """
    grid = np.full(size, np.nan)
    for sample in sorted(samples, key=lambda s: s.t_s):
        values = [sample.values[name] for name in names if name in sample.values]
        if values:
            grid[max(0, int(sample.t_s))] = sum(values)
    if np.isnan(grid).all():
        return None
    known = _last_known(grid)
    held = _held(grid)
    held[np.abs(np.arange(size) - known) >= MAX_HOLE_S] = np.nan
    return held


def _held(grid: Grid) -> Grid:
    """Return the grid with unknown values replaced by the last known value or, at the start, by the first."""
    return grid[_last_known(grid)]


def _last_known(grid: Grid) -> NDArray[np.int64]:
    """Return for each second the second of the last known value; before the first known value, the second of the first."""
    known = np.flatnonzero(~np.isnan(grid))
    found: NDArray[np.int64] = known[np.maximum(0, np.searchsorted(known, np.arange(grid.size), side="right") - 1)]
    return found


def _told(grid: Grid) -> list[float | None]:
    return [None if math.isnan(value) else value for value in grid.tolist()]
