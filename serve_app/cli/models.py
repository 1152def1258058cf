"""``serve-app models`` lists the models of a running fleet, and loads, unloads, pins and updates one of them."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.options import AsJson
from serve_app.environment import as_typed
from serve_app.errors import ClusterFailed, ModelFailed

if TYPE_CHECKING:  # `--help` loads none of these modules
    from serve_app.cli.model_rows import ModelRow
    from serve_app.cli.running import Running
    from serve_app.config import ModelSettings

app = typer.Typer(help="List the models of a running fleet; load, unload, pin and update one.", no_args_is_help=True)

POLL_S = 0.5
SETTLE_S = 1.0
"""Seconds between two entries, so that Serve notices the first entry alone: its controller looks every 0.1 s."""
console = Console(stderr=True, highlight=False, soft_wrap=True)


Model = Annotated[str, typer.Argument(help="Name of the model, as requests name it.", show_default=False)]
Name = Annotated[str, typer.Option(help="Name of the application; on Kubernetes, of the release.")]
Address = Annotated[
    str, typer.Option(help="Ray cluster to ask, `auto` on a node of it; empty: the one `serve-app up` started here.")
]
TimeoutS = Annotated[
    float, typer.Option(help="Seconds after which the command stops waiting; the change itself continues.", min=1)
]


@app.command(name="list")
def list_models(name: Name = "serve-app", address: Address = "", as_json: AsJson = False) -> None:
    """Show each configured model: its state, ready and wanted replicas, bounds, requests (running+waiting), and a start's duration."""
    from serve_app.cli.model_rows import COLUMNS, rows
    from serve_app.cli.running import running
    from serve_app.cli.status import print_table

    now = running(name, address)
    found = list(rows(now, _report(now)))
    if as_json:
        typer.echo(json.dumps([row.json() for row in found], indent=2))
        return
    table = Console(highlight=False)
    print_table(table, "", COLUMNS, [row.cells() for row in found])
    for row in found:
        if row.message:  # not a cell: a reason of several lines would become a narrow column of broken words
            table.print(f"\n{row.model}: {row.message}", markup=False)


@app.command()
def load(model: Model, name: Name = "serve-app", address: Address = "", timeout_s: TimeoutS = 1800.0) -> None:
    """Start a replica of a model that has none, and wait until it takes requests.

    From then on the model is scaled as always: `replicas.min` holds again after an `unload`, and a model with `replicas.min: 0` is unloaded
    again when no requests arrive for it, unless it is pinned.
    """
    from serve_app.cli.model_rows import THERE
    from serve_app.cli.running import running

    now = running(name, address)
    settings = _scaled(now, model, "it is always loaded")
    least = max(now.minimum(settings) if now.is_pinned(settings) else 0, settings.replicas.min)
    _set_bounds(now, settings, max(1, least))
    try:
        row = _follow(now, model, lambda row: row.ready > 0 and row.state in THERE, timeout_s)
    except ModelFailed:
        if not least:
            _set_bounds(now, settings, 0)
        raise
    except (ClusterFailed, KeyboardInterrupt):
        if not least:  # without the bound Serve would give the start up
            console.print(f"{model} continues to load, and stays pinned until: {as_typed()} models pin {model} --off")
        raise
    if not least:
        _set_bounds(now, settings, 0)
    typer.echo(f"{model} is loaded: {row.ready} of {row.target} replicas")


