"""``serve-app up`` starts a Ray cluster (or takes an existing one) and the application on it, and serves until Ctrl-C."""

import contextlib
import logging
import math
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
from serve_app.cli.check import file_problems
from serve_app.cli.cluster import RAY_LIMIT_S, RunState, connect, local_cluster, members, ray_token, refuse_dead_ray, within
from serve_app.cli.deaths import print_deaths_in_one_line
from serve_app.cli.rayservice import own_reasons
from serve_app.cli.running import hand_over
from serve_app.cli.settings_file import read_settings, refuse
from serve_app.cli.startable import refuse_hopeless_start, refuse_name_in_use
from serve_app.cli.ui import pages
from serve_app.config import Settings
from serve_app.config.timeouts import broken_rules, timeouts_of
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed, ClusterSilent, ConfigError

_POLL_S = 0.5
_WATCH_S = 5.0
_REMOVE_MARGIN_S = 60.0
_SILENCE_S = 15.0
"""Longest time without a line during a start or a stop; then the last line is printed again."""
_MAX_SILENCES = 4
"""Number of calls in a row that Ray's control plane may leave unanswered, for `RAY_LIMIT_S` each, before a start is given up.

One such call means little while engines load: at a load of 70 on two cores Ray once took longer than 30 s with all its processes alive.
"""
console = Console(stderr=True, highlight=False, soft_wrap=True)

Change = tuple[int, str, bool]
"""A change of the file of tenants or keys: `last_change` of the ingress, and whether all of the file is in force."""


def up(file: Path, address: str, *, demo: bool = False) -> None:
    """Run `serve-app up`.

    Raises:
        ConfigError: A ``demo``, whose fleet page offers to kill an engine, is asked for on a cluster.
    """
    if demo and address:
        raise ConfigError("--demo", "kills engines, and a cluster's belong to others too", "leave --address out, or --demo")
    settings = read_settings(file)
    refuse(file, file_problems(settings, here=not address))
    for broken in broken_rules(timeouts_of(settings)):  # not refused: `serve-app check --ignore` allows each rule to be broken
        console.print(f"warning: {broken.rule}: {broken.problem}; {broken.hint}", style="yellow", markup=False)
    stop, cut = threading.Event(), threading.Event()
    with _cluster(settings, address) as ray_address:
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray's start, which sets handlers of its own
            signal.signal(number, lambda got, _: _interrupted(stop, cut, cuts=got == signal.SIGINT))
        with running(settings, ray_address, stop, cut, here=not address):
            if not stop.is_set():
                _say_ready(settings)
            with pages(settings, console, demo=demo):
                _watch(settings, stop)
    console.print("stopped")


def _watch(settings: Settings, stop: threading.Event) -> None:
    """Return when ``stop`` is set. If the control plane does not answer, wait for it: the fleet serves without it.

    Raises:
        ClusterFailed: Serve gave the application up and no ingress runs, or this process's own Ray is dead.
    """
    silent, failure, seen = False, "", frozenset[Change]()
    while not stop.wait(_WATCH_S):
        try:
            _check_application(settings)
            seen = _watch_keys_file(settings, seen)
        except ClusterSilent as exc:
            if not silent:
                console.print(f"{exc.problem}: running replicas continue, and nothing is replaced until Ray answers")
            silent = True
        except ClusterFailed as exc:
            if not _has_ingress(settings):
                raise
            if exc.hint != failure:
                console.print(f"an update has failed, and the replicas that served before continue:\n{exc.hint}")
            silent, failure = False, exc.hint
        else:
            silent, failure = False, ""


