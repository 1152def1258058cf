"""`DemandPolicy` is the application-level autoscaling policy of Ray Serve: a thin adapter over ``autoscaling/fleet.py``.

Serve's own request counts see nothing here, because requests do not go through Serve handles. Instead, ingresses and replicas report
their counters through ``record_autoscaling_stats``, about every second. Serve builds the policy in its controller and calls it every
0.1 s. The policy must never raise and never wait: an exception ends the controller's update of all applications for that tick. Its memory
is in the policy state that it returns, which Serve holds in the controller's process only. So the lease board keeps a copy (`KEEP_S`),
from which a new controller continues.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.decision_log import DecisionLog, log_path
from serve_app.autoscaling.decision_notes import DecisionNotes, board_memory_store, board_of
from serve_app.autoscaling.fleet import INGRESSES, FleetObservation, FleetScaler, IngressObservation
from serve_app.autoscaling.memory import Memory, MemoryStore, id_of, members, pack, unpack
from serve_app.autoscaling.pools import OrderedShare
from serve_app.autoscaling.rules import INGRESS, replica_deployment, rules_of, scaled_models
from serve_app.autoscaling.series import Gauges
from serve_app.autoscaling.signals import INCREMENTS, REPLICA_INCREMENTS, STALE_S, Asleep, Meter, ModelLoad
from serve_app.config import ModelSettings, Settings, parse_settings
from serve_app.config.schedule import bounds_at
from serve_app.core.step_costs import MeasuredCosts, combined
from serve_app.errors import ConfigError
from serve_app.membership import PoolNote, ScalingNote

logger = logging.getLogger("ray.serve")  # this runs in Serve's controller, in whose log operators look

OBSERVE_S = 1.0
KEEP_S = 5.0
"""Seconds between two copies of the memory to the lease board, and between two notes of pools: a board that starts again knows none."""
FOUND_S = 60.0
"""The longest time that a new controller waits until Serve has found an ingress: without one, it cannot observe the load."""
Reports = dict[str, tuple[float, dict[str, float]]]


class DemandPolicy:
    """Replicas by demand over measured capacity per model, ingresses by streams and CPU.

    Args:
        settings: The configuration, as ``build`` gets it. With a wrong one nothing is scaled; ``build`` refuses it.
        now: Seconds of a monotonic clock.
        wall: Seconds since the epoch, for the schedule and the log.
        send_note: Gets a note of each change of a target, and must not wait. None: a thread sends the notes to the lease board.
        store: Keeps the memory for the next controller. None: the lease board keeps it, through a thread.
        send_pools: Gets the share of a model's pool for prompts, and must not wait. None: as ``send_note``.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        send_note: Callable[[ScalingNote], None] | None = None,
        store: MemoryStore | None = None,
        send_pools: Callable[[PoolNote], None] | None = None,
    ) -> None:
        self._settings: Settings | None = None
        self._wall = wall
        self._log: DecisionLog | None = None
        self._send_note, self._send_pools = send_note, send_pools
        self._gauges: Gauges | None = None
        try:
            self._settings = parse_settings(settings)
        except ConfigError as exc:
            logger.error("autoscaling policy without effect: %s", exc)
        self._now = now
        self._store = store
        self._kept_at = self._planned_at = -math.inf
        self._began_at = self._awaits_until = -math.inf

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, Any]]:
        ingress = next((d for d in contexts if d.name == INGRESS), None)
        if self._settings is None or ingress is None:
            return {}, {}
        memory: Memory | None = None
        try:
            memory = contexts[ingress].policy_state.get("memory") or self._begin(self._settings)
            if memory is None:
                return {}, {}
            at = self._now() + memory.clock_s
            by_name = {d.name: context for d, context in contexts.items()}
            memory.leave_to_others({name: context.target_num_replicas for name, context in by_name.items()})
            if at - memory.observed_at >= OBSERVE_S and not self._awaits_members(by_name, memory):
                self._observe(by_name, memory, at)
                self._keep(memory, at)
            targets = {d: memory.targets[d.name] for d in contexts if d.name in memory.targets}
        except Exception:
            logger.exception("autoscaling policy failed; every deployment keeps its target")
            targets = {}
        return targets, {ingress: {"memory": memory}} if memory is not None else {}

    def _begin(self, settings: Settings) -> Memory | None:
        """Return the memory of the controller before, or a new one; None while the store has not answered yet."""
        self._store = self._store or board_memory_store(settings.name)
        if (data := b"" if self._store is None else self._store.kept()) is None:
            return None
        digests = {model.name: _digest(model) for model in settings.models.values()}
        rules, clock_s = rules_of(settings), self._now()
        memory = unpack(data, time=self._wall(), models=digests, clock_s=clock_s) if data else None
        if memory is None:
            # A memory that was kept but cannot be read: the application has been deployed before, so its models are not new.
            return Memory(FleetScaler(rules), clock_s, models=digests, new=set() if data else set(digests))
        memory.scaler.obey(rules)
        self._began_at, self._awaits_until = clock_s, clock_s + STALE_S
        return memory

    def _awaits_members(self, contexts: Mapping[str, Any], memory: Memory) -> bool:
        """Return whether a member that the controller before knew has not reported to this one yet.

        Serve calls the policy of a new controller before it has found the running replicas, and before they report. An observation at
        that time would take all of them for gone, and forget the counters that show the load of the meantime. A member that died with
        the controller never reports. So the wait ends after `STALE_S`, counted from when Serve has found an ingress, or after `FOUND_S`.
        """
        if self._now() >= self._awaits_until:
            return False
        if memory.present.get(INGRESS) and not members(contexts[INGRESS]) and self._now() < self._began_at + FOUND_S:
            self._awaits_until = self._now() + STALE_S
            return True
        if any(memory.present.get(name, set()) - newest_reports(context).keys() for name, context in contexts.items()):
            return True
        self._awaits_until = -math.inf
        return False

    def _keep(self, memory: Memory, at: float) -> None:
        if at - self._kept_at >= KEEP_S and self._store is not None:
            self._kept_at = at
            if (data := pack(memory, time=self._wall())) is not None:
                self._store.keep(data)

    def _observe(self, contexts: Mapping[str, Any], memory: Memory, at: float) -> None:
        assert self._settings is not None
        before, memory.targets = memory.targets, {}  # a deployment left out keeps its target
        interval_s, memory.observed_at = (
            at - memory.observed_at,
            at,
        )  # before any step that may fail, or every tick would fail again
        seen = self._seen(contexts, memory, at, interval_s)
        names = {m.name: replica_deployment(m) for m in self._settings.models.values()} | {INGRESSES: INGRESS}
        self._log = self._log or _open_log(self._settings.name)
        self._send_note = self._send_note or DecisionNotes(board_of(self._settings.name)).send
        memory.decided = self._log.observe(memory.scaler, seen, time=self._wall())
        memory.new -= memory.decided.keys()
        self._gauges = self._gauges or Gauges(self._settings.name)
        self._gauges.show(seen, memory.decided)
        for name, decision in memory.decided.items():
            deployment = names[name]
            target, memory.targets[deployment] = contexts[deployment].target_num_replicas, decision.desired
            if decision.desired not in (target, before.get(deployment)):
                logger.info("%s: %d -> %d replicas (%s): %s", name, target, decision.desired, decision.wish, decision.inputs)
                self._send_note(ScalingNote(self._wall(), name, target, decision.desired, decision.wish))
        self._plan_pools(memory, at)
        self._warn(memory)

    def _plan_pools(self, memory: Memory, at: float) -> None:
        """Say how the replicas of models with pools should divide."""
        assert self._settings is not None
        known = tuple(model.name for model in scaled_models(self._settings) if model.pools is not None)
        ordered = memory.ordered_shares = {name: share for name, share in memory.ordered_shares.items() if name in known}
        before = {name: each.share for name, each in ordered.items()}
        for name, decision in memory.decided.items():
            if name in known and (share := decision.inputs.get("prefill_share")) is not None:
                ordered.setdefault(name, OrderedShare(share)).ask(decision.inputs, decision.desired, at)
        shares = {name: each.share for name, each in ordered.items()}
        if shares and (shares != before or at - self._planned_at >= KEEP_S):
            self._planned_at = at
            self._send_pools = self._send_pools or DecisionNotes(board_of(self._settings.name)).send
            for name, share in shares.items():
                self._send_pools(PoolNote(name, share, known))

    def _seen(self, contexts: Mapping[str, Any], memory: Memory, at: float, interval_s: float) -> FleetObservation:
        assert self._settings is not None
        reports = newest_reports(contexts[INGRESS])
        increments = memory.ingresses.take(reports, now=at)
        silent_ingresses = memory.ingresses.silent(members(contexts[INGRESS]), now=at)
        ingress_share = len(silent_ingresses) / max(1, len(members(contexts[INGRESS])))
        memory.note_departures(contexts, at)
        ingress_drains = memory.left_within(INGRESS, self._settings.timeouts.drain_s, at)  # its streams are not reported
        models = {}
        for model in scaled_models(self._settings):
            if (context := contexts.get(replica_deployment(model))) is not None:
                meter = memory.replicas.setdefault(model.name, Meter())
                of_replicas = load_of_replicas(context, meter, now=at)
                replica_drains = _total(reports, f"draining/{model.name}") > 0
                has_just_left = memory.left_within(replica_deployment(model), STALE_S, at)  # ingresses may not have reported yet
                silent_replicas = meter.silent(members(context), now=at)
                replica_share = len(silent_replicas) / max(1, len(members(context)))
                held, queued = (_total(reports, f"{of}/{model.name}") for of in ("lines_held", "lines_queued"))
                of_replicas["queued"] = max(0.0, of_replicas["queued"] - queued)
                load = ModelLoad(
                    lines_held=held,
                    lines_queued=queued,
                    interval_s=interval_s,
                    silent=silent_ingresses + silent_replicas,
                    silent_ingress_share=ingress_share,
                    assumed_share=memory.ingresses.share_of(
                        silent_ingresses, members(contexts[INGRESS]), f"output_tokens/{model.name}"
                    ),
                    silent_replica_share=replica_share,
                    is_partial=ingress_drains or replica_drains or has_just_left,
                    **load_at_ingresses(model, reports, increments),
                    **of_replicas,
                )
                # Without the lease board, every model counts as new after a restart of the controller; a model with replicas is not.
                is_first = model.name in memory.new and not members(context)
                initial = model.replicas.initial or 0 if is_first else 0
                models[model.name] = self._model(model, context, load, memory.scaler.cold_start_s(model.name), initial)
        ingress = self._ingress(contexts[INGRESS], reports, increments, interval_s, silent_ingresses)
        return FleetObservation(at=at, models=models, ingress=ingress)

    def _warn(self, memory: Memory) -> None:
        """Warn once for each model whose ITL limit no number of replicas can keep, now that its steps are measured."""
        assert self._settings is not None
        for model in self._settings.models.values():
            decision, itl_slo_s = memory.decided.get(model.name), model.replicas.itl_slo_s
            inputs = decision.inputs if decision is not None else {}
            if inputs.get("itl_batch", 1.0) < 1 and model.name not in memory.warned:
                memory.warned.add(model.name)
                step_s = inputs["step_s"] + inputs["work_per_request_s"] / max(1.0, inputs["output_tokens"])
                text = f"{model.name}: a step takes {step_s:.3f} s even for few requests and replicas.itl_slo_s is {itl_slo_s:g}"
                logger.warning("%s: no number of replicas keeps it, and only the other limits count", text)

    def _model(self, model: ModelSettings, context: Any, load: ModelLoad, cold_start_s: float, initial: int) -> Observation:
        replicas = model.replicas
        bounds = replicas.min, replicas.max
        minimum, maximum = bounds_at(replicas.schedule, bounds, time=self._wall(), cold_start_s=cold_start_s)
        operated = context.config
        if operated is not None and operated.min_replicas != replicas.min:
            # An operator has changed the minimum; 0 is an unload, and wins over the schedule.
            minimum = max(minimum, operated.min_replicas) if operated.min_replicas else 0
        running, target = len(members(context)), max(context.target_num_replicas, initial)
        asleep = _asleep(newest_reports(context)) if model.sleep is not None else None
        return Observation(running=running, target=target, minimum=minimum, maximum=maximum, load=load, asleep=asleep)

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


