"""``serve-app up`` starts a Ray cluster (or takes an existing one) and the application on it, and serves until Ctrl-C."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import typer
from rich.console import Console

from serve_app.autoscaling.rules import INGRESS
from serve_app.cli.cluster import RAY_LIMIT_S, RunState, connect, local_cluster, ray_token, refuse_dead_ray, within
from serve_app.cli.rayservice import own_reasons
from serve_app.cli.running import hand_over
from serve_app.cli.settings_file import read_settings
from serve_app.cli.startable import refuse_hopeless_start, refuse_name_in_use
from serve_app.cli.ui import pages
from serve_app.config import Settings
from serve_app.errors import ClusterFailed, ClusterSilent

_POLL_S = 0.5
_WATCH_S = 5.0
_REMOVE_MARGIN_S = 60.0
_SILENCE_S = 15.0
"""Of a start or a stop; then a line says that it goes on."""
_MAX_SILENCES = 4
"""A start is given up at this many calls in a row, of `RAY_LIMIT_S` each, which Ray's control plane did not answer.

One alone means little while engines load: at a load of 70 on two cores Ray once took longer than 30 s, and none of its processes was dead.
"""
console = Console(stderr=True, highlight=False, soft_wrap=True)


def up(file: Path, address: str) -> None:
    """Do what the command `serve-app up` says of itself."""
    settings = read_settings(file)
    stop, cut = threading.Event(), threading.Event()
    with _cluster(settings, address) as ray_address:
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets its own
            signal.signal(number, lambda got, _: _interrupted(stop, cut, cuts=got == signal.SIGINT))
        with running(settings, ray_address, stop, cut, here=not address):
            if not stop.is_set():
                _say_ready(settings)
            with pages(settings, console):
                _watch(settings, stop)
    console.print("stopped")


def _watch(settings: Settings, stop: threading.Event) -> None:
    """Return when ``stop`` is set. A control plane that does not answer is waited for: the fleet serves without it.

    Raises:
        ClusterFailed: Serve gave the application up and no ingress runs, or this process's own Ray is dead.
    """
    silent, failure = False, ""
    while not stop.wait(_WATCH_S):
        try:
            _check_application(settings)
        except ClusterSilent as exc:
            if not silent:
                console.print(f"{exc.problem}: what runs goes on, and nothing is replaced until it answers")
            silent = True
        except ClusterFailed as exc:
            if not _has_ingress(settings):
                raise
            if exc.hint != failure:
                console.print(f"an update has failed, and what served before goes on:\n{exc.hint}")
            silent, failure = False, exc.hint
        else:
            silent, failure = False, ""


def _has_ingress(settings: Settings) -> bool:
    """Return whether an ingress runs, though Serve gave the application up: an update has failed, as by `serve-app models update`."""
    refuse_dead_ray()
    status = application_status(settings.name)
    ingresses = None if status is None else status.deployments.get(INGRESS)
    return ingresses is not None and bool(ingresses.replica_states.get("RUNNING"))


def _interrupted(stop: threading.Event, cut: threading.Event, *, cuts: bool) -> None:
    """First signal: drain and stop. A later one that ``cuts``: do not wait for streams."""
    if stop.is_set():
        if cuts:
            cut.set()
        return
    stop.set()
    console.print("stopping; running streams may finish (Ctrl-C again cuts them)")


@contextlib.contextmanager
def _cluster(settings: Settings, address: str) -> Iterator[str]:
    if address:
        refuse_name_in_use(settings.name)
        connect(address, settings.name)
        _refuse_occupied_cluster()
        yield address
    else:
        refuse_hopeless_start(settings)
        console.print("starting Ray")
        with local_cluster(settings) as ray_address:
            _refuse_too_few_gpus(settings)
            console.print(f"logs: {os.environ['TMPDIR']}/ray/session_latest/logs/serve (removed at the end)")
            yield ray_address
            console.print("ending Ray's processes")


def _refuse_too_few_gpus(settings: Settings) -> None:
    """Raise ClusterFailed when the smallest fleet holds more GPUs than Ray's only node has: its replicas would wait for ever."""
    import ray

    needed = sum(m.gpus_per_replica * m.replicas.min for m in settings.models.values())
    if needed > (has := ray.cluster_resources().get("GPU", 0.0)):
        raise ClusterFailed(
            problem=f"the smallest fleet of this file needs {needed} GPU and this machine has {has:g}",
            hint="lower gpus_per_replica or replicas.min, or start it on a cluster with --address",
        )


