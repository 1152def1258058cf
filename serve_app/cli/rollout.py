"""``serve-app rollout`` applies a change to a cluster, or takes one that Helm has applied, and watches it to its end."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import typer
import yaml
from rich.console import Console

from serve_app.cli import kube
from serve_app.cli.manifests import called, documents_in, manifest_problems
from serve_app.cli.options import INTERRUPTED
from serve_app.cli.rayservice import RayService, RolloutResult, judge
from serve_app.cli.settings_file import in_file
from serve_app.config import default_cache_dir, read_text
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed, ConfigError

FAILED, TIMED_OUT = 3, 4
_SETTLED = 3
"""Looks in a row that must find the rollout done, or failed: right after a change, the old state may still be shown."""
_FORGET = """--subresource=status --type=merge -p '{"status": {"pendingServiceStatus": null}}'"""
"""The rest of a `kubectl patch rayservice` that makes KubeRay forget its new cluster. If that is deleted instead, it comes again."""
_RAN = ("superseded", "deployed")
"""Helm's statuses of revisions for a rollback. Without a number, `helm rollback` takes the last revision, even a refused one."""
console = Console(stderr=True, highlight=False, soft_wrap=True)


def rollout(
    name: str,
    file: Path | None,
    *,
    context: str | None,
    namespace: str | None,
    timeout_s: float,
    poll_s: float,
    as_json: bool = False,
) -> None:
    """Run `serve-app rollout`."""
    cluster = kube.connect(context, namespace)
    way_back = _apply(cluster, name, file) if file else ""
    try:
        service, result = follow(cluster, name, timeout_s=timeout_s, poll_s=poll_s)
    except KeyboardInterrupt:
        console.print(f"the rollout continues; watch it with: {as_typed()} rollout {name} {cluster.kubectl_options()}")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps({"name": name, "rollout": asdict(result)}))
    if result.kind == "done":
        if not as_json:
            typer.echo(f"{name}: {result.line}")
        return
    said = "has failed" if result.kind == "failed" else f"has not ended within {timeout_s:g} s"
    console.print(f"error: the rollout of {name} {said}: {result.line}", style="red")
    console.print(f"look:     {as_typed()} status {name} {cluster.kubectl_options()}")
    console.print(f"way back: {way_back or _way_back(cluster, service)}")
    if service.active and service.pending and "Unschedulable" in result.line:
        # For the way back KubeRay makes a third cluster, which waits for nodes like the second.
        console.print(f"and then: kubectl patch rayservice {name} {cluster.kubectl_options()} {_FORGET}")
    raise typer.Exit(FAILED if result.kind == "failed" else TIMED_OUT)


def follow(cluster: kube.Cluster, name: str, *, timeout_s: float, poll_s: float) -> tuple[RayService, RolloutResult]:
    """Watch until the rollout is done, has failed, or is still in progress after ``timeout_s``; each new line is printed once."""
    deadline = time.monotonic() + timeout_s
    said, kind, num_looks = "", "", 0
    while True:
        service = cluster.ray_service(name)
        result = judge(service, cluster.pods(service))
        num_looks = num_looks + 1 if result.kind == kind else 1
        kind = result.kind
        if kind != "progressing" and num_looks == _SETTLED:
            return service, result
        if time.monotonic() >= deadline:
            return service, RolloutResult("progressing", result.line)
        if result.kind == "progressing" and result.line != said:
            console.print(f"  {result.line}")
            said = result.line
        time.sleep(poll_s)


def _apply(cluster: kube.Cluster, name: str, file: Path) -> str:
    """Apply the manifests and return the way back.

    Raises:
        ConfigError: The file is wrong; nothing was applied.
        ClusterFailed: The cluster refused.
    """
    text = read_text(file)
    try:
        if wrong := list(manifest_problems(text, client_s=None, load_balancer_idle_s=None)):
            raise wrong[0]
        manifests = documents_in(text)
        names = [called(manifest) for manifest in manifests]  # check all of them before the first is applied
    except ConfigError as exc:
        raise in_file(file, exc) from exc
    if f"RayService {name}" not in names:
        raise ConfigError(str(file), f"holds no RayService {name!r}", f"give its name: {as_typed()} rollout NAME -f FILE")
    way_back = _save(cluster, name)
    for done in cluster.apply(manifests):
        console.print(f"  applied {done}")
    return way_back


def _save(cluster: kube.Cluster, name: str) -> str:
    """Save the RayService as it is, and return the command that applies it again."""
    if name not in cluster.ray_services():
        return f"kubectl delete rayservice {name} {cluster.kubectl_options()}"
    before = cluster.raw_ray_service(name)
    metadata = before["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "labels", "annotations") if key in metadata}
    path = default_cache_dir() / "rollouts" / f"{name}-{metadata['uid']}-{metadata['generation']}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"apiVersion": before["apiVersion"], "kind": before["kind"], "metadata": kept, "spec": before["spec"]}
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    return f"{as_typed()} rollout {name} -f {path} {cluster.kubectl_options()}"


def _way_back(cluster: kube.Cluster, service: RayService) -> str:
    release = service.helm_release
    if not release:
        return "apply the earlier manifests"
    try:
        *before, _ = cluster.helm_revisions(release).items()
    except (ClusterFailed, ValueError):  # the right to list Secrets is missing, or Helm keeps its revisions elsewhere
        return f"helm history {release} {cluster.helm_options()}, then helm rollback {release} REVISION {cluster.helm_options()}"
    ran = [revision for revision, status in before if status in _RAN]
    if not ran:
        uninstall = f"helm uninstall {release} {cluster.helm_options()}"
        return f"none, no revision before it was deployed; change the values and upgrade, or: {uninstall}"
    return f"helm rollback {release} {ran[-1]} {cluster.helm_options()}"