@app.command()
def unload(model: Model, name: Name = "serve-app", address: Address = "", timeout_s: TimeoutS = 1800.0) -> None:
    """Stop all replicas of a model, and wait for their end. Running streams end first; no token is lost.

    The next request loads the model again, and so does `load`. Until `load`, the model may have no replica, whatever `replicas.min` is.
    """
    from serve_app.cli.running import hand_over, look, running

    now = running(name, address)
    settings = _scaled(now, model, "it cannot be unloaded")
    if now.is_pinned(settings):
        raise ClusterFailed(f"{model!r} is pinned", f"first: {as_typed()} models pin {model} --off")
    if settings.required:
        problem = f"{model!r} is required, so without a replica no ingress would be ready, for no model"
        raise ClusterFailed(problem, f"set models.{model}.required: false")
    order = _entry(settings, 0, initial=0)
    if now.with_entry(order) == now:  # a killed `unload` has left this entry, and Serve acts only on entries that differ
        _set_bounds(now, settings, 0)
        time.sleep(SETTLE_S)
    hand_over(look(now.settings.name).with_entry(order).serve)
    try:
        row = _follow(now, model, lambda row: row.state == "unloaded" or row.target > 0, timeout_s, began=SETTLE_S)
    finally:
        _set_bounds(now, settings, 0)
    if row.target:
        raise ClusterFailed(f"a request has loaded {model!r} again", "keep requests away from it, or unload it again")
    typer.echo(f"{model} is unloaded; the next request loads it again")


@app.command()
def pin(
    model: Model,
    off: Annotated[bool, typer.Option("--off", help="Undo it: from now on `replicas.min` holds again.")] = False,
    name: Name = "serve-app",
    address: Address = "",
    timeout_s: TimeoutS = 1800.0,
) -> None:
    """Keep at least one replica of a model: it is never scaled to zero, and never taken away for another model's turn."""
    from serve_app.cli.model_rows import THERE
    from serve_app.cli.running import running

    now = running(name, address)
    settings = _scaled(now, model, "it always has that many")
    if off:
        _set_bounds(now, settings, settings.replicas.min)
        kept = f", and has at least {settings.replicas.min} replicas, by replicas.min" if settings.replicas.min else ""
        typer.echo(f"{model} is not pinned{kept}")
        return
    _set_bounds(now, settings, max(1, settings.replicas.min))
    _follow(now, model, lambda row: row.ready > 0 and row.state in THERE, timeout_s)
    typer.echo(f"{model} is pinned")


@app.command()
def update(
    model: Model,
    to: Annotated[
        str, typer.Option("--model", help="What to load: `embedded:NAME`, an absolute path, or a Hugging Face id.")
    ] = "",
    revision: Annotated[str, typer.Option(help="Revision at the hub: engine_args.revision.")] = "",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A configuration file: the model gets its settings in this file.")
    ] = None,
    name: Name = "serve-app",
    address: Address = "",
    context: Annotated[str | None, typer.Option(help="Kubernetes: a context of the kubeconfig.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Kubernetes: the release's namespace.")] = None,
    timeout_s: TimeoutS = 1800.0,
) -> None:
    """Give a model other weights, another revision or other settings, replica by replica; wait until all replicas and ingresses have them.

    Exit status 1: Serve has given the update up, or the update was not complete after --timeout-s and continues without this command.

    On Kubernetes the release holds the configuration: with --namespace or --context this prints the commands that change it there.
    """
    from serve_app.cli.model_rows import THERE
    from serve_app.cli.model_update import Update, changed, way_back, where_to_look
    from serve_app.cli.running import hand_over, running
    from serve_app.cli.startable import refuse_missing_checkpoint

    if not (to or revision or file):
        raise typer.BadParameter("give a change: --model, --revision or --file")
    if context is not None or namespace is not None:
        _print_commands(name, model, to, revision, file, context=context, namespace=namespace)
        return
    now = running(name, address)
    before = now.model(model)
    wanted = now.with_settings(changed(now.settings, model, to, revision, file))
    after = wanted.model(model)
    if before == after:
        step = Update(model, frozenset())
        if not (waits := step.rest(_report(now))):
            typer.echo(f"{model} has these settings already; nothing was changed")
            return
        typer.echo(f"{model} has these settings already, and the update to them is not complete: {waits}", err=True)
    else:
        if now.url:  # the cluster's only node is this machine
            refuse_missing_checkpoint(after)  # without it each ingress would fail, for all models
        step = Update(model, frozenset(lease["replica_id"] for lease in _report(now)["members"]))
        hand_over(wanted.serve)
    try:
        _follow(wanted, model, lambda row: row.state in (*THERE, "unloaded"), timeout_s, began=SETTLE_S, rest=step.rest)
    except ClusterFailed as exc:
        hint = (
            f"{exc.hint}\nsee its progress: {where_to_look(name, address)}"
            f"\nold replicas that serve continue; the way back: {way_back(before, file, name=name, address=address)}"
        )
        raise ClusterFailed(exc.problem, hint) from exc
    typer.echo(f"{model} is updated on all replicas and ingresses; the file with which the fleet was started is unchanged")


