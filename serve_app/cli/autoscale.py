"""``serve-app autoscale`` shows what the autoscaler decided and why, and replays its log under other rules."""

import dataclasses
import gzip
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from serve_app.environment import as_typed
from serve_app.errors import DecisionLogError

if TYPE_CHECKING:
    from serve_app.autoscaling.decision_log import Record
    from serve_app.autoscaling.simulation.replay import Result
    from serve_app.config import Settings

app = typer.Typer(help="Show what the autoscaler decided and why, and replay it under other rules.", no_args_is_help=True)

WIDTH = 200
"""Most characters of a line."""
LEAST_S = 60
"""Shortest piece of a log that is simulated, in seconds."""
FAR_ATTAINMENT, FAR_REPLICA_S = 0.05, 0.15
"""Largest differences between a log and its own simulation: of the attainment, and of the replica-seconds (relative). Beyond them a
simulation under other rules proves nothing."""
MAX_FIGURE = 1e15
"""Largest count, time or size that a log can have; a larger one means damage."""
MEASURED = ("requests_per_s", "demand", "growth", "queue_s", "step_s", "output_token_s", "prompt_token_s", "cold_start_s")
"""Inputs of a decision that are always finite. Some of the other inputs are limits, which may be infinite."""
OFF_S = 5.0
"""A record describes the time of so many seconds after it."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Name = Annotated[str, typer.Argument(help="Name of the application.")]
Address = Annotated[str, typer.Option(help="Ray cluster to ask, `auto` on a node of it; empty: the one `serve-app up` started.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="A log that `log --json` has written; no cluster is asked.")]
Since = Annotated[str, typer.Option(help="How far back, for example 90s, 15m, 2h or 1d. Default: 1h; the whole of a file.")]
Model = Annotated[str, typer.Option(help="Only this model; `(ingresses)` for the ingresses.")]


@app.command()
def log(
    name: Name = "serve-app",
    address: Address = "",
    file: File = None,
    since: Since = "",
    model: Model = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole log, a record a line: input of the other commands.")
    ] = False,
) -> None:
    """List the decisions that changed a number of replicas."""
    if as_json and file is not None and since:
        raise typer.BadParameter("a file is printed whole with --json: leave --since out", param_hint="--since")
    text = _text(name, address, file, since)
    if as_json:
        for line in text.splitlines():  # line by line: with Python's output unbuffered, one whole write hides a full disk
            typer.echo(line)
        return
    records = _known(_since(_read(text), since), model)
    rows = list(_changes(records, model))
    if not rows:
        typer.echo(f"no change in {_span(records)}")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("time", "model", "replicas", "rule", "demand", "queue", "ready in"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _print(table)


@app.command()
def explain(
    name: Name = "serve-app",
    address: Address = "",
    file: File = None,
    since: Since = "",
    model: Model = "",
    at: Annotated[str, typer.Option(help="Explain what held at this time, as `log` prints it. Default: the last decision.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rule, inputs and alternatives of each decision as JSON.")
    ] = False,
) -> None:
    """Explain in words and numbers why there are as many replicas as there are."""
    from serve_app.autoscaling.decision_log import row_of
    from serve_app.cli.decision_text import explanation

    record = _at(records := _known(_read(_text(name, address, file, since)), model), at)
    _check_figures(record, model)
    if as_json:
        decided = {key: row_of(decision) for key, decision in record.decided.items() if model in ("", key)}
        typer.echo(json.dumps({"time": record.time, "decided": decided}, indent=2))
        return
    with _makes_sense(record):
        shown = [key for key in sorted(record.decided) if model in ("", key)]
        typer.echo("\n\n".join("\n".join(explanation(record, key, records)) for key in shown))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A log that `log --json` has written.")],
    policy: Annotated[Path | None, typer.Option(help="Another configuration: what would it have done?")] = None,
) -> None:
    """Decide again from a log: with this code, which must give the same; or with --policy, on simulated replicas."""
    from serve_app.autoscaling.decision_log import stretches
    from serve_app.config import read_text

    settings = _settings(policy) if policy is not None else None
    records = _read(read_text(file))
    found = list(stretches(records))
    if not found:
        raise DecisionLogError("nothing in it can be decided again: there is no snapshot", "take 10 minutes or more of the log")
    if left := len(records) - sum(map(len, found)):
        typer.echo(f"left out: {left} of {len(records)} records, after a gap or before the first snapshot", err=True)
    with _makes_sense(records[0]):
        if policy is None or settings is None:
            _replay_same(found)
        else:
            _replay_other(max(found, key=len), settings, policy.name)


def _settings(policy: Path) -> "Settings":
    """Return another configuration. The command line has two files, so an error names the file that it is about."""
    from serve_app.config import load_settings
    from serve_app.errors import ConfigError

    try:
        return load_settings(policy)
    except ConfigError as exc:
        raise dataclasses.replace(exc, path=f"{policy}: {exc.path}" if exc.path else "") from exc


def _replay_same(found: "Sequence[Sequence[Record]]") -> None:
    from serve_app.autoscaling.decision_log import decided_again, differing

    records = [record for stretch in found for record in stretch]
    again = [pair for stretch in found for pair in decided_again(stretch)]
    changed = [(record, decided, names[0]) for record, decided in again if (names := differing(record, decided))]
    if not changed:
        typer.echo(f"records: {len(records)}, {_span(records)}, decided again: all the same")
        return
    record, decided, name = changed[0]
    typer.echo(f"decided differently: {len(changed)} of {len(records)} records, the first at {clock(record.time)}")
    typer.echo(f"  logged     {name}: {record.decided.get(name)}\n  this code  {name}: {decided.get(name)}")
    raise typer.Exit(1)


def _replay_other(records: "Sequence[Record]", settings: "Settings", label: str) -> None:
    from serve_app.autoscaling.rules import rules_of
    from serve_app.autoscaling.simulation.replay import again, lived, measured
    from serve_app.config.schedule import bounds_at

    if records[-1].time - records[0].time < LEAST_S:
        raise DecisionLogError(f"only {_span(records)} is without a gap", f"take a piece of {LEAST_S} s or more")
    models = settings.models
    known = measured(records)
    for name in sorted(records[0].seen.models.keys() - known):
        typer.echo(f"left out: model {name!r}, whose replicas were never measured: it had too little load", err=True)
    if not known:
        raise DecisionLogError("no model's replicas were measured in it", "take a longer piece, with at least a minute of load")
    if unknown := [name for name in known if name not in models]:
        raise DecisionLogError(f"{label} has no model {unknown[0]!r}, and the log has", f"models of {label}: {', '.join(models)}")

    def logged_bounds(name: str, record: "Record", cold_start_s: float) -> tuple[int, int]:
        seen = record.seen.models[name]
        return seen.minimum, seen.maximum

    def other_bounds(name: str, record: "Record", cold_start_s: float) -> tuple[int, int]:
        replicas = models[name].replicas
        return bounds_at(replicas.schedule, (replicas.min, replicas.max), time=record.time, cold_start_s=cold_start_s)

    assert records[0].scaler is not None
    own = records[0].scaler.rules
    slo_s = {name: own.models[name].slo.ttft_s for name in known}
    queue = settings.ingress.max_waiting_requests
    simulate = partial(again, records, no_replica_s=settings.timeouts.no_replica_s, max_waiting_requests=queue)
    results = {
        "as it ran": {name: lived(records, name) for name in known},
        "same, simulated": simulate(own, logged_bounds),
        f"{label}, simulated": simulate(rules_of(settings), other_bounds),
    }
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
    _print(table)
    for name in slo_s:
        lived, simulated = (by_model[name] for by_model in list(results.values())[:2])
        off = abs(simulated.replica_s - lived.replica_s)
        if abs(simulated.attainment - lived.attainment) > FAR_ATTAINMENT or off > FAR_REPLICA_S * lived.replica_s:
            typer.echo(
                f"{name}: the simulation is far from what happened (compare its first two rows): the last row proves nothing"
            )


def _print(table: Table) -> None:
    """Print whole lines, however narrow the terminal: users copy and search times and rules."""
    Console(highlight=False, markup=False, width=WIDTH).print(table)


def clock(time: float) -> str:
    """Return a time in seconds since the epoch in UTC, as `--at` takes it."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _span(records: "Sequence[Record]") -> str:
    return f"{clock(records[0].time)} to {clock(records[-1].time)}"


