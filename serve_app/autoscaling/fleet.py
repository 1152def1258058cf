"""`FleetScaler` scales one application as a whole: its models, which share GPUs, and its ingresses. Pure.

``serve_app/autoscaling/policy.py`` and the simulator both run it; the same observations give the same decisions.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from serve_app.autoscaling.asleep import Sleepers
from serve_app.autoscaling.capacity import StepCosts
from serve_app.autoscaling.decision import Decision, Observation, ScalingRules
from serve_app.autoscaling.history import Recent
from serve_app.autoscaling.model_autoscaler import ModelAutoscaler
from serve_app.autoscaling.needs import LONGEST_STEP_S
from serve_app.autoscaling.orders import DEFAULT_COLD_START_S
from serve_app.autoscaling.turns import Turns

TARGET_CPU = 0.7
"""Cores per ingress: one process streams on one core, and above this share its tokens queue."""
CPU_WINDOW_S = 10.0
INGRESS_KEEP_S = 120.0
INGRESSES = "(ingresses)"
"""The key of the ingresses among the decisions; no model can have this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """The configuration of an application's scaling. Keys are names of models."""

    models: Mapping[str, ScalingRules]
    target_streams: int = 400
    """Open streams per ingress."""
    max_gpus: float | None = None
    """The most GPUs that the models of ``models`` may hold together; None for any number."""
    max_asleep_gib: float | None = None
    """The most host memory of all sleeping engines together; None for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressObservation:
    """The ingresses at one moment: their number, and the sums over all of them."""

    running: int
    target: int
    minimum: int
    maximum: int
    streams: float
    cpu_s: float
    """CPU seconds used in the last ``interval_s``."""
    interval_s: float
    silent: tuple[str, ...] = ()
    """Ingresses that should report and do not. Their streams are taken from their last report, and their CPU seconds to continue at their
    last rate. At least as many ingresses stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObservation:
    """All that is scaled, at one moment."""

    at: float
    models: Mapping[str, Observation]
    ingress: IngressObservation | None = None


@dataclass(slots=True)
class FleetScaler:
    """Decides for all models and the ingresses. ``observe`` is its one door, called about every second. Its fields are all it remembers."""

    rules: FleetRules
    _models: dict[str, ModelAutoscaler] = field(default_factory=dict)
    _cpu: deque[tuple[float, float]] = field(default_factory=deque)
    _ingresses: Recent = field(default_factory=Recent)
    _ingresses_observed_s: float = 0.0
    """How long ingresses have been observed; a pause counts `LONGEST_STEP_S` at most."""
    _turns: Turns = field(default_factory=Turns)
    _sleepers: Sleepers = field(default_factory=Sleepers)

    def obey(self, rules: FleetRules) -> None:
        """Continue under other rules with all that was measured."""
        self.rules = rules
        self._models = {name: model for name, model in self._models.items() if name in rules.models}
        for name, model in self._models.items():
            model.rules = rules.models[name]

    def pass_unseen(self, span_s: float, *, only: Set[str]) -> None:
        """Take in that no controller ran for ``span_s`` seconds, and forget all models but ``only`` these."""
        self._models = {name: model for name, model in self._models.items() if name in only}
        for model in self._models.values():
            model.pass_unseen(span_s)

    def cold_start_s(self, model: str) -> float:
        """Return the model's cold start that was measured last, else `DEFAULT_COLD_START_S`."""
        known = self._models.get(model)
        return DEFAULT_COLD_START_S if known is None else known.cold_start_s

    def step_costs(self, model: str) -> StepCosts:
        """Return the fitted costs of a model's steps."""
        known = self._models.get(model)
        return StepCosts() if known is None else known.step_costs

    def observe(self, seen: FleetObservation) -> dict[str, Decision]:
        """Take in one observation and decide; models without an observation keep what they have."""
        wanted = {}
        for name, model in seen.models.items():
            scaler = self._models.setdefault(name, ModelAutoscaler(self.rules.models[name]))
            wanted[name] = scaler.observe(model, at=seen.at)
        decided = self._shared(seen, wanted | self._staying(seen, wanted))
        if seen.ingress is not None:
            decided[INGRESSES] = self._observe_ingress(seen.ingress)
        return decided

    def _staying(self, seen: FleetObservation, wanted: Mapping[str, Decision]) -> dict[str, Decision]:
        """Return the decisions of models whose last replica is idle and stays, because its engine sleeps or will."""
        sleep = {name: model for name, model in seen.models.items() if self.rules.models[name].sleeps}
        starts = {name: self.cold_start_s(name) for name in sleep}
        staying = self._sleepers.staying(sleep, starts, max_asleep_gib=self.rules.max_asleep_gib, at=seen.at)
        return {name: replace(wanted[name], desired=1, wish=rule) for name, rule in staying.items() if not wanted[name].desired}

    def _shared(self, seen: FleetObservation, wanted: Mapping[str, Decision]) -> dict[str, Decision]:
        """Return the decisions that all models together can have within the GPUs."""
        self._turns.observe(seen.models, {name: self.cold_start_s(name) for name in seen.models}, at=seen.at)
        wants = [
            Want(
                model=name,
                desired=max(decision.desired, decision.kept),
                # The minimum, and the replicas that silent members may need, are granted before others share.
                minimum=max(seen.models[name].minimum, min(self._models[name].unproven, decision.desired)),
                target=seen.models[name].target,
                gpus_per_replica=self.rules.models[name].gpus_per_replica,
                priority=self.rules.models[name].priority,
                turn=self._turns.order(name),
            )
            for name, decision in wanted.items()
        ]
        granted = share_gpus(wants, self.rules.max_gpus)
        return {name: _limited(decision, granted[name], seen.models[name].target) for name, decision in wanted.items()}

    def _observe_ingress(self, seen: IngressObservation) -> Decision:
        self._cpu.append((seen.cpu_s, seen.interval_s))
        while sum(interval for _, interval in self._cpu) > CPU_WINDOW_S + seen.interval_s:
            self._cpu.popleft()
        elapsed = sum(interval for _, interval in self._cpu)
        cores = sum(cpu for cpu, _ in self._cpu) / elapsed if elapsed else 0.0
        wishes = {"streams": math.ceil(seen.streams / self.rules.target_streams), "cpu": math.ceil(cores / TARGET_CPU)}
        wish = max(wishes, key=wishes.__getitem__)
        self._ingresses_observed_s += min(seen.interval_s, LONGEST_STEP_S)
        kept = self._ingresses.add(self._ingresses_observed_s, wishes[wish], INGRESS_KEEP_S, first=seen.target)
        desired, silent = wishes[wish], min(len(seen.silent), seen.target)
        if desired <= seen.target:
            desired, wish = (kept, "low for long") if kept < seen.target else (seen.target, "keep")
            if desired < silent:
                desired, wish = silent, "silent members"
        return Decision(
            desired=max(seen.minimum, min(seen.maximum, desired)),
            wish=wish,
            alternatives=wishes,
            inputs={"streams": seen.streams, "cpu_cores": round(cores, 3)},
        )


