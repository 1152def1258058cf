"""The application-level Ray Serve autoscaling policy: thin over ``autoscaling/fleet.py``.

Serve's own request counts are blind here, because requests do not go through Serve handles; ingresses and replicas report what they
have seen through ``record_autoscaling_stats``, about every second. Serve builds the class in its controller and calls it every 0.1 s.
It must never raise and never wait: an exception there ends the controller's update of all applications for that tick. What it
remembers is in the policy state that it returns; a new controller begins anew, with the targets that there are.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.autoscaling.decision import Decision, Observation
from serve_app.autoscaling.decision_log import DecisionLog, log_path
from serve_app.autoscaling.fleet import INGRESSES, FleetObservation, FleetScaler, IngressObservation
from serve_app.autoscaling.series import Gauges
from serve_app.autoscaling.signals import INCREMENTS, REPLICA_INCREMENTS, STALE_S, Load, Meter
from serve_app.config import ModelSettings, Settings, parse_settings
from serve_app.config.schedule import bounds_at
from serve_app.core.step_costs import MeasuredCosts, combined
from serve_app.decision_notes import DecisionNotes, board_of
from serve_app.deployments import INGRESS, replica_deployment, rules_of, scaled_models
from serve_app.errors import ConfigError
from serve_app.membership import ScalingNote

logger = logging.getLogger("ray.serve")  # this runs in Serve's controller: its log is where people look

OBSERVE_S = 1.0
Reports = dict[str, tuple[float, dict[str, float]]]


@dataclass
class Memory:
    """What is remembered between two ticks."""

    scaler: FleetScaler
    observed_at: float
    ingresses: Meter = field(default_factory=Meter)
    replicas: dict[str, Meter] = field(default_factory=dict)
    targets: dict[str, int] = field(default_factory=dict)
    decided: dict[str, Decision] = field(default_factory=dict)
    present: dict[str, set[str]] = field(default_factory=dict)
    """Deployment -> its members at the last look."""
    warned: set[str] = field(default_factory=set)
    """Models of which was said that their ITL limit cannot be kept."""
    left_at: dict[str, float] = field(default_factory=dict)
    """Deployment -> when a member was last seen to go: it drains, and reports no more."""

    def leave_to_others(self, targets: Mapping[str, int]) -> None:
        """Forget decisions that somebody else has changed since, as `serve-app models unload` does; the next tick would undo it."""
        self.targets = {name: target for name, target in self.targets.items() if targets.get(name, target) == target}

    def note_departures(self, contexts: Mapping[str, Any], at: float) -> None:
        """Remember when a deployment last lost a member."""
        for name, context in contexts.items():
            present = set(members(context))
            if self.present.get(name, set()) - present:
                self.left_at[name] = at
            self.present[name] = present

    def left_within(self, deployment: str, span_s: float, at: float) -> bool:
        """Return whether a member of the deployment has gone in the last ``span_s`` seconds."""
        return at - self.left_at.get(deployment, -math.inf) < span_s


class DemandPolicy:
    """Replicas by demand over measured capacity per model, ingresses by streams and CPU.

    Args:
        settings: The configuration, as ``build`` gets it. Of a wrong one nothing is scaled; ``build`` is what refuses it.
        now: Seconds of a monotonic clock.
        wall: Seconds since the epoch, for the schedule and the log.
        tell: Gets a note of each change of a target, and must not wait. None: the lease board is told, by a thread.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        tell: Callable[[ScalingNote], None] | None = None,
    ) -> None:
        self._settings: Settings | None = None
        self._wall = wall
        self._log: DecisionLog | None = None
        self._tell = tell
        self._gauges: Gauges | None = None
        try:
            self._settings = parse_settings(settings)
        except ConfigError as exc:
            logger.error("autoscaling policy without effect: %s", exc)
        self._now = now

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, Any]]:
        ingress = next((d for d in contexts if d.name == INGRESS), None)
        if self._settings is None or ingress is None:
            return {}, {}
        at = self._now()
        memory = contexts[ingress].policy_state.get("memory") or Memory(FleetScaler(rules_of(self._settings)), at)
        try:
            memory.leave_to_others({d.name: context.target_num_replicas for d, context in contexts.items()})
            if at - memory.observed_at >= OBSERVE_S:
                self._observe({d.name: context for d, context in contexts.items()}, memory, at)
            targets = {d: memory.targets[d.name] for d in contexts if d.name in memory.targets}
        except Exception:
            logger.exception("autoscaling policy failed; every deployment keeps its target")
            targets = {}
        return targets, {ingress: {"memory": memory}}

    def _observe(self, contexts: Mapping[str, Any], memory: Memory, at: float) -> None:
        assert self._settings is not None
        before, memory.targets = memory.targets, {}  # a deployment left out keeps its target
        interval_s, memory.observed_at = at - memory.observed_at, at  # before all that may fail: else each tick would fail again
        seen = self._seen(contexts, memory, at, interval_s)
        names = {m.name: replica_deployment(m) for m in self._settings.models.values()} | {INGRESSES: INGRESS}
        self._log = self._log or _open_log(self._settings.name)
        self._tell = self._tell or DecisionNotes(board_of(self._settings.name)).tell
        memory.decided = self._log.observe(memory.scaler, seen, time=self._wall())
        self._gauges = self._gauges or Gauges(self._settings.name)
        self._gauges.tell(seen, memory.decided)
        for name, decision in memory.decided.items():
            deployment = names[name]
            target, memory.targets[deployment] = contexts[deployment].target_num_replicas, decision.desired
            if decision.desired not in (target, before.get(deployment)):
                logger.info("%s: %d -> %d replicas (%s): %s", name, target, decision.desired, decision.rule, decision.inputs)
                self._tell(ScalingNote(self._wall(), name, target, decision.desired, decision.rule))
        self._warn(memory)

    def _seen(self, contexts: Mapping[str, Any], memory: Memory, at: float, interval_s: float) -> FleetObservation:
        assert self._settings is not None
        reports = newest_reports(contexts[INGRESS])
        increments = memory.ingresses.take(reports, now=at)
        silent = memory.ingresses.silent(members(contexts[INGRESS]), now=at)
        silent_share = len(silent) / max(1, len(members(contexts[INGRESS])))
        memory.note_departures(contexts, at)
        ingress_drains = memory.left_within(INGRESS, self._settings.timeouts.drain_s, at)  # nobody tells of its streams
        models = {}
        for model in scaled_models(self._settings):
            if (context := contexts.get(replica_deployment(model))) is not None:
                meter = memory.replicas.setdefault(model.name, Meter())
                of_replicas = load_of_replicas(context, meter, now=at)
                replica_drains = _total(reports, f"draining/{model.name}") > 0
                has_just_left = memory.left_within(replica_deployment(model), STALE_S, at)  # ingresses may not have told yet
                mute = meter.silent(members(context), now=at)
                load = Load(
                    interval_s=interval_s,
                    silent=silent + mute,
                    silent_share=max(silent_share, len(mute) / max(1, len(members(context)))),
                    is_partial=ingress_drains or replica_drains or has_just_left,
                    **load_at_ingresses(model, reports, increments),
                    **of_replicas,
                )
                models[model.name] = self._model(model, context, load, memory.scaler.cold_start_s(model.name))
        ingress = self._ingress(contexts[INGRESS], reports, increments, interval_s, silent)
        return FleetObservation(at=at, models=models, ingress=ingress)

    def _warn(self, memory: Memory) -> None:
        """Say once of each model what no number of replicas can keep, now that it is measured."""
        assert self._settings is not None
        for model in self._settings.models.values():
            decision, itl_slo_s = memory.decided.get(model.name), model.replicas.itl_slo_s
            inputs = decision.inputs if decision is not None else {}
            if inputs.get("itl_batch", 1.0) < 1 and model.name not in memory.warned:
                memory.warned.add(model.name)
                step_s = inputs["step_s"] + inputs["work_per_request_s"] / max(1.0, inputs["output_tokens"])
                text = f"{model.name}: a step takes {step_s:.3f} s even for few requests and replicas.itl_slo_s is {itl_slo_s:g}"
                logger.warning("%s: no number of replicas keeps it, and only the other limits count", text)

    def _model(self, model: ModelSettings, context: Any, load: Load, cold_start_s: float) -> Observation:
        replicas = model.replicas
        bounds = replicas.min, replicas.max
        minimum, maximum = bounds_at(replicas.schedule, bounds, time=self._wall(), cold_start_s=cold_start_s)
        if (
            operated := context.config
        ) is not None and operated.min_replicas != replicas.min:  # `serve-app models` has changed it
            minimum = max(minimum, operated.min_replicas) if operated.min_replicas else 0
        running, target = len(members(context)), context.target_num_replicas
        return Observation(running=running, target=target, minimum=minimum, maximum=maximum, load=load)

    def _ingress(
        self, context: Any, reports: Reports, increments: Mapping[str, float], interval_s: float, silent: tuple[str, ...]
    ) -> IngressObservation | None:
        assert self._settings is not None
        bounds = self._settings.ingress.replicas
        if not bounds.is_scaled:
            return None
        return IngressObservation(
            running=len(members(context)),
            target=context.target_num_replicas,
            minimum=bounds.min,
            maximum=bounds.max,
            streams=_total(reports, "streams"),
            cpu_s=increments.get("cpu_s", 0.0),
            interval_s=interval_s,
            silent=silent,
        )