def _changes(records: "Sequence[Record]", model: str) -> Iterator[tuple[str, ...]]:
    from serve_app.autoscaling.decision_log import follows
    from serve_app.autoscaling.fleet import INGRESSES

    before: Record | None = None
    for record in records:
        if before is not None and not follows(record, before):
            before = None
        for name, decision in record.decided.items():
            seen = record.seen.ingress if name == INGRESSES else record.seen.models.get(name)
            known = before.decided.get(name) if before is not None else None
            last = known.desired if known is not None else seen.target if seen is not None else decision.desired
            if last == decision.desired or model not in ("", name):
                continue
            demand, load = decision.inputs.get("demand"), getattr(seen, "load", None)
            yield (
                clock(record.time),
                name,
                f"{last} -> {decision.desired}",
                decision.wish,
                "" if demand is None else f"{demand:.2f}",
                "" if load is None else f"{load.waiting + load.queued:.0f}",
                "" if decision.ready_at is None else f"{decision.ready_at - record.seen.at:.0f} s",
            )
        before = record


def _at(records: "Sequence[Record]", at: str) -> "Record":
    if not at:
        return records[-1]
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise typer.BadParameter(f"{at!r} is not a time; write it as {clock(records[-1].time)}", param_hint="--at") from None
    time = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    # `log` prints whole seconds: a record belongs to the second in which it was written.
    found = next((r for r in reversed(records) if r.time < time + 1), None)
    if found is None or time - found.time > OFF_S:
        raise DecisionLogError(f"nothing is logged at {at}", f"the log reaches from {_span(records)}; --since goes further back")
    return found


