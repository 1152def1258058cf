"""This module keeps replicas as long as the need for them is remembered. Pure.

Each second states the fewest replicas that are needed, and the largest such number within a time span is kept (`Needs.kept`). Two
corrections are part of the demand for `MISSING_S`: replicas that had to be added although the measured demand did not ask for them, and
replicas that were removed and then asked for again (`Needs.corrected`). While members are silent, the replicas that they may need stay
(`Unproven`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serve_app.autoscaling.history import Recent
from serve_app.autoscaling.signals import ModelLoad

MIN_KEEP_S, MAX_KEEP_S = 60.0, 900.0
MISSING_S = 900.0
LONGEST_STEP_S = 6.0
"""Of a pause between two observations at most this much counts as observed time."""


def keep_s(cold_start_s: float) -> float:
    """Return how long a need is remembered: two cold starts, because a replica that goes too soon is missing for one."""
    return min(MAX_KEEP_S, max(MIN_KEEP_S, 2 * cold_start_s))


def positive(asked: Mapping[str, int]) -> dict[str, int]:
    """Return the wishes for at least one replica."""
    return {name: wish for name, wish in asked.items() if wish}


@dataclass(slots=True)
class Unproven:
    """Counts the replicas of a model that stay because members are silent: no report proves that these replicas are not needed."""

    replicas: int = 0
    _base: int = 0
    """The largest target since ingresses have been silent; 0 while none is silent."""

    def observe(self, load: ModelLoad, *, running: int, target: int) -> None:
        """Take in which members are silent now.

        A silent replica stays. The requests of a silent ingress are unknown, so its share of the replicas stays: while 1 of 4 ingresses
        is silent, 3 of 12 replicas, also when only these 3 are left.
        """
        self._base = max(self._base, target) if load.silent_ingress_share else 0
        by_ingresses = math.ceil(load.silent_ingress_share * self._base - 1e-9)
        # At most the target: replicas that an operator removes, as by `serve-app models unload`, are not brought back.
        self.replicas = min(target, max(by_ingresses, round(load.silent_replica_share * running)))


@dataclass(slots=True)
class Needs:
    """The needs of one model within the last minutes."""

    _observed_s: float = 0.0
    _needed: Recent = field(default_factory=Recent)
    _missing: Recent = field(default_factory=Recent)
    _regretted: Recent = field(default_factory=Recent)
    """Replicas that were removed and asked for again."""
    _target: int = 0
    _fell: int = 0
    """By how many replicas the target fell last."""
    _fell_at_s: float | None = None
    """When the target fell last, in observed seconds; None before. Not infinity, because the log is JSON."""

    def pass_time(self, interval_s: float) -> None:
        """Let time pass, in seconds since the observation before."""
        self._observed_s += min(interval_s, LONGEST_STEP_S)

    def corrected(self, demand: int, *, asked: int, wished: int, target: int) -> int:
        """Return the demand plus the corrections learnt in the last `MISSING_S`: replicas that a guard added, and regretted removals.

        Without the first correction, replicas that a guard added would be removed as soon as the guard falls silent, and the guard would
        fire again. Without the second, a constant load that needs almost exactly a whole number of replicas would remove one and ask for
        it again, each time that chance moves the measured demand across the edge. The correction is at most the demand itself.

        Args:
            demand: Replicas that the measured demand needs.
            asked: Replicas that a guard asks for now, 0 without one.
            wished: The largest wish of now.
            target: Present replicas. If they are more than demand and correction, the guard has another reason.
        """
        missing = self._missing.add(self._observed_s, 0, MISSING_S, first=0)
        if asked > demand and target <= demand + missing:
            missing = self._missing.add(self._observed_s, asked - demand, MISSING_S, first=0)
        return demand + min(max(missing, self._regret(wished, target)), demand)

    def _regret(self, wished: int, target: int) -> int:
        """Return how many replicas were removed and, within `MISSING_S`, asked for again; remembered for `MISSING_S`.

        Each wish for at least the present number of replicas proves that the returned ones are needed, and the time begins anew.
        """
        if target < self._target:
            self._fell, self._fell_at_s = self._target - target, self._observed_s
        self._target = target
        regretted = self._regretted.add(self._observed_s, 0, MISSING_S, first=0)
        if wished > target and self._fell_at_s is not None and self._observed_s - self._fell_at_s < MISSING_S:
            regretted = max(regretted, min(wished - target, self._fell))
        if wished >= target and regretted:
            self._regretted.add(self._observed_s, regretted, MISSING_S, first=0)
        return regretted

    def kept(self, needs: Iterable[int], span_s: float, *, target: int) -> int:
        """State the present needs; return the largest need of the last ``span_s``. Before the first call it was ``target``."""
        return self._needed.add(self._observed_s, max(needs), span_s, first=target)