def _watch_keys_file(settings: Settings, seen: frozenset[Change]) -> frozenset[Change]:
    """Print changes of the file of tenants or keys that are not in ``seen``, as the ingresses judge them. Return their last changes."""
    if not settings.ingress.needs_keys:
        return seen
    leases = within(RAY_LIMIT_S, lambda: members(settings.name))
    loads = [lease["load"] for lease in leases if lease["role"] == "ingress"]
    found: set[Change] = {(*load.get("tenants_file_change", (0, "")), load.get("tenants_file_in_force", True)) for load in loads}
    for _, said, is_whole in sorted(found - seen):
        if said:
            console.print(said, style=None if is_whole else "yellow", markup=False)
    return frozenset(found) or seen


def _has_ingress(settings: Settings) -> bool:
    """Return whether an ingress runs although Serve gave the application up, as after a failed `serve-app models update`."""
    refuse_dead_ray()
    status = application_status(settings.name)
    ingresses = None if status is None else status.deployments.get(INGRESS)
    return ingresses is not None and bool(ingresses.replica_states.get("RUNNING"))


def _interrupted(stop: threading.Event, cut: threading.Event, *, cuts: bool) -> None:
    """Handle a signal. The first signal: drain and stop. A later signal that ``cuts``: do not wait for streams."""
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
            try:
                _refuse_too_few_gpus(settings)
                logs = Path(os.environ["TMPDIR"], "ray", "session_latest", "logs")
                print_deaths_in_one_line(console, logs)
                console.print(f"logs: {logs}/serve (removed at the end)")
                yield ray_address
            finally:
                console.print("ending Ray's processes")


def _refuse_too_few_gpus(settings: Settings) -> None:
    """Raise ClusterFailed if the smallest fleet needs more GPUs than Ray's only node has: its replicas would wait for ever."""
    import ray

    needed = math.ceil(sum(m.gpu_share() * m.replicas.min for m in settings.models.values()))
    if needed > (has := ray.cluster_resources().get("GPU", 0.0)):
        raise ClusterFailed(
            problem=f"the smallest fleet of this file needs {needed} GPU and this machine has {has:g}",
            hint="lower gpus_per_replica or replicas.min, or start it on a cluster with --address",
        )


def _refuse_occupied_cluster() -> None:
    """Raise ClusterFailed if the cluster serves anything: Serve would replace it by our application, which we remove at our end."""
    from ray import serve

    if others := sorted(serve.status().applications):
        raise ClusterFailed(
            problem=f"this Ray cluster serves already: {', '.join(others)}",
            hint=f"use a cluster of its own, or add the output of {as_typed()} config serve to the cluster's Serve file",
        )