def _refuse_occupied_cluster() -> None:
    """Raise ClusterFailed when the cluster serves anything: Serve would remove it for ours, and we ours when we end."""
    from ray import serve

    if others := sorted(serve.status().applications):
        raise ClusterFailed(
            problem=f"this Ray cluster serves already: {', '.join(others)}",
            hint="use a cluster of its own, or add the output of serve-app config serve to the cluster's Serve file",
        )


@contextlib.contextmanager
def running(
    settings: Settings, ray_address: str, stop: threading.Event, cut: threading.Event, *, here: bool = True
) -> Iterator[None]:
    """Deploy and wait until ready; on leaving, drain and remove the application.

    Args:
        stop: Set: no longer wait for readiness.
        cut: Set: no longer wait for streams.
        here: The ingress is on this machine: ready is when its URL says so, else when Serve says that all runs.

    Raises:
        ClusterFailed: The application does not come up; the message holds Serve's own reason.
    """
    url = settings.ingress.local_url
    RunState.of_this_process(settings.name, ray_address, ray_token(), url if here else "").save()
    try:
        deploy(settings)
        _wait_ready(settings, url if here else "", stop)
        yield
    finally:
        try:
            with contextlib.suppress(KeyboardInterrupt, ClusterFailed):
                remove(settings, cut, here=here)
        finally:
            RunState.path(settings.name).unlink(missing_ok=True)


def deploy(settings: Settings) -> None:
    """Hand the application to Serve on the connected cluster; returns at once."""
    from ray.serve._private.api import serve_start

    from serve_app.application import serve_config

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it does shows in the lines of _wait_ready
    serve_start(proxy_location="Disabled")
    hand_over(serve_config(settings))


def remove(settings: Settings, cut: threading.Event, *, here: bool) -> None:
    """Drain and remove the application and its lease board. Serve ends a drain that takes longer than ``drain_s``.

    Args:
        cut: Set: no longer wait for streams. Members are killed until Serve knows no application; the lease board follows them.
        here: The cluster ends after this, with all that is left in it.
    """
    import ray
    from ray import serve

    from serve_app.membership import board_name

    refuse_dead_ray()
    within(RAY_LIMIT_S, lambda: serve.delete(settings.name, _blocking=False))
    deadline = time.monotonic() + settings.timeouts.drain_s + _REMOVE_MARGIN_S
    told = _Told()
    while (status := application_status(settings.name)) is not None and time.monotonic() < deadline:
        if left := _states(status):
            told.tell(f"left: {left}")
        if cut.wait(_POLL_S):
            if here:
                return
            within(RAY_LIMIT_S, lambda: _kill_members(settings.name))
            time.sleep(_POLL_S)
    with contextlib.suppress(ValueError):
        within(RAY_LIMIT_S, lambda: ray.kill(ray.get_actor(board_name(settings.name), namespace=settings.name)))


def _kill_members(name: str) -> None:
    """Kill the application's ingresses and replicas, as Serve does at the end of a drain.

    A member that lived on would make a new lease board. While Serve deletes an application, its details name no replicas; Ray's list does.
    """
    import ray
    from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX
    from ray.serve._private.constants import SERVE_NAMESPACE

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == SERVE_NAMESPACE and actor["name"].startswith(f"{REPLICA_ID_FULL_ID_STR_PREFIX}{name}#"):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=SERVE_NAMESPACE))