def _limited(decision: Decision, granted: int, target: int) -> Decision:
    """Return the decision of a model that has ``target`` replicas and gets GPUs for ``granted``."""
    if granted >= decision.desired:
        return decision
    return replace(
        decision,
        desired=granted,
        wish="another model's turn" if target and not granted else "GPUs are short",
        alternatives={**decision.alternatives, decision.wish: decision.desired},
        ready_at=decision.ready_at if granted > target else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One model's claim on the GPUs that all models share."""

    model: str
    desired: int
    minimum: int
    target: int
    """Replicas that the model has or has asked for."""
    gpus_per_replica: float
    priority: int = 0
    turn: tuple[int, float] = (0, 0.0)
    """The model's place among those that want a first replica (`Turns.order`)."""


def share_gpus(wants: Sequence[Want], max_gpus: float | None) -> dict[str, int]:
    """Return model -> replicas, such that all together hold at most ``max_gpus``.

    If models of equal priority differ from their shares by one replica each, they keep what they have.
    """
    granted = fair_shares(wants, max_gpus)
    differing = [w for w in wants if w.gpus_per_replica and granted[w.model] != w.target]
    moved = sum((granted[w.model] - w.target) * w.gpus_per_replica for w in differing)
    are_equals = len({w.priority for w in differing}) == 1
    near = all(
        abs(granted[w.model] - w.target) == 1 and max(1, min(w.desired, w.minimum)) <= w.target <= w.desired for w in differing
    )
    return granted | {w.model: w.target for w in differing} if are_equals and near and not moved else granted


def fair_shares(wants: Sequence[Want], max_gpus: float | None) -> dict[str, int]:
    """Return model -> replicas by the models' claims on the GPUs.

    The minimum of every model comes first, then higher priorities. Among models of equal priority, one replica at a time goes to the model
    with the smallest share of its wish, and first replicas go by turns (`turns.py`). Models without GPUs get their wish.
    """
    if max_gpus is None:
        return {w.model: w.desired for w in wants}
    granted = {w.model: 0 if w.gpus_per_replica else w.desired for w in wants}
    for limits in ({w.model: min(w.desired, w.minimum) for w in wants}, {w.model: w.desired for w in wants}):
        left = max_gpus - sum(granted[w.model] * w.gpus_per_replica for w in wants)
        hungry = [w for w in wants if granted[w.model] < limits[w.model]]
        while hungry:
            want = min(hungry, key=lambda w: (-w.priority, granted[w.model] / w.desired, w.turn, w.model))
            if want.gpus_per_replica <= left + 1e-9:
                granted[want.model] += 1
                left -= want.gpus_per_replica
            else:
                hungry.remove(want)
            hungry = [w for w in hungry if granted[w.model] < limits[w.model]]
    return granted