def _read(text: str) -> "list[Record]":
    from serve_app.autoscaling.decision_log import read

    records, num_unreadable = read(text.splitlines())
    if num_unreadable:
        typer.echo(f"left out: {num_unreadable} lines that are not records of this version", err=True)
    if not records:
        problem = "nothing in it is a record of this version" if num_unreadable else "the log is empty"
        raise DecisionLogError(
            problem, f"logs are written by `{as_typed()} autoscale log --json`, of an application that is scaled"
        )
    return records


def _since(records: "list[Record]", since: str) -> "list[Record]":
    """Return the records of the last ``since``. An export begins earlier, at a snapshot."""
    began = records[-1].time - _seconds(since) if since else -math.inf
    return [record for record in records if record.time >= began]


def _known(records: "list[Record]", model: str) -> "list[Record]":
    known = sorted({name for record in records for name in record.decided})
    if model and model not in known:
        raise DecisionLogError(f"nothing was decided for {model!r}", f"decided for: {', '.join(known)}")
    return records


def _check_figures(record: "Record", model: str) -> None:
    """Refuse impossible quantities of the model, or of all models, before the others are shown as facts."""
    for key, decision in record.decided.items():
        if model not in ("", key):
            continue
        seen = record.seen.models.get(key)
        load = {} if seen is None else dataclasses.asdict(seen.load)
        for name, value in {**load, **{name: decision.inputs.get(name) for name in MEASURED}}.items():
            if isinstance(value, float) and not abs(value) <= MAX_FIGURE:
                wrong = f"record {record.number} has {name} {value:g} for {key!r}"
                raise DecisionLogError(wrong, "the log is damaged: take another piece, or another --at")


@contextmanager
def _makes_sense(record: "Record") -> Iterator[None]:
    """Turn the exceptions that a damaged log causes into one sentence."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as exc:
        where = f"from record {record.number} at {clock(record.time)} on"
        raise DecisionLogError(f"{where} the log makes no sense: {type(exc).__name__} {exc}", "take another piece") from exc


def _text(name: str, address: str, file: Path | None, since: str) -> str:
    from serve_app.config import read_text

    since_s = _seconds(since or "1h")
    return _fetch(name, address, since_s) if file is None else read_text(file)


def _seconds(duration: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", duration)
    if found is None:
        raise typer.BadParameter(f"{duration!r} is not a duration; write for example 15m or 2h", param_hint="--since")
    return float(int(found[1]) * SECONDS[found[2]])


def _fetch(name: str, address: str, since_s: float) -> str:
    """Return the log of the last ``since_s`` seconds, from the disk of the head node."""
    from serve_app.cli.cluster import RAY_LIMIT_S, connect_to_run, within

    connect_to_run(name, address)
    import ray  # not earlier: Ray reads the token when it is imported
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    task = ray.remote(num_cpus=0, resources={HEAD_NODE_RESOURCE_NAME: 0.001}, max_retries=0)(_export)
    try:
        packed, names = within(RAY_LIMIT_S, lambda: ray.get(task.remote(name, since_s)))
    except ray.exceptions.RayError as exc:
        raise DecisionLogError(
            f"the log of {name!r} cannot be read on the head node: {str(exc).splitlines()[-1]}", "try again"
        ) from exc
    if packed is None and within(RAY_LIMIT_S, lambda: _is_fixed(name)):
        why = f"for each model of {name!r}, and for its ingresses, min = max: nothing is decided, so there is no log"
        raise DecisionLogError(why, "give a model a replicas.max above its replicas.min")
    if packed is None:
        others = f"logged there: {', '.join(names)}" if names else "an application logs as soon as it is scaled"
        raise DecisionLogError(f"no application {name!r} has a log there", others)
    return gzip.decompress(packed).decode()


def _is_fixed(name: str) -> bool:
    """Return whether the connected cluster runs an application of that name in which nothing may be scaled."""
    from ray.serve.context import _get_global_client

    application = _get_global_client().get_serve_details()["applications"].get(name, {})
    config = application.get("deployed_app_config")
    return config is not None and not config.get("autoscaling_policy")


def _export(name: str, since_s: float) -> tuple[bytes | None, list[str]]:
    """Return the log, and the applications that have a log. This runs on the head node, beside Serve's controller."""
    import time

    from serve_app.autoscaling.decision_log import export, files, log_path

    path, every = log_path(name), log_path("*")
    assert path is not None  # this is a Ray worker
    assert every is not None
    names = sorted(p.name.removeprefix("autoscaling_").removesuffix(".jsonl") for p in every.parent.glob(every.name))
    return export(path, time.time() - since_s) if files(path) else None, names