def _asleep(reports: Reports) -> Asleep | None:
    """Return how the model's engine sleeps; None if it does not, or if a replica beside it, as during an update, is awake."""
    found = [values for _, values in reports.values()]
    if not found or not all(values.get("asleep") for values in found):
        return None
    return Asleep(
        wake_s=max(values.get("wake_s", values.get("sleep_s", 0.0)) for values in found),
        host_bytes=sum(values.get("host_bytes", 0.0) for values in found),
    )


def _digest(model: ModelSettings) -> str:
    """Return a digest of the settings of the model's replicas: weights, engine and device, but not their number."""
    return hashlib.sha256(model.model_dump_json(exclude={"replicas", "required"}).encode()).hexdigest()[:16]


def _open_log(name: str) -> DecisionLog:
    try:
        return DecisionLog(log_path(name))
    except Exception:  # of another version of Ray, or of the disk: scaling must continue
        logger.exception("decisions of the autoscaler are not logged")
        return DecisionLog(None)


def newest_reports(context: Any) -> Reports:
    """Return replica id -> time stamp and values of its newest report. Serve has reports of running replicas only."""
    reports: Reports = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                _, values = reports.setdefault(id_of(replica), (series[-1].timestamp, {}))
                if math.isfinite(value := float(series[-1].value)):
                    values[name] = value
    return reports