def application_status(name: str) -> Any:
    """Return Serve's own view of the application, None when it knows none.

    Raises:
        ClusterFailed: Ray does not answer.
    """
    from ray import serve

    return within(RAY_LIMIT_S, lambda: serve.status().applications.get(name))


def serve_details(name: str) -> dict[str, Any]:
    """Return Serve's details of the application's deployments by their names; empty when it knows none.

    Raises:
        ClusterFailed: Ray does not answer.
    """
    from ray.serve.context import _get_global_client

    applications = within(RAY_LIMIT_S, lambda: _get_global_client().get_serve_details()["applications"])
    return dict(applications.get(name, {}).get("deployments", {}))


def _wait_ready(settings: Settings, url: str, stop: threading.Event) -> None:
    """Return when the application is ready, or ``stop`` is set.

    Raises:
        ClusterFailed: As `_check_application`, or Ray's control plane has not answered `_MAX_SILENCES` times in a row.
    """
    told, silences = _Told(), 0
    while not stop.wait(_POLL_S):
        try:
            line = _check_application(settings)
            is_ready = _is_ready(url) if url else getattr(application_status(settings.name), "status", "") == "RUNNING"
        except ClusterSilent as exc:
            silences += 1
            if silences == _MAX_SILENCES:
                raise
            line, is_ready = f"{exc.problem}, which happens on a busy machine; waiting", False
        else:
            silences = 0
        if is_ready:
            console.print(f"ready after {told.age_s():.0f} s")
            return
        told.tell(line)


class _Told:
    """Prints each new line, and an old one again, with the seconds so far, when nothing new has come for `_SILENCE_S`."""

    def __init__(self) -> None:
        self._began = self._told_at = time.monotonic()
        self._line = ""

    def age_s(self) -> float:
        return time.monotonic() - self._began

    def tell(self, line: str) -> None:
        now = time.monotonic()
        if line == self._line and now - self._told_at < _SILENCE_S:
            return
        console.print(f"  {line}" + (f" ({self.age_s():.0f} s)" if line == self._line else ""))
        self._line, self._told_at = line, now


def _is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/readyz", timeout=2).status_code == 200
    except requests.RequestException:
        return False


def _check_application(settings: Settings) -> str:
    """Return one line about the deployments.

    Raises:
        ClusterFailed: Serve gave the deployment up, or Ray is dead.
    """
    refuse_dead_ray()
    status = application_status(settings.name)
    if status is None:
        return "waiting for Ray Serve"
    if status.status == "DEPLOY_FAILED":
        hint = own_reasons({name: d.message for name, d in status.deployments.items()}, settings.name, status.message)
        raise ClusterFailed(problem="the application did not come up", hint=hint)
    return _states(status) or "waiting for Ray Serve"


def _states(status: Any) -> str:
    """Return how many replicas of each deployment are in which state; empty without deployments."""
    return "; ".join(f"{name} {_counts(deployment)}" for name, deployment in status.deployments.items())


def _counts(deployment: Any) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in deployment.replica_states.items() if count) or "0"


def _say_ready(settings: Settings) -> None:
    url = settings.ingress.local_url
    model = next(iter(settings.models))
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0'
    key = " -H 'authorization: Bearer KEY'" if settings.ingress.api_keys_file else ""
    chat = f'{{"model": "{model}", {question}'
    name = "" if settings.name == "serve-app" else f" {settings.name}"
    typer.echo(f"""
serving {", ".join(settings.models)} at {url}

curl {url}/v1/models{key}
curl {url}/v1/chat/completions{key} -H 'content-type: application/json' \\
  -d '{chat}}}'
curl -N {url}/v1/chat/completions{key} -H 'content-type: application/json' \\
  -d '{chat}, "stream": true}}'

Ctrl-C stops it; `serve-app status{name}` shows the fleet.
""")
