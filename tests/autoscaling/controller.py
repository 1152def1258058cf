"""`Controller` stands for Serve's controller as the policy sees it: targets, members' reports, and the policy's state between calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.serve.config import AutoscalingConfig

from serve_app.autoscaling.policy import OBSERVE_S, DemandPolicy
from serve_app.membership import PoolNote, ScalingNote


@dataclass(frozen=True)
class Deployment:
    """Stands for Serve's DeploymentID."""

    name: str


@dataclass(frozen=True)
class Point:
    """Stands for Serve's TimeStampedValue."""

    timestamp: float
    value: float


@dataclass(frozen=True)
class Context:
    """The part of Serve's AutoscalingContext that the policy reads. ``raw_metrics``: name -> replica -> series."""

    target_num_replicas: int
    running_replicas: tuple[str, ...] = ()
    raw_metrics: Mapping[str, Mapping[str, list[Point]]] | None = None
    policy_state: Mapping[str, Any] = field(default_factory=dict)
    config: AutoscalingConfig | None = None
    """None: bounds as in the settings."""


INGRESS, TINY, BIG, FIXED = (Deployment(n) for n in ("ingress", "replica-tiny", "replica-big", "replica-fixed"))
SETTINGS: dict[str, Any] = {
    "models": {
        "tiny": {"model": "/tiny", "replicas": {"min": 0, "max": 8}, "required": False},
        "big": {"model": "/big", "replicas": {"min": 1, "max": 2}},
        "fixed": {"model": "/fixed", "replicas": {"min": 3, "max": 3}},
    },
    "ingress": {"replicas": {"min": 1, "max": 4, "target_streams": 10}},
}


MONDAY = 1_795_392_000.0  # 2026-11-23T00:00:00Z


class Controller:
    """Calls the policy as Serve's controller does: with the members' reports, the present targets, and the policy's own state."""

    def __init__(self, settings: Mapping[str, Any] = SETTINGS) -> None:
        self.at = 1000.0
        self.notes: list[ScalingNote] = []
        self.pools: list[PoolNote] = []
        sends: dict[str, Any] = {"send_note": self.notes.append, "send_pools": self.pools.append}
        self.policy = DemandPolicy(settings, now=lambda: self.at, wall=lambda: MONDAY + self.at, **sends)
        self.targets = {INGRESS: 1, TINY: 0, BIG: 1}
        self.state: dict[Any, Any] = {}
        self.configs: dict[Deployment, AutoscalingConfig] = {}
        self.silent_since: dict[str, float] = {}
        """Member -> time of its last report; members that are missing here report every second."""
        self.reports: dict[Deployment, dict[str, dict[str, float]]] = {INGRESS: {"i1": {}}, TINY: {}, BIG: {"b1": {}}}

    def report(self, deployment: Deployment, member: str, **values: float) -> None:
        self.reports[deployment].setdefault(member, {}).update({n.replace("__", "/"): v for n, v in values.items()})

    def contexts(self) -> dict[Deployment, Context]:
        found = {}
        for deployment, target in self.targets.items():
            series: dict[str, dict[str, list[Point]]] = {}
            for member, values in self.reports[deployment].items():
                at = self.silent_since.get(member, self.at)
                for name, value in values.items():
                    series.setdefault(name, {})[member] = [Point(at - 9, -1.0), Point(at, value)]
            state, config = self.state.get(deployment, {}), self.configs.get(deployment)
            found[deployment] = Context(target, tuple(self.reports[deployment]), series, state, config)
        return found

    def tick(self, seconds: float = OBSERVE_S) -> dict[Any, int]:
        self.at += seconds
        decided, self.state = self.policy(self.contexts())
        self.targets |= decided
        return decided


def reporting_controller() -> Controller:
    """Return a controller whose ingress and one replica have reported twice, so that increments can be counted."""
    controller = Controller()
    controller.report(INGRESS, "i1", streams=0.0, cpu_s=0.0, requests__tiny=0.0, requests__big=0.0)
    controller.report(BIG, "b1", steps=0.0, busy_s=0.0, running=0.0, waiting=0.0, kv_usage=0.0)
    controller.tick()
    controller.tick()
    return controller
