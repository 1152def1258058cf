"""`serve-app models update` changes the running configuration, or the values of a Helm release. Pure but for the file that it reads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from serve_app.cli.rayservice import own_reasons
from serve_app.config import ModelSettings, Settings, parse_settings
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed

DEFAULT_NAME = "serve-app"
"""The default of ``--name``."""


def changed(settings: Settings, model: str, to: str, revision: str, file: Path | None) -> Settings:
    """Return the configuration with one model changed: to its settings in ``file``, then by ``to`` and ``revision`` unless they are "".

    Raises:
        ConfigError: The result, or the file, is wrong.
        ClusterFailed: The file has no such model.
    """
    values = settings.model_dump(mode="json")
    if file is not None:
        values["models"][model] = _in_file(file, model)
    one: dict[str, Any] = values["models"][model]
    if to:
        one["model"] = to
    if to and not revision:  # a revision of other weights means nothing for the new weights
        one["engine_args"].pop("revision", None)
    if revision:
        one["engine_args"]["revision"] = revision
    return parse_settings(values)


def where_to_look(name: str = DEFAULT_NAME, address: str = "") -> str:
    """Return the command that shows the progress of an update with these values of ``--name`` and ``--address``."""
    of = ("" if name == DEFAULT_NAME else f" {quote(name)}") + (f" --address {quote(address)}" if address else "")
    return f"{as_typed()} status{of}"


def way_back(before: ModelSettings, file: Path | None, *, name: str = DEFAULT_NAME, address: str = "") -> str:
    """Return the command that undoes an update.

    Args:
        before: The model's settings before the update.
        file: The file that the update took the model from.
        name: ``--name`` of the update.
        address: ``--address`` of the update.
    """
    if file is not None:
        return "the same command with the earlier file"
    options = {"model": before.model, "revision": before.engine_args.get("revision")}  # `--model` alone would remove the revision
    options |= {"name": "" if name == DEFAULT_NAME else name, "address": address}
    return f"{as_typed()} models update {quote(before.name)}" + "".join(
        f" --{k} {quote(str(v))}" for k, v in options.items() if v
    )


def _in_file(file: Path, model: str) -> dict[str, Any]:
    from serve_app.cli.settings_file import read_settings

    models = read_settings(file).models
    if model not in models:
        raise ClusterFailed(f"{file} has no model {model!r}", f"its models: {', '.join(models)}")
    return models[model].model_dump(mode="json")


@dataclass(frozen=True)
class Update:
    """An update of one model that was handed to Serve."""

    model: str
    before: frozenset[str]
    """Ids of the replicas and ingresses before the update. It replaces all of them: Serve has one version for a whole application."""

    def rest(self, report: Mapping[str, Any]) -> str:
        """Return what the update still waits for, from the report of `status.collect`; "" when it is complete.

        Serve's status alone is not enough: an application is RUNNING for Serve if the autoscaler scaled its deployment during the update.

        Raises:
            ClusterFailed: Serve has given the update up.
        """
        deployments = report["deployments"]
        if report["status"] == "DEPLOY_FAILED":
            why = own_reasons({name: d["message"] for name, d in deployments.items()}, report["name"], report["message"])
            raise ClusterFailed(f"Serve has given up the update of {self.model!r}", why)
        waits = []
        if num_old := len(self.before & {lease["replica_id"] for lease in report["members"]}):
            waits.append(f"old ingresses and replicas: {num_old}")
        if report["status"] != "RUNNING":
            others = ", ".join(f"{name} {d['status'].lower()}" for name, d in deployments.items() if d["status"] != "HEALTHY")
            waits.append(f"Serve says {report['status']}" + (f": {others}" if others else ""))
        return "; ".join(waits)


def kubernetes_commands(
    name: str, model: str, to: str, revision: str, *, context: str | None, namespace: str | None
) -> Iterator[str]:
    """Yield the commands that change the values of the Helm release behind the RayService ``name`` and watch the change.

    Raises:
        ClusterFailed: The cluster does not answer, or Helm has not made the RayService.
    """
    from serve_app.cli import kube

    cluster = kube.connect(context, namespace)
    release = cluster.ray_service(name).helm_release
    if not release:
        raise ClusterFailed(
            f"Helm has not made the RayService {name!r}",
            f"change serveConfigV2 in its manifest: {as_typed()} rollout NAME -f FILE",
        )
    key = "config.models." + model.replace(".", r"\.")
    values = {"model": to, "engine_args.revision": revision}
    options = " ".join(f"--set-string {quote(f'{key}.{path}={value}')}" for path, value in values.items() if value)
    if to and not revision:  # as `changed` does
        options += f" --set {quote(f'{key}.engine_args.revision=null')}"
    yield f"helm upgrade {release} CHART {cluster.helm_options()} --reset-then-reuse-values {options}"
    yield f"{as_typed()} rollout {name} {cluster.kubectl_options()}"
