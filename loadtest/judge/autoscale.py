"""This module shows, per second, how the target followed its load: replicas desired, replicas ready, what users felt. Pure.

Laws that change slowly have steps as well: each rise from a trough to the crest, and each fall, is one that lasts. Its times count from
where the rate begins to change; how far the rate had come when the target reacted, and when its users first felt it, stand beside them.
What a rise leads to is looked for until the next rise begins, also while the rate falls again; requests are counted to the step that
they were due in.

Where the rate has no steps, the times at which classes of requests begin or end are steps, since other requests can be more work. Whether
more or fewer replicas answer such a step is not known before, so the first change of desired says it.

Everything lies on a grid of 1 s; second ``t`` holds the last sample in [t, t+1), or the one before. What is desired and ready are
Ray Serve's replicas (of the deployments whose target changed, or of all if none did), else Kubernetes pods. In the timeline and in
replica-seconds a sample holds for `loadtest.judge.cost.MAX_HOLE_S` at most: after that nobody knows how many replicas there were.
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
"""The SLO is recovered when it is kept over the next so many seconds, and over all the rest of the step."""
_GAUGES = ("pods_ready", "pods_pending", "pods_starting", "running", "waiting", "kv_usage")


class LoadStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """The offered rate goes from one value to another, beginning at ``at_s``."""

    at_s: float
    from_rate: float
    to_rate: float
    lasts_s: float = 0.0
    """0: at once."""
    shape: Literal["straight", "sine"] = "straight"
    classes: str = ""
    """Names of the classes of requests that are drawn from then on, where these change and the rate stays."""

    @property
    def rises(self) -> bool:
        return self.to_rate > self.from_rate

    def rate_at(self, t_s: float) -> float:
        """Return the law's rate, after the change the new one."""
        done = min(1.0, max(0.0, (t_s - self.at_s) / self.lasts_s)) if self.lasts_s else 1.0
        if self.shape == "sine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.from_rate + done * (self.to_rate - self.from_rate)


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of the load, until the next one. Times in seconds; None: it did not happen, or nobody told the replicas.

    A step is where the rate begins to change.
    """

    step: LoadStep
    until_s: float
    detection_s: float | None
    """From the step to the first change of desired in its direction, of other requests in any direction."""
    detection_rate: float | None
    """Offered requests/s by the law at that time; of a jump the new rate."""
    placed_s: float | None
    """From there until more (or fewer) pods run; only Kubernetes tells."""
    provisioning_s: float | None
    """From the first change of desired until so many are ready."""
    settled_s: float | None
    """From the step until as many are ready as were desired at most (at least, for a step down)."""
    outside_from_s: float | None
    """From the step until the SLO was not kept over the last `CALM_S` (or since the step): the outage begins. None: it always was."""
    recovery_s: float | None
    """From the step until the SLO is kept again, over the rest of the step; if not within it, until it is kept for `CALM_S`. 0: it
    always was."""
    num_requests: int
    num_violating: int
    """Outside some limit of the SLO, failed ones included; without an SLO the failed ones."""
    num_lost: int
    """Sent, and neither answered nor rejected with 429 or 503."""
    num_oscillations: int
    """Times desired turned round."""
    replica_s: float | None
    """Of the seconds in which somebody told how many were ready; None: nobody did in any."""
    over_provisioned_replica_s: float | None
    """Ready beyond desired, in those seconds."""


class Autoscaling(msgspec.Struct, frozen=True):
    """``steps`` begins with the time before the first step, if there is any, as a step from and to the same rate."""

    deployments: list[str]
    steps: list[StepResult]
    timeline: dict[str, list[float | None]]
    """Columns: t_s; offered, violating and lost by due time, completed; desired, ready and gauges where the target told them.

    None: the target did not tell them at that time.
    """


def load_steps(arrival: Arrival, duration_s: float) -> list[LoadStep]:
    """Return the changes of the rate, in order; of laws that have none, nothing."""
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
    # What jumps at 0 was never otherwise.
    return [s for s in steps if s.at_s < duration_s and s.from_rate != s.to_rate and (s.at_s > 0 or s.lasts_s)]


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
    """What users felt, counted per second of their due times."""

    def __init__(self, rows: Sequence[Row], scenario: Scenario, value_s: ValueOf, *, size: int) -> None:
        self.size = size
        # Later turns of conversations that the end of the run left out were no load.
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
        """Return the first second from which on the SLO is kept until ``end``, `CALM_S` before it at the latest.

        Otherwise the first one later, and before ``watched``, from which on it is kept for `CALM_S`.
        """
        last = 1 + int(np.flatnonzero(self._offered).max(initial=-1))  # nobody is hurt when nobody comes
        for second in range(begin, min(watched, last) - CALM_S + 1):
            inside = second <= end - CALM_S
            if self._kept(second, second + CALM_S) and (not inside or self._kept(second, min(end, last))):
                return second
        return None

    def outside(self, begin: int, end: int) -> int | None:
        """Return the first second at whose end the SLO was not kept over the last `CALM_S`, of those since ``begin``."""
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
    """Return those whose target changed; all of them if none did."""
    seen: dict[str, set[float]] = {}
    for sample in samples:
        for name, value in sample.values.items():
            if name.startswith("replicas_desired/"):
                seen.setdefault(name.partition("/")[2], set()).add(value)
    return sorted(name for name in seen if len(seen[name]) > 1) or sorted(seen)


def _grid(samples: Sequence[ServerSample], names: Sequence[str], size: int) -> Grid | None:
    """Return the sum of the named values in each second, NaN where none was told for `MAX_HOLE_S`; None if no sample has any.

    Before the first sample it is that one's, for as long.
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
    """Return the grid with the last known value, or the first one, where none is known."""
    return grid[_last_known(grid)]


def _last_known(grid: Grid) -> NDArray[np.int64]:
    """Return for each second the one of its last known value; before the first known value, that one's."""
    known = np.flatnonzero(~np.isnan(grid))
    found: NDArray[np.int64] = known[np.maximum(0, np.searchsorted(known, np.arange(grid.size), side="right") - 1)]
    return found


def _told(grid: Grid) -> list[float | None]:
    return [None if math.isnan(value) else value for value in grid.tolist()]