def _print_commands(
    name: str, model: str, to: str, revision: str, file: Path | None, *, context: str | None, namespace: str | None
) -> None:
    """Print the commands that change a Helm release."""
    from serve_app.cli.model_update import kubernetes_commands

    if file is not None:
        raise typer.BadParameter(
            "on Kubernetes change the values and upgrade: only --model and --revision are printed as commands"
        )
    for line in kubernetes_commands(name, model, to, revision, context=context, namespace=namespace):
        typer.echo(line)


def _scaled(now: "Running", name: str, always: str) -> "ModelSettings":
    """Return the model's settings.

    Raises:
        ClusterFailed: There is no such model, or its number of replicas is fixed.
    """
    model = now.model(name)
    if not model.replicas.is_scaled:
        problem = f"{name!r} has a fixed number of replicas (replicas.min and max are {model.replicas.max}): {always}"
        raise ClusterFailed(
            problem, f"to change that set models.{name}: {{required: false, replicas: {{min: 0, max: {model.replicas.max}}}}}"
        )
    return model


def _entry(model: "ModelSettings", minimum: int, initial: int | None = None) -> Mapping[str, Any]:
    from serve_app.application import bounds_entry

    return bounds_entry(model, minimum=minimum, initial=initial)


def _set_bounds(now: "Running", model: "ModelSettings", minimum: int) -> None:
    """Change the smallest number of replicas, in Serve's config of this moment."""
    from serve_app.cli.running import hand_over, look

    hand_over(look(now.settings.name).with_entry(_entry(model, minimum)).serve)


def _report(now: "Running") -> dict[str, Any]:
    from serve_app.cli.status import collect

    return collect(now.settings.name, now.url)


def _look(now: "Running", model: str) -> "tuple[ModelRow, dict[str, Any]]":
    """Return the model's row, and the report from which it was made."""
    from serve_app.cli.model_rows import rows

    report = _report(now)
    return next(row for row in rows(now, report) if row.model == model), report


def _follow(
    now: "Running",
    model: str,
    is_done: "Callable[[ModelRow], bool]",
    timeout_s: float,
    *,
    began: float = 0.0,
    rest: Callable[[Mapping[str, Any]], str] = lambda report: "",
) -> "ModelRow":
    """Print the progress until ``is_done`` and ``rest`` returns "", and return the last row.

    Args:
        began: Seconds in which the earlier state may still be shown.
        rest: Returns what else is waited for, from the report of `status.collect`.

    Raises:
        ModelFailed: The model's replicas fail.
        ClusterFailed: ``timeout_s`` have passed, Ray does not answer, or ``rest`` raises it.
    """
    deadline, said = time.monotonic() + timeout_s, ""
    time.sleep(began)
    while True:
        row, report = _look(now, model)
        is_there = is_done(row)
        if row.state == "failed" and not is_there:
            raise ModelFailed(f"{model!r} has failed", row.message)
        waits = f"; {left}" if (left := rest(report)) else ""
        if is_there and not waits:
            return row
        if time.monotonic() >= deadline:
            problem = f"{model!r} is {row.state} after {timeout_s:g} s{waits}"
            raise ClusterFailed(problem, f"the change continues: {as_typed()} models list")
        line = (
            f"{model}: {row.state}, {row.ready} of {row.target} replicas, {row.running} requests run, {row.waiting} wait{waits}"
        )
        line += f"; {row.message}" if row.message else ""
        if line != said:
            console.print(f"  {line}", markup=False)
            said = line
        time.sleep(POLL_S)
