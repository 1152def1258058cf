"""``serve-app top`` draws the fleet as an ingress reports it by ``GET /fleet``, again every few seconds."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli.status import asked_by_http
from serve_app.errors import ClusterFailed
from serve_app.ui.changes import MAX_KNOWN, Happening, changes, is_older, short
from serve_app.ui.replicas import Report, models_of, ready_of, ready_of_all, replicas_of, target_of

SHOWN = 8
"""Most happenings below the tables, the newest first."""


def top(url: str, key: str, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Run `serve-app top`.

    Raises:
        ClusterFailed: The ingress refuses or does not answer the first request. Later failures are shown, and the next look tries again.
    """
    report = asked_by_http(url, key)
    console = Console(highlight=False)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    elif once or not console.is_terminal:  # rich draws no screen into a pipe: it would stay empty for ever
        console.print(screen(report, None, changes(None, report)))
    else:
        _watch(report, url, key, interval_s, console)


def _watch(report: Report, url: str, key: str, interval_s: float, console: Console) -> None:
    happened = changes(None, report)
    with Live(screen(report, None, happened), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    now = asked_by_http(url, key)
                except ClusterFailed as exc:
                    live.update(Group(Text(str(exc), style="red"), screen(report, None, happened)), refresh=True)
                    continue
                if is_older(now, report):
                    continue
                happened = [*happened, *changes(report, now, happened)][-MAX_KNOWN:]
                live.update(screen(now, report, happened), refresh=True)
                report = now
        except KeyboardInterrupt:
            return


def screen(report: Report, before: Report | None, happened: Sequence[Happening]) -> Group:
    """Return the screen's content. Engine steps per second need the report ``before``."""
    at = datetime.fromtimestamp(report["time"], UTC)
    ingresses = [m for m in report["members"] if m["role"] == "ingress"]
    names = models_of(report)
    replicas = [replica for name in names for replica in replicas_of(report, name)]
    loads = [replica.member["load"] for replica in replicas if replica.member is not None]
    running, waiting = (sum(load[count] for load in loads) for count in ("running", "waiting"))
    queued = sum(load["waiting"] for m in ingresses for load in m["load"].get("models", {}).values())
    head = f"{report['url']}  {at:%H:%M:%S} UTC  {' '.join(ready_of_all(report))}"
    counts = f"{running} running, {waiting} waiting at engines, {queued} waiting at ingresses"
    parts: list[Any] = [Text(head, style="bold"), Text(counts)]
    for name in names:
        parts += _model(name, before, report)
    parts.append(_ingresses(ingresses))
    parts += [Text(f"{h.clock()}  {h.text}") for h in reversed(happened[-SHOWN:])]
    return Group(*parts)


def _model(name: str, before: Report | None, report: Report) -> list[Any]:
    """Return the table of the model's replicas with a lease, and a line for each that starts or is lost."""
    steps = {} if before is None else {m["replica_id"]: m["load"].get("steps", 0) for m in before["members"]}
    took_s = 0.0 if before is None else report["time"] - before["time"]
    title = name if target_of(report, name) is None else f"{name}: {ready_of(report, name)}"
    table = _table(title, ("replica", "state", "address"), ("running", "waiting", "KV", "steps/s", "start"))
    replicas = replicas_of(report, name)
    for m in (replica.member for replica in replicas):
        if m is None:
            continue
        load, known = m["load"], steps.get(m["replica_id"])
        rate = "" if known is None or took_s <= 0 else f"{max(0, load['steps'] - known) / took_s:.1f}"
        cells = (
            str(load["running"]),
            str(load["waiting"]),
            _bar(load["kv_usage"]),
            rate,
            f"{load['start_s']:.0f} s" if "start_s" in load else "",
        )
        table.add_row(*_common(m), *cells)
    if not table.rows:
        table.add_row("none", *[""] * 7)
    absent = [replica for replica in replicas if replica.member is None]
    return [table, *(Text(f"{short(r.replica_id)}  {r.state} {r.doing}", style=_STYLES[r.state]) for r in absent)]


_STYLES = {"starting": "blue", "lost": "red"}


def _ingresses(ingresses: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("ingresses", ("ingress", "state", "address"), ("streams", "waiting", "resumed", "moved"))
    for m in sorted(ingresses, key=lambda m: str(m["replica_id"])):
        models = m["load"].get("models", {}).values()
        counts = (sum(load[count] for load in models) for count in ("waiting", "resumptions", "moved"))
        table.add_row(*_common(m), str(m["load"].get("streams", 0)), *map(str, counts))
    return table


def _common(member: Mapping[str, Any]) -> tuple[Text, Text, Text]:
    """Return cells of text, without markup for brackets: names come from the service."""
    state = Text(member["state"], style="green" if member["state"] == "ready" else "yellow")
    return Text(short(member["replica_id"])), state, Text(f"{member['host']}:{member['port']}")


def _bar(share: float) -> str:
    """Return a share of 0 to 1 as five characters and percent."""
    full = round(5 * min(1.0, max(0.0, share)))
    return f"{'█' * full}{'░' * (5 - full)} {share:>4.0%}"


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(
        title=Text(f"\n{title}"), title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
