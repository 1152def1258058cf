"""`Running` is the application that runs, as Ray Serve holds it: its configuration, and the replica counts that `serve-app models` set.

Serve keeps both in its checkpoint, so that they survive its controller. An entry of ``deployments`` in Serve's config changes a bound, and
touches no running replica.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.autoscaling.rules import replica_deployment
from serve_app.cli.cluster import RAY_LIMIT_S, connect_to_run, within
from serve_app.config import ModelSettings, Settings, parse_settings
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed


@dataclass(frozen=True)
class Running:
    """One application of a cluster. ``url`` is known if `serve-app up` started it here."""

    url: str
    settings: Settings
    serve: Mapping[str, Any]
    """Serve's config of the whole cluster, including its other applications."""

    @property
    def application(self) -> Mapping[str, Any]:
        """Serve's config of this application."""
        return next(a for a in self.serve["applications"] if a["name"] == self.settings.name)

    def model(self, name: str) -> ModelSettings:
        """Return the settings of a model.

        Raises:
            ClusterFailed: There is no such model.
        """
        known = self.settings.models
        if name not in known:
            raise ClusterFailed(f"{self.settings.name!r} has no model {name!r}", f"its models: {', '.join(known)}")
        return known[name]

    def minimum(self, model: ModelSettings) -> int:
        """Return the smallest number of the model's replicas: `replicas.min`, or the value that `serve-app models` set in its place."""
        entry = self.entries().get(replica_deployment(model), {})
        return int((entry.get("autoscaling_config") or {}).get("min_replicas", model.replicas.min))

    def is_pinned(self, model: ModelSettings) -> bool:
        """Return whether `serve-app models pin` keeps a replica that the configuration does not."""
        return self.minimum(model) > model.replicas.min

    def entries(self) -> dict[str, Mapping[str, Any]]:
        """Return deployment -> its entry of ``deployments``."""
        return {entry["name"]: entry for entry in self.application.get("deployments", ())}

    def with_entry(self, entry: Mapping[str, Any]) -> "Running":
        """Return a copy with this entry of ``deployments`` merged into the deployment's own entry, whose other keys stay."""
        return self._with({**self.application, "deployments": _merged(self.entries(), [entry])})

    def with_settings(self, settings: Settings) -> "Running":
        """Return a copy with another configuration. Every number of replicas stays as it is, and so do pins and keys that others set.

        Keys of others are the application's keys that `serve_config` never sets, such as ``runtime_env``, and in ``deployments`` all keys
        but our bounds.
        """
        from serve_app.application import bounds_entry, serve_config
        from serve_app.autoscaling.rules import scaled_models

        (application,) = serve_config(settings)["applications"]
        minimums = {m.name: self.minimum(m) for m in self.settings.models.values() if self.minimum(m) != m.replicas.min}
        bounds = [bounds_entry(m, minimum=minimums.get(m.name, m.replicas.min)) for m in scaled_models(settings)]
        ours = {replica_deployment(m) for m in scaled_models(self.settings)}  # a model may have a fixed number from now on
        others = {n: _without(entry, "autoscaling_config") if n in ours else entry for n, entry in self.entries().items()}
        application |= {"deployments": _merged(others, bounds)}
        changed = self._with({**_without(self.application, "autoscaling_policy"), **application})
        return Running(self.url, settings, changed.serve)

    def _with(self, application: Mapping[str, Any]) -> "Running":
        applications = [application if a["name"] == self.settings.name else a for a in self.serve["applications"]]
        return Running(self.url, self.settings, {**self.serve, "applications": applications})


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def _merged(entries: Mapping[str, Mapping[str, Any]], changes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of ``deployments`` with the changes merged in by name."""
    changed = {change["name"]: {**entries.get(change["name"], {}), **change} for change in changes}
    return [*{**entries, **changed}.values()]


def running(name: str, address: str) -> Running:
    """Connect to the cluster and return the application that runs there.

    Raises:
        ClusterFailed: No cluster answers, it has no such application, or serve-app has not configured the application.
    """
    return look(name, connect_to_run(name, address))


def look(name: str, url: str = "") -> Running:
    """Return the connected cluster's application of that name.

    Raises:
        ClusterFailed: There is no such application, or serve-app has not configured it.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    details = {"applications": {}} if client is None else within(RAY_LIMIT_S, client.get_serve_details)
    configs = {key: a["deployed_app_config"] for key, a in details["applications"].items() if a.get("deployed_app_config")}
    if name not in configs:
        others = f"it has: {', '.join(configs)}; name one by --name" if configs else f"start it with: {as_typed()} up -f FILE"
        raise ClusterFailed(f"no application named {name!r} runs in this cluster", others)
    return Running(url, parse_settings(configs[name]["args"]), _as_given(details, [*configs.values()]))


def _as_given(details: Mapping[str, Any], applications: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Serve's config of the cluster from Serve's details. A config without the target capacity would reset that capacity."""
    whole = {"proxy_location": details.get("proxy_location", "Disabled"), "target_capacity": details.get("target_capacity")}
    return {**whole, "applications": copy.deepcopy([*applications])}


def hand_over(serve: Mapping[str, Any]) -> None:
    """Hand the config of the whole cluster to the running Serve; return at once."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # each command prints what happens itself
    config = ServeDeploySchema.model_validate(serve)
    within(RAY_LIMIT_S, lambda: _get_global_client().deploy_apps(config, _blocking=False))
