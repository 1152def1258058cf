"""This module keeps replicas as long as the need for them is remembered. Pure.

Each second states the fewest replicas that are needed, and the largest such number within a time span is kept (`Needs.kept`). Two
corrections are part of the demand for `MISSING_S`: replicas that had to be added although the measured demand did not ask for them, and
replicas that were removed and then asked for again (`Needs.corrected`). While members are silent, the replicas that they may need stay
(`Unproven`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.autoscaling.history import Recent
from serve_app.autoscaling.signals import ModelLoad

MIN_KEEP_S, MAX_KEEP_S = 60.0, 900.0
MISSING_S = 900.0
LONGEST_STEP_S = 6.0
"""Time counts while it is observed: of a longer pause between two observations only so much."""


def keep_s(cold_start_s: float) -> float:
    """Return for how long a need is remembered: two cold starts, for a replica that goes too soon is missed for one."""
    return min(MAX_KEEP_S, max(MIN_KEEP_S, 2 * cold_start_s))


@dataclass(slots=True)
class Unproven:
    """How many replicas of a model stay because somebody is silent: nobody proves that they are not needed."""

    replicas: int = 0
    _base: int = 0
    """The most replicas that there were since ingresses have been silent; 0 while none is."""

    def observe(self, load: ModelLoad, *, running: int, target: int) -> None:
        """Take in who is silent now.

        A silent replica stays. What requests a silent ingress has nobody knows, so its share stays of the replicas that there were: of 12
        replicas 3 while 1 of 4 ingresses is silent, also when only these 3 are left.
        """
        self._base = max(self._base, target) if load.silent_ingress_share else 0
        by_ingresses = math.ceil(load.silent_ingress_share * self._base - 1e-9)
        # At most the target: what somebody else takes away, as `serve-app models unload` does, is not brought back.
        self.replicas = min(target, max(by_ingresses, round(load.silent_replica_share * running)))


@dataclass(slots=True)
class Needs:
    """What one model needed within the last minutes."""

    _observed_s: float = 0.0
    _needed: Recent = field(default_factory=Recent)
    _missing: Recent = field(default_factory=Recent)
    _regretted: Recent = field(default_factory=Recent)
    """Replicas that went and were asked for again."""
    _target: int = 0
    _fell: int = 0
    """By how many replicas the target fell last."""
    _fell_at_s: float | None = None
    """When that was, in observed seconds; None while it never has. No infinity: the log is JSON."""

    def pass_time(self, interval_s: float) -> None:
        """Let time pass, in seconds since the observation before."""
        self._observed_s += min(interval_s, LONGEST_STEP_S)

    def corrected(self, demand: int, *, asked: int, wished: int, target: int) -> int:
        """Return the replicas for a demand with those that its measure was short of, or that were regretted, in the last `MISSING_S`.

        Without the first correction, replicas that a guard added would go as soon as the guard is silent, and the guard would fire
        again. Without the second, a constant load beside a whole number of replicas would take one away and ask for it again, each time
        that chance moves the measured demand across the edge. At most the demand's replicas are added.

        Args:
            demand: Replicas that the demand needs as measured.
            asked: Replicas that a sign of too little capacity asks for now, 0 without one.
            wished: The most that any rule asks for now.
            target: Replicas that there are. Where they are more than demand and correction, the sign has another reason.
        """
        missing = self._missing.add(self._observed_s, 0, MISSING_S, first=0)
        if asked > demand and target <= demand + missing:
            missing = self._missing.add(self._observed_s, asked - demand, MISSING_S, first=0)
        return demand + min(max(missing, self._regret(wished, target)), demand)

    def _regret(self, wished: int, target: int) -> int:
        """Return how many replicas were asked for again in the last `MISSING_S` within as long after they went.

        While they are there, each wish for as many replicas as there are is a proof that they are needed, and the time begins anew.
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
        """State what is needed now; return the most that was needed in the last ``span_s``. At first the target was."""
        return self._needed.add(self._observed_s, max(needs), span_s, first=target)