def load_at_ingresses(model: ModelSettings, reports: Reports, increments: Mapping[str, float]) -> dict[str, Any]:
    """Return the part of a `ModelLoad` that the ingresses know."""
    counted = {name: increments.get(f"{name}/{model.name}", 0.0) for name in INCREMENTS}
    lines_per_s = max((values.get(f"lines_per_s/{model.name}", 0.0) for _, values in reports.values()), default=0.0)
    return {
        **counted,
        "over_quota": increments.get(f"over_quota/{model.name}", 0.0),
        "over_quota_unread": increments.get("over_quota/", 0.0),
        "waiting": _total(reports, f"waiting/{model.name}"),
        "lines_per_s": lines_per_s,
    }


def load_of_replicas(context: Any, meter: Meter, *, now: float) -> dict[str, Any]:
    """Return the part of a `ModelLoad` that the replicas know."""
    reports = newest_reports(context)
    # No steps are assumed for a silent replica: ingresses report its present tokens, and assumed steps would be those of the past.
    increments = meter.take(reports, now=now, assume_s=STALE_S)
    measured = [found for _, values in reports.values() if (found := MeasuredCosts.from_report(values)) is not None]
    return {
        "measured": combined(measured),
        **{name: increments.get(name, 0.0) for name in REPLICA_INCREMENTS},
        "queued": _total(reports, "waiting"),
        "running": _total(reports, "running"),
        "max_num_seqs": min((values["max_num_seqs"] for _, values in reports.values() if "max_num_seqs" in values), default=None),
        "kv_usage": _total(reports, "kv_usage") / max(1, len(reports)),
        "reporting": len(reports),
        "cold_start_s": tuple(values["cold_start_s"] for _, values in reports.values() if "cold_start_s" in values),
    }


def _total(reports: Reports, name: str) -> float:
    return sum(values.get(name, 0.0) for _, values in reports.values())
