"""The autoscaler exports its decisions as Prometheus series, through Ray's metrics agent on the head node.

The chart's PodMonitor scrapes the agent. Ray puts ``ray_`` before each name. All series have the labels ``application`` and ``model``;
`INGRESSES` is the ``model`` of the ingresses.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.autoscaling.decision import Decision, Observation
from serve_app.autoscaling.fleet import INGRESSES, FleetObservation, IngressObservation

logger = logging.getLogger("ray.serve")  # this runs in Serve's controller, in whose log operators look

PREFIX = "serve_app_autoscaling_"
SERIES: Mapping[str, str] = {
    "demand": "Work that arrives, in replicas that would be busy all the time.",
    "wish": "Replicas that each wish is for, 0 without the wish.",
    "because": "1 for what decided the number of replicas, 0 for what did before.",
    "desired": "Replicas wanted.",
    "ready": "Replicas that serve.",
    "cold_start_seconds": "What a start is taken to last.",
    "utilization_target": "Work per second and replica aimed at.",
    "utilization": "Work that arrives each second and replica that serves, 0 when no replica serves.",
}
"""Name without `PREFIX` -> help text."""
RULED = ("wish", "because")
"""Series with the label ``rule``."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series."""

    name: str
    model: str
    value: float
    rule: str = ""
    """The wish that the sample is about; only in `RULED` series."""


def samples(seen: FleetObservation, decided: Mapping[str, Decision]) -> Iterator[Sample]:
    """Yield the samples of all decisions of one moment.

    An unknown quantity has no sample, and its gauge keeps its last value.
    """
    for model, decision in decided.items():
        observed: Observation | IngressObservation | None = seen.ingress if model == INGRESSES else seen.models[model]
        assert observed is not None  # decisions exist only for what was observed
        yield Sample("desired", model, decision.desired)
        yield Sample("ready", model, observed.running)
        yield Sample("because", model, 1.0, decision.wish)
        for wish, replicas in decision.alternatives.items():
            yield Sample("wish", model, replicas, wish)
        inputs = decision.inputs
        known = {"demand": "demand", "cold_start_seconds": "cold_start_s", "utilization_target": "utilization"}
        for name, key in known.items():
            if key in inputs:
                yield Sample(name, model, inputs[key])
        if model != INGRESSES and not observed.running:
            yield Sample("utilization", model, 0.0)
        elif "demand" in inputs:
            yield Sample("utilization", model, inputs["demand"] / observed.running)


@dataclass(slots=True)
class Gauges:
    """Ray's gauges of one application. A wish that a rule no longer has is set to 0."""

    application: str
    _gauges: dict[str, Any] = field(default_factory=dict)
    _rules: set[tuple[str, str, str]] = field(default_factory=set)
    """(series, model, rule) that were set."""

    def show(self, seen: FleetObservation, decided: Mapping[str, Decision]) -> None:
        """Set all gauges. Outside Ray none is set, and a failure is only logged: scaling must continue."""
        try:
            self._show(seen, decided)
        except Exception:  # of another version of Ray
            logger.exception("the autoscaler's series are not exported")

    def _show(self, seen: FleetObservation, decided: Mapping[str, Decision]) -> None:
        import ray

        if not ray.is_initialized():
            return
        shown = list(samples(seen, decided))
        now = {(s.name, s.model, s.rule) for s in shown if s.name in RULED}
        for name, model, rule in self._rules - now:
            shown.append(Sample(name, model, 0.0, rule))
        self._rules |= now
        for sample in shown:
            tags = {"application": self.application, "model": sample.model}
            self._gauge(sample.name).set(sample.value, tags | ({"rule": sample.rule} if sample.name in RULED else {}))

    def _gauge(self, name: str) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            keys = ("application", "model", "rule") if name in RULED else ("application", "model")
            self._gauges[name] = Gauge(PREFIX + name, SERIES[name], keys)
        return self._gauges[name]
