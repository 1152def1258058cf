"""This module renders the chart with helm and finds things in the result."""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "helm" / "serve-app"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE = "demo"
Values = Mapping[str, Any]
Object = dict[str, Any]


def tool(name: str) -> str | None:
    """Return the path of helm, helm-docs or kubeconform: on the PATH, or where the Kubernetes bed unpacks its own."""
    bed = Path(os.environ.get("KUBE_TESTBED") or "~/.cache/kube-testbed").expanduser()
    return shutil.which(name) or shutil.which(name, path=str(bed / "bin"))


def check_readme(chart: Path) -> None:
    """Assert that the chart's README is the one that helm-docs makes; skip the test without helm-docs."""
    helm_docs = tool("helm-docs")
    if helm_docs is None:
        pytest.skip("helm-docs is neither on the PATH nor in $KUBE_TESTBED/bin")
    command = [helm_docs, "--chart-search-root", str(chart), "--dry-run", "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == (chart / "README.md").read_text().strip(), "run `make chart-files`"


class Refused(Exception):
    """Helm's message for values that it did not render."""


@dataclass(frozen=True)
class Rendered:
    """All objects of one rendering."""

    text: str

    @functools.cached_property
    def objects(self) -> list[Object]:
        return [o for o in yaml.load_all(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if o]

    def of(self, kind: str) -> dict[str, Object]:
        """Return the objects of this kind by the part of their name after the release's, "" for the release itself."""
        found = [o for o in self.objects if o["kind"] == kind]
        return {o["metadata"]["name"].removeprefix(RELEASE).removeprefix("-"): o for o in found}

    @property
    def service(self) -> Object:
        """The spec of the RayService."""
        return dict(self.of("RayService")[""]["spec"])

    @property
    def cluster(self) -> Object:
        return dict(self.service["rayClusterConfig"])

    @property
    def serve(self) -> Object:
        """Serve's configuration."""
        return dict(yaml.safe_load(self.service["serveConfigV2"]))

    @property
    def config(self) -> Object:
        """serve-app's configuration."""
        return dict(self.serve["applications"][0]["args"])

    def group(self, name: str) -> Object:
        """Return the worker group, the head's for "head", and for "model" that of the only model."""
        if name == "head":
            return dict(self.cluster["headGroupSpec"])
        (group,) = [g for g in self.cluster["workerGroupSpecs"] if name in (g["groupName"], g["groupName"].partition("-")[0])]
        return dict(group)

    def pod(self, group: str) -> Object:
        """Return the pod's spec of a group."""
        return dict(self.group(group)["template"]["spec"])

    def container(self, group: str) -> Object:
        return dict(self.pod(group)["containers"][0])

    def environment(self, group: str) -> dict[str, Any]:
        return {e["name"]: e.get("value", e.get("valueFrom")) for e in self.container(group)["env"]}

    def pod_templates(self) -> Iterator[tuple[str, Object]]:
        """Yield name and template of every pod of any object, custom resources and the autoscaler's container included."""
        for o in self.objects:
            where = f"{o['kind']} {o['metadata']['name']}"
            if o["kind"] == "Pod":
                yield where, {"metadata": o["metadata"], "spec": o["spec"]}
            elif o["kind"] in ("Deployment", "Job", "StatefulSet"):
                yield where, o["spec"]["template"]
            elif o["kind"] == "RayService":
                cluster = o["spec"]["rayClusterConfig"]
                yield f"{where} head", _with_autoscaler(cluster)
                for group in cluster["workerGroupSpecs"]:
                    yield f"{where} {group['groupName']}", group["template"]


def _with_autoscaler(cluster: Object) -> Object:
    """The head's template with the container that KubeRay adds, as it makes it from autoscalerOptions."""
    template = dict(cluster["headGroupSpec"]["template"])
    options, head = cluster["autoscalerOptions"], template["spec"]["containers"][0]
    added = {
        "name": "autoscaler",
        "image": head["image"],
        "args": ["ray kuberay-autoscaler"],
        **{key: options[key] for key in ("imagePullPolicy", "env", "resources", "securityContext", "volumeMounts")},
    }
    return template | {"spec": template["spec"] | {"containers": [*template["spec"]["containers"], added]}}


def render(
    values: Values | None = None,
    *,
    files: tuple[Path, ...] = (),
    release: str = RELEASE,
    chart: Path = CHART,
    kinds: tuple[str, ...] = (),
) -> Rendered:
    """Render with these values over the chart's, as for a cluster that has ``kinds``, if any are given. Equal calls render once.

    Raises:
        Refused: The schema or a check of the chart refuses the values.
    """
    return _render(json.dumps(values or {}, sort_keys=True), files, release, chart, kinds)


@functools.cache
def _render(values: str, files: tuple[Path, ...], release: str, chart: Path, kinds: tuple[str, ...]) -> Rendered:
    if (helm := tool("helm")) is None:
        pytest.skip("helm is neither on the PATH nor in $KUBE_TESTBED/bin")
    chosen = [argument for file in files for argument in ("--values", str(file))]
    known = [argument for kind in kinds for argument in ("--api-versions", kind)]
    command = [helm, "template", release, str(chart), "--namespace", "serving", *chosen, *known, "--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Refused(done.stderr)
    return Rendered(done.stdout)


def at(path: str, value: Any) -> dict[str, Any]:
    """Return nested mappings with ``value`` at a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def models(*several: Values) -> dict[str, Any]:
    """Return values with these models, each a mapping of the keys that it has there and its name."""
    return at("config.models", {model["name"]: {k: v for k, v in model.items() if k != "name"} for model in several})


def merged(*several: Values) -> dict[str, Any]:
    """Return the mappings merged as helm does: maps by key, all else replaced."""
    result: dict[str, Any] = {}
    for values in several:
        for key, value in values.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def types_of(value: Any) -> Any:
    """Return a manifest with the name of its type in place of each value.

    Two renderings differ in this only where a value changed its type, such as a release name that YAML reads as a number.
    """
    if isinstance(value, Mapping):
        return {key: types_of(entry) for key, entry in value.items()}
    return [types_of(entry) for entry in value] if isinstance(value, list) else type(value).__name__