def _open_log(name: str) -> DecisionLog:
    try:
        return DecisionLog(log_path(name))
    except Exception:  # of another version of Ray, or of the disk: scaling goes on
        logger.exception("decisions of the autoscaler are not logged")
        return DecisionLog(None)


def members(context: Any) -> list[str]:
    """Return the ids of the deployment's running replicas."""
    return [_id(replica) for replica in context.running_replicas]


def newest_reports(context: Any) -> Reports:
    """Return replica id -> time stamp and values of its newest report; only of running replicas, as Serve has it."""
    reports: Reports = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                _, values = reports.setdefault(_id(replica), (series[-1].timestamp, {}))
                if math.isfinite(value := float(series[-1].value)):
                    values[name] = value
    return reports


def load_at_ingresses(model: ModelSettings, reports: Reports, increments: Mapping[str, float]) -> dict[str, Any]:
    """Return the part of a `Load` that the ingresses know."""
    counted = {name: increments.get(f"{name}/{model.name}", 0.0) for name in INCREMENTS}
    return {**counted, "waiting": _total(reports, f"waiting/{model.name}")}


def load_of_replicas(context: Any, meter: Meter, *, now: float) -> dict[str, Any]:
    """Return the part of a `Load` that the replicas know."""
    reports = newest_reports(context)
    increments = meter.take(reports, now=now)
    measured = [found for _, values in reports.values() if (found := MeasuredCosts.from_report(values)) is not None]
    return {
        "measured": combined(measured),
        **{name: increments.get(name, 0.0) for name in REPLICA_INCREMENTS},
        "queued": _total(reports, "waiting"),
        "running": _total(reports, "running"),
        "max_num_seqs": min((values["max_num_seqs"] for _, values in reports.values() if "max_num_seqs" in values), default=None),
        "kv_usage": _total(reports, "kv_usage") / max(1, len(reports)),
        "cold_start_s": tuple(values["cold_start_s"] for _, values in reports.values() if "cold_start_s" in values),
    }


def _total(reports: Reports, name: str) -> float:
    return sum(values.get(name, 0.0) for _, values in reports.values())


def _id(replica: Any) -> str:
    return str(getattr(replica, "unique_id", replica))
