"""``serve-app autoscale``: what the autoscaler decided, why, and what it would have come to under other rules."""

import gzip
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from serve_app.errors import DecisionLogError

if TYPE_CHECKING:
    from serve_app.config import Settings
    from serve_app.decision_log import Log, Record
    from serve_app.simulated.replay import Bounds, Result

app = typer.Typer(help="What the autoscaler decided, why, and what else it would have come to.", no_args_is_help=True)

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Name = Annotated[str, typer.Argument(help="Name of the application.")]
Address = Annotated[str, typer.Option(help="Ray cluster to ask, `auto` on a node of it; empty: the one `serve-app up` started.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="A log that `log --json` has written; then nothing is asked.")]
Since = Annotated[str, typer.Option(help="How far back, for example 90s, 15m, 2h or 1d.")]
Model = Annotated[str, typer.Option(help="Only this model; `(ingresses)` for the ingresses.")]


@app.command()
def log(
    name: Name = "serve-app",
    address: Address = "",
    file: File = None,
    since: Since = "1h",
    model: Model = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole log, a record a line: input of the other commands.")
    ] = False,
) -> None:
    """List the decisions that changed a number of replicas."""
    text = _text(name, address, file, since)
    if as_json:
        typer.echo(text, nl=False)
        return
    records = _read(text).records
    rows = list(_changes(records, model))
    if not rows:
        typer.echo(f"no change in {_span(records)}")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("time", "model", "replicas", "rule", "demand", "queue", "ready in"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


@app.command()
def explain(
    name: Name = "serve-app",
    address: Address = "",
    file: File = None,
    since: Since = "1h",
    model: Model = "",
    at: Annotated[str, typer.Option(help="Explain what held at this time, as `log` prints it. Default: the last decision.")] = "",
) -> None:
    """Say in words and numbers why there are as many replicas as there are."""
    from serve_app.cli.explanation import explanation

    records = _read(_text(name, address, file, since)).records
    record = _at(records, at)
    known = sorted(record.decided)
    if model and model not in known:
        raise DecisionLogError(f"nothing was decided for {model!r} at {clock(record.time)}", f"decided for: {', '.join(known)}")
    typer.echo("\n\n".join("\n".join(explanation(record, key)) for key in known if model in ("", key)))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A log that `log --json` has written.")],
    policy: Annotated[Path | None, typer.Option(help="Another configuration: what would it have come to?")] = None,
) -> None:
    """Decide again from a log: with this code, which must give the same; or with --policy, on simulated replicas."""
    from serve_app.config import load_settings

    records = _read(_file_text(file)).records
    if policy is None:
        _replay_same(records)
    else:
        _replay_other(records, load_settings(policy), policy.name)


def _replay_same(records: "Sequence[Record]") -> None:
    from serve_app.decision_log import decided_again

    changed = [(record, decided) for record, decided in decided_again(records) if decided != record.decided]
    if not changed:
        typer.echo(f"{len(records)} records of {_span(records)}: decided again, all the same")
        return
    record, decided = changed[0]
    name = next(name for name in decided if decided[name] != record.decided.get(name))
    typer.echo(f"{len(changed)} of {len(records)} records are decided differently, the first at {clock(record.time)}:")
    typer.echo(f"  logged     {name}: {record.decided.get(name)}\n  this code  {name}: {decided[name]}")
    raise typer.Exit(1)


def _replay_other(records: "Sequence[Record]", settings: "Settings", label: str) -> None:
    from serve_app.config_sections.schedule import bounds_at
    from serve_app.core.autoscaling import DEFAULT_COLD_START_S
    from serve_app.core.cold_starts import p90
    from serve_app.deployments import rules_of
    from serve_app.simulated.replay import again, lived

    models = {m.name: m for m in settings.models}
    logged = sorted(records[0].seen.models)
    if unknown := [name for name in logged if name not in models]:
        raise DecisionLogError(f"{label} has no model {unknown[0]!r}, and the log has", f"models of {label}: {', '.join(models)}")

    def logged_bounds(name: str, record: "Record") -> tuple[int, int]:
        seen = record.seen.models[name]
        return seen.minimum, seen.maximum

    def other_bounds(name: str, record: "Record") -> tuple[int, int]:
        replicas = models[name].replicas
        cold_start_s = p90(record.seen.models[name].load.cold_start_s) or DEFAULT_COLD_START_S
        return bounds_at(replicas.schedule, (replicas.min, replicas.max), time=record.time, cold_start_s=cold_start_s)

    assert records[0].scaler is not None
    own = records[0].scaler.rules
    slo_s = {name: own.models[name].slo.ttft_s for name in logged}
    results = {"as it ran": {name: lived(records, name) for name in logged}}
    bounds: Bounds
    for policy, rules, bounds in (
        ("same, simulated", own, logged_bounds),
        (f"{label}, simulated", rules_of(settings), other_bounds),
    ):
        results[policy] = again(
            records,
            rules,
            bounds,
            no_replica_s=settings.timeouts.no_replica_s,
            max_waiting_requests=settings.ingress.max_waiting_requests,
        )
    typer.echo(f"{_span(records)}. Simulated: the same arrivals on replicas with the step times that the log measured.")
    _print_results(results, slo_s)


def _print_results(results: "dict[str, dict[str, Result]]", slo_s: dict[str, float]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("model", "policy", "first token in time", "TTFT p95", "replica-s", "changes", "most"):
        table.add_column(column, overflow="fold")
    for name, limit_s in slo_s.items():
        for policy, by_model in results.items():
            result = by_model[name]
            p95 = "" if result.ttft_p95_s is None else f"{result.ttft_p95_s:.2f} s"
            cells = (
                f"{result.attainment:.2%} in {limit_s:g} s",
                p95,
                f"{result.replica_s:,.0f}",
                str(result.changes),
                str(result.most),
            )
            table.add_row(name, policy, *cells)
    Console(highlight=False).print(table)


def clock(time: float) -> str:
    """Return a time in seconds since the epoch in UTC, as `--at` takes it."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _span(records: "Sequence[Record]") -> str:
    return f"{clock(records[0].time)} to {clock(records[-1].time)}"


def _changes(records: "Sequence[Record]", model: str) -> Iterator[tuple[str, ...]]:
    before: dict[str, int] = {}
    for record in records:
        for name, decision in record.decided.items():
            known = before.get(name)
            before[name] = decision.desired
            if known in (None, decision.desired) or model not in ("", name):
                continue
            demand = decision.inputs.get("demand")
            seen = record.seen.models.get(name)
            yield (
                clock(record.time),
                name,
                f"{known} -> {decision.desired}",
                decision.rule,
                "" if demand is None else f"{demand:.2f}",
                "" if seen is None else f"{seen.load.waiting + seen.load.queued:.0f}",
                "" if decision.ready_at is None else f"{decision.ready_at - record.seen.at:.0f} s",
            )


def _at(records: "Sequence[Record]", at: str) -> "Record":
    if not at:
        return records[-1]
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise typer.BadParameter(f"{at!r} is no time; write it as {clock(records[-1].time)}", param_hint="--at") from None
    time = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    # `log` prints whole seconds: a record belongs to the second that it fell in.
    if (found := next((r for r in reversed(records) if r.time < time + 1), None)) is None or time > records[-1].time + 1:
        raise DecisionLogError(f"{at} is not in the log", f"it reaches from {_span(records)}; --since goes further back")
    return found


def _read(text: str) -> "Log":
    from serve_app.decision_log import read

    found = read(text.splitlines())
    for count, what in (
        (found.num_unreadable, "lines are no records of this version and were left out"),
        (found.num_without_snapshot, "records come before the first snapshot, or after a gap, and were left out"),
    ):
        if count:
            typer.echo(f"{count} {what}", err=True)
    if not found.records:
        problem = "there is no decision in the log" if not found.num_unreadable else "nothing in it is a record of this version"
        raise DecisionLogError(problem, "logs are written by `serve-app autoscale log --json`, of an application that is scaled")
    return found


def _text(name: str, address: str, file: Path | None, since: str) -> str:
    if file is not None:
        return _file_text(file)
    found = re.fullmatch(r"([0-9]+)([smhd])", since)
    if found is None:
        raise typer.BadParameter(f"{since!r} is no duration; write for example 15m or 2h", param_hint="--since")
    return _fetch(name, address, int(found[1]) * SECONDS[found[2]])


def _file_text(file: Path) -> str:
    from serve_app.config import read_text

    return read_text(file)


def _fetch(name: str, address: str, since_s: float) -> str:
    """Return the log of the last ``since_s`` seconds, from the disk of the head node."""
    import ray
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    from serve_app.cli.cluster import RAY_LIMIT_S, connect, find_run, within

    token = ""
    if not address:
        state = find_run(name)
        address, token = state.ray_address, state.ray_token
    connect(address, name, token)
    task = ray.remote(num_cpus=0, resources={HEAD_NODE_RESOURCE_NAME: 0.001}, max_retries=0)(_export)
    packed: bytes = within(RAY_LIMIT_S, lambda: ray.get(task.remote(name, since_s)))
    return gzip.decompress(packed).decode()


def _export(name: str, since_s: float) -> bytes:
    """Runs on the head node, beside Serve's controller."""
    import time

    from serve_app.decision_log import export, log_path

    path = log_path(name)
    assert path is not None  # this is a Ray worker
    return export(path, time.time() - since_s)