@contextlib.contextmanager
def running(
    settings: Settings, ray_address: str, stop: threading.Event, cut: threading.Event, *, here: bool = True
) -> Iterator[None]:
    """Deploy the application and wait until it is ready; on leaving, drain and remove it.

    Args:
        stop: When set, no longer wait for readiness.
        cut: When set, no longer wait for streams.
        here: Whether the ingress is on this machine. If so, its URL reports readiness; if not, Serve's status does.

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
    """Hand the application to Serve on the connected cluster; return at once."""
    from ray.serve._private.api import serve_start

    from serve_app.application import serve_config

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the lines of _wait_ready show what Serve does
    serve_start(proxy_location="Disabled")
    hand_over(serve_config(settings))


def remove(settings: Settings, cut: threading.Event, *, here: bool) -> None:
    """Drain and remove the application and its lease board. Serve ends a drain that takes longer than ``drain_s``.

    Args:
        cut: When set, no longer wait for streams. Members are killed until Serve has no application; then the lease board is killed.
        here: Whether the cluster ends after this, with everything left in it.
    """
    import ray
    from ray import serve

    from serve_app.membership import board_name

    refuse_dead_ray()
    within(RAY_LIMIT_S, lambda: serve.delete(settings.name, _blocking=False))
    deadline = time.monotonic() + settings.timeouts.drain_s + _REMOVE_MARGIN_S
    progress = _ProgressLines()
    while (status := application_status(settings.name)) is not None and time.monotonic() < deadline:
        if left := _states(status):
            progress.show(f"left: {left}")
        if cut.wait(_POLL_S):
            if here:
                return
            within(RAY_LIMIT_S, lambda: _kill_members(settings.name))
            time.sleep(_POLL_S)
    with contextlib.suppress(ValueError):
        within(RAY_LIMIT_S, lambda: ray.kill(ray.get_actor(board_name(settings.name), namespace=settings.name)))


def _kill_members(name: str) -> None:
    """Kill the application's ingresses and replicas, as Serve does at the end of a drain.

    A member that stayed alive would make a new lease board. While Serve deletes an application, Serve's details name no replicas; Ray's
    list of actors does.
    """
    import ray
    from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX
    from ray.serve._private.constants import SERVE_NAMESPACE

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == SERVE_NAMESPACE and actor["name"].startswith(f"{REPLICA_ID_FULL_ID_STR_PREFIX}{name}#"):
            with contextlib.suppress(ValueError):  # the actor has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=SERVE_NAMESPACE))


def application_status(name: str) -> Any:
    """Return Serve's status of the application; None if there is no such application.

    Raises:
        ClusterFailed: Ray does not answer.
    """
    from ray import serve

    return within(RAY_LIMIT_S, lambda: serve.status().applications.get(name))


def serve_details(name: str) -> dict[str, Any]:
    """Return deployment -> Serve's details of it; empty if there is no such application.

    Raises:
        ClusterFailed: Ray does not answer.
    """
    from ray.serve.context import _get_global_client

    applications = within(RAY_LIMIT_S, lambda: _get_global_client().get_serve_details()["applications"])
    return dict(applications.get(name, {}).get("deployments", {}))


def _wait_ready(settings: Settings, url: str, stop: threading.Event) -> None:
    """Return when the application is ready, or ``stop`` is set.

    Raises:
        ClusterFailed: `_check_application` raised it, or Ray's control plane has not answered `_MAX_SILENCES` times in a row.
    """
    progress, silences = _ProgressLines(), 0
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
            console.print(f"ready after {progress.age_s():.0f} s")
            return
        progress.show(line)


class _ProgressLines:
    """Prints each new line. If no new line comes for `_SILENCE_S`, it prints the last line again, with the seconds so far."""

    def __init__(self) -> None:
        self._began = self._shown_at = time.monotonic()
        self._line = ""

    def age_s(self) -> float:
        return time.monotonic() - self._began

    def show(self, line: str) -> None:
        now = time.monotonic()
        if line == self._line and now - self._shown_at < _SILENCE_S:
            return
        console.print(f"  {line}" + (f" ({self.age_s():.0f} s)" if line == self._line else ""))
        self._line, self._shown_at = line, now


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
    """Return the number of replicas in each state, for each deployment; empty without deployments."""
    return "; ".join(f"{name} {_counts(deployment)}" for name, deployment in status.deployments.items())


def _counts(deployment: Any) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in deployment.replica_states.items() if count) or "0"


def _say_ready(settings: Settings) -> None:
    url = settings.ingress.local_url
    model = next(iter(settings.models))
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0'
    key = " -H 'authorization: Bearer KEY'" if settings.ingress.needs_keys else ""
    chat = f'{{"model": "{model}", {question}'
    name = "" if settings.name == "serve-app" else f" {settings.name}"
    pages = "" if settings.ui is None else f"The chat page starts now: http://127.0.0.1:{settings.ui.port}/ in half a minute.\n"
    typer.echo(f"""
serving {", ".join(settings.models)} at {url}

curl {url}/v1/models{key}
curl {url}/v1/chat/completions{key} -H 'content-type: application/json' \\
  -d '{chat}}}'
curl -N {url}/v1/chat/completions{key} -H 'content-type: application/json' \\
  -d '{chat}, "stream": true}}'

{pages}Ctrl-C stops it; `{as_typed()} status{name}` shows the fleet.
""")
