"""This module reads the models of rendered manifests for `serve-app fit`: settings, pods, and where the chart's jobs fetch weights from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.cli.manifests import applications_in, called, documents_in, inside, list_at, mapping_at
from serve_app.config import ModelSettings, parse_settings, problems
from serve_app.config.checks import dotted
from serve_app.errors import ConfigError
from serve_app.sizing.nodes import PodSizes

_DOWNLOAD = (["serve-app", "model", "download"], ["serve-app", "model", "verify"])
"""Commands of the chart's jobs; their first arguments are a folder, and its source with the commit or checksum after an @."""
_HUB = "hf:"
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGT]i?)?")
_UNITS = {
    None: 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class RenderedModel:
    """A model of a RayService."""

    where: str
    """Kind and name of the manifest, and the model's key."""
    settings: ModelSettings
    source: str
    """The id on the hub, or the place in a bucket, from which a job fetches the model's folder; else the model as it is configured."""
    revision: str
    """The commit of that id; "" for other sources."""
    pod: PodSizes | None
    """Sizes of the model's pods; None if the manifests do not say all of them."""


def rendered_models(text: str) -> Iterator[RenderedModel]:
    """Yield the models of all RayServices in ``text``.

    Raises:
        ConfigError: The text is not YAML, a RayService lacks a key, or its configuration is wrong.
    """
    documents = documents_in(text)
    fetched = dict(_downloads(documents))
    for service in (document for document in documents if document.get("kind") == "RayService"):
        where = called(service)
        try:
            yield from _models_of(mapping_at(service.get("spec"), "spec"), where, fetched)
        except KeyError as exc:
            raise ConfigError(where, f"has no {exc.args[0]}", "give the output of: helm template NAME helm/serve-app") from None


def _models_of(spec: Mapping[str, Any], where: str, fetched: Mapping[str, str]) -> Iterator[RenderedModel]:
    groups = list_at(mapping_at(spec["rayClusterConfig"], "rayClusterConfig").get("workerGroupSpecs"), "workerGroupSpecs")
    for application in applications_in(spec["serveConfigV2"]):
        arguments = mapping_at(application, "serveConfigV2.applications").get("args") or {}
        for problem in problems(arguments):
            raise inside(where, problem)
        for name, model in parse_settings(arguments).models.items():
            source, revision = _source_of(model.model, fetched)
            group = next((group for group in groups if _has_resource(group, model)), None)
            yield RenderedModel(
                where=f"{where}: {dotted(('models', name))}",
                settings=model,
                source=source,
                revision=revision,
                pod=None if group is None else _pod_of(group),
            )


def _downloads(documents: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield folder and source of each download."""
    for document in documents:
        if document.get("kind") != "Job":
            continue
        pod = mapping_at(
            mapping_at(mapping_at(document.get("spec"), "spec").get("template"), "template").get("spec"), "template.spec"
        )
        for container in list_at(pod.get("containers"), "containers"):
            words = list_at(container.get("args"), "args")
            if container.get("command") in _DOWNLOAD and len(words) >= 2:
                yield str(words[0]), str(words[1])


def _source_of(model: str, fetched: Mapping[str, str]) -> tuple[str, str]:
    """Return the hub's id and the commit for a model whose folder a job fills from there; else the bucket's URL or the model, and ""."""
    source, _, revision = fetched.get(model, "").rpartition("@")
    return (source.removeprefix(_HUB), revision) if source.startswith(_HUB) else (source or model, "")


def _has_resource(group: Any, model: ModelSettings) -> bool:
    """Return whether the pods of a worker group have the resource that the chart binds the model to."""
    given = str(mapping_at(mapping_at(group, "workerGroupSpecs").get("rayStartParams"), "rayStartParams").get("resources", ""))
    return any(f'"{name}\\"' in given or f'"{name}"' in given for name in model.resources)


def _pod_of(group: Mapping[str, Any]) -> PodSizes | None:
    spec = mapping_at(mapping_at(group["template"], "template")["spec"], "template.spec")
    if not (containers := list_at(spec.get("containers"), "containers")):
        return None
    resources = mapping_at(containers[0].get("resources"), "resources")
    requests, limits = (mapping_at(resources.get(kind), kind) for kind in ("requests", "limits"))
    volumes = list_at(spec.get("volumes"), "volumes")
    shared = [mapping_at(volume.get("emptyDir"), "emptyDir") for volume in volumes if volume.get("name") == "shm"]
    amounts = [
        requests.get("cpu"),
        limits.get("cpu"),
        requests.get("memory"),
        limits.get("memory"),
        *(volume.get("sizeLimit") for volume in shared),
    ]
    numbers = [_AMOUNT.fullmatch(str(amount)) for amount in amounts]
    if len(numbers) != 5 or not all(numbers):
        return None
    cpu, most_cpu, memory, most_memory, shm = (float(found[1]) * _UNITS[found[2]] for found in numbers if found)
    return PodSizes(
        cpu_request=cpu,
        cpu_limit=most_cpu,
        memory_request_gib=memory / _GIB,
        memory_limit_gib=most_memory / _GIB,
        shm_gib=shm / _GIB,
    )
