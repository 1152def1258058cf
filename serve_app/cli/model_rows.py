"""`rows` makes the table of `serve-app models list` from the report of `status.collect` and the running configuration. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.autoscaling.rules import replica_deployment
from serve_app.cli.rayservice import own_words
from serve_app.cli.running import Running
from serve_app.config import ModelSettings
from serve_app.ui.replicas import SLEEP_STATES


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model of the table."""

    model: str
    loads: str
    """The source of its engines' weights, with the revision if one is set."""
    release: str
    """Digest of the settings that its replicas are to have."""
    state: str
    """`loaded`, `degraded`, `asleep`, `waking`, `loading`, `unloading`, `unloaded`, `updating` or `failed`."""
    pinned: bool
    """Whether `serve-app models pin` keeps a replica that `replicas.min` does not."""
    ready: int
    target: int
    min: int
    max: int
    adapters: tuple[str, ...]
    running: int
    """Requests in its engines."""
    waiting: int
    """Requests in the queues of its engines and of the ingresses."""
    cold_start_s: float | None
    """Seconds that a start of its replicas takes: the 90th percentile that an ingress measured. None: no start was measured."""
    message: str
    """Why the model is not as it should be, in our own error's words."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells in the order of `COLUMNS`. The message is not a cell."""
        state = f"{self.state}, pinned" if self.pinned else self.state
        start = "" if self.cold_start_s is None else f"{self.cold_start_s:.1f} s"
        numbers = f"{self.ready}/{self.target}", f"{self.min}..{self.max}", f"{self.running}+{self.waiting}", start
        return self.model, state, *numbers, self.loads, self.release[:8], ", ".join(self.adapters)

    def json(self) -> dict[str, Any]:
        return asdict(self)


THERE = ("loaded", "degraded", "asleep", "waking")
"""States of a model that has a replica for its requests."""
COLUMNS = ("model", "state", "ready", "bounds", "requests", "start", "loads", "release", "adapters")


def rows(running: Running, report: Mapping[str, Any]) -> Iterator[ModelRow]:
    """Yield a row for each configured model, in the order of the configuration."""
    for model in running.settings.models.values():
        deployment = report["deployments"].get(replica_deployment(model), {})
        leases = [lease for lease in report["members"] if lease["model"] == model.name]
        ingresses = [lease["load"].get("models", {}).get(model.name, {}) for lease in report["members"] if not lease["model"]]
        yield _row(model, running, deployment, leases, ingresses)


def _row(
    model: ModelSettings,
    fleet: Running,
    deployment: Mapping[str, Any],
    leases: Sequence[Mapping[str, Any]],
    ingresses: Sequence[Mapping[str, Any]],
) -> ModelRow:
    states = deployment.get("replica_states", {})
    loads, revision = model.model, model.engine_args.get("revision")
    starts = [load["cold_start_s"] for load in ingresses if load.get("cold_start_s") is not None]
    state = state_of(states, deployment.get("target", 0), deployment.get("status", ""), deployment.get("rollout", ""))
    if state == "loaded" and leases and len(asleep := {lease["load"].get("sleep") for lease in leases}) == 1:
        state = SLEEP_STATES.get(asleep.pop(), state)
    return ModelRow(
        model=model.name,
        loads=f"{loads}@{revision}" if revision else loads,
        release=model.release(),
        state=state,
        pinned=fleet.is_pinned(model),
        ready=states.get("RUNNING", 0),
        target=deployment.get("target", 0),
        min=fleet.minimum(model),
        max=model.replicas.max,
        adapters=tuple(model.adapters),
        running=sum(lease["load"].get("running", 0) for lease in leases),
        waiting=sum(lease["load"].get("waiting", 0) for lease in leases) + sum(load.get("waiting", 0) for load in ingresses),
        cold_start_s=max(starts, default=None),
        message=own_words(deployment.get("message", "")),
    )


def state_of(replica_states: Mapping[str, int], target: int, status: str, rollout: str) -> str:
    """Return one word for a model.

    Args:
        replica_states: Serve's states of replicas, and the number of replicas in each.
        target: The wanted number of replicas.
        status: Serve's status of the deployment.
        rollout: Serve's action in progress, from `status.target`.
    """
    if not status:  # Serve builds the application anew, and shows no deployment until then
        return "updating"
    count = {name: number for name, number in replica_states.items() if number}
    if status == "UNHEALTHY" and rollout == "health check failed" and count.get("RUNNING"):
        return "degraded"  # a replica was lost, the others answer, and Serve starts another
    if status in ("UNHEALTHY", "DEPLOY_FAILED"):
        return "failed"
    if count.get("RUNNING"):
        if "config" in rollout and len(count) > 1:
            return "updating"
        return "loaded" if target else "unloading"
    if count.get("STARTING") or count.get("PENDING_MIGRATION") or target:
        return "loading"
    return "unloading" if count else "unloaded"
