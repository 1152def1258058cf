"""``serve-app status`` and ``serve-app down``."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.cli.cluster import connect, find_run, interrupt, members

Name = Annotated[str, typer.Argument(help="Name of the application.")]


def down(name: Name = "serve-app") -> None:
    """Stop a running `serve-app up`: streams end first, then everything goes."""
    state = find_run(name)
    interrupt(state.pid)
    typer.echo(f"{name} stopped")


def status(
    name: Name = "serve-app",
    address: Annotated[str, typer.Option(help="Ray cluster to ask; empty: the one `serve-app up` started here.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show ingresses, replicas, models, load and versions."""
    url = token = ""
    if not address:
        state = find_run(name)
        address, url, token = state.ray_address, state.url, state.ray_token
    connect(address, name, token)
    report = collect(name, url)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report, Console(highlight=False))


def collect(name: str, url: str) -> dict[str, Any]:
    """Return what is known of the application: Serve's deployments and the members' own words."""
    from serve_app.cli.up import application_status

    application = application_status(name)
    deployments = {} if application is None else application.deployments
    return {
        "name": name,
        "url": url,
        "status": "NOT_FOUND" if application is None else str(application.status.value),
        "deployments": {
            key: {"status": str(d.status.value), "message": d.message, "replica_states": dict(d.replica_states)}
            for key, d in deployments.items()
        },
        "members": members(name),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as two tables."""
    console.print(f"{report['name']}: {report['status']}  {report['url']}")
    deployments = Table("deployment", "status", "replicas", "message")
    for name, d in report["deployments"].items():
        states = ", ".join(f"{count} {state.lower()}" for state, count in d["replica_states"].items() if count)
        deployments.add_row(name, d["status"], states or "0", d["message"])
    console.print(deployments)
    table = Table("member", "role", "model", "state", "address", "load", "vllm", "pid")
    for lease in sorted(report["members"], key=lambda m: (m["role"], m["model"], m["replica_id"])):
        address = f"{lease['host']}:{lease['port']}"
        load = _load(lease)
        row = (lease["replica_id"], lease["role"], lease["model"] or "-", lease["state"], address, load)
        table.add_row(*row, lease["vllm_version"], str(lease["pid"]))
    console.print(table)


def _load(lease: dict[str, Any]) -> str:
    load = lease["load"]
    if lease["role"] == "ingress":
        waiting = sum(m["waiting"] for m in load.get("models", {}).values())
        return f"{load.get('streams', 0)} streams, {waiting} waiting"
    return f"{load['running']} running, {load['waiting']} waiting, KV {load['kv_usage']:.0%}, {load['links']} links"
