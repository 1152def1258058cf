"""The command `serve-app-loadtest` parses its arguments and imports the rest only when needed, so `--help` and mistakes answer at once.

Exit status: 0 pass, 1 SLO missed, 2 usage, 3 invalid run, 4 audit mismatch, 5 undecided.
"""

import errno
import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from loadtest.errors import AuditMismatch, ExitCode, LoadtestError, UsageError
from loadtest.inputs import read_text
from loadtest.outputs import Outputs
from loadtest.plan.overrides import overrides, scenario_of
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.records import State
from loadtest.wire.target import API_KEY_VARIABLE, Target, trust
from loadtest.wording import shown

app = typer.Typer(
    name="serve-app-loadtest",
    help="Load tests of OpenAI-style endpoints that print no figure which the run does not support. Exit status: 0 pass, "
    "1 SLO missed, 2 usage, 3 invalid run, 4 audit mismatch, 5 undecided.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of one that comes with it.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="key=value over the scenario, as arrival.rate=8; repeatable.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Load generator processes.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Another seed is another schedule.")]
TraceFile = Annotated[Path | None, typer.Option("--schedule", help="Write the requests to it: a trace for `serve-app plan`.")]
KeyFile = Annotated[Path | None, typer.Option(help="File with the key; default: LOADTEST_API_KEY.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""File errors that the user can fix. Any other error with a file's name is a bug of this program."""
MAX_ERROR = 4000
"""Printed characters of an error; an error of an invalid run has several reasons."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of the commands that send requests; `sends_load` declares them."""

    target: Annotated[str, typer.Option("--target", help="Like http://127.0.0.1:8000.")]
    out: Annotated[Path | None, typer.Option("--out", help="Folder, new or empty; default results/<scenario>-<time>.")] = None
    api_key_file: KeyFile = None
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificates (PEM) to trust instead of the system's file; as SSL_CERT_FILE.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Default: the scenario's, else the first that the target lists.")] = None
    sets: Set = None
    workers: Workers = None
    seed: Seed = None

    def over(self) -> dict[str, Any]:
        """Return the options that replace values of the scenario, apart from ``sets``."""
        return {"model": self.model, "workers": self.workers, "seed": self.seed}

    def asked(self) -> Target:
        """Return the target; from now on every process of the run trusts ``ca_file``."""
        os.environ.update(trust(self.ca_file))
        return Target(self.target, api_key(self.api_key_file))


def sends_load(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command the options of `LoadOptions` in place of its parameter ``load``."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "load"]
    shared = inspect.signature(LoadOptions, eval_str=True).parameters

    @functools.wraps(command)
    def call(**values: Any) -> None:
        load = LoadOptions(**{name: values.pop(name) for name in shared})
        command(load=load, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (own[0], *shared.values(), *own[1:])]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


@app.command()
def plan(scenario: ScenarioFile, sets: Set = None, workers: Workers = None, seed: Seed = None, to: TraceFile = None) -> None:
    """Print what a scenario costs and what it can show, before anything is sent.

    Example: serve-app-loadtest plan chat-qps-4 --set duration_s=600
    """
    from loadtest.judge.plan import make_plan
    from loadtest.plan.schedule import written_schedule

    loaded = scenario_of(scenario, sets, workers=workers, seed=seed)
    typer.echo("\n".join(make_plan(loaded, written_schedule(loaded, to)).lines()))


@app.command()
def schema(markdown: Annotated[bool, typer.Option(help="A page for people instead: docs/scenario.md.")] = False) -> None:
    """Print the JSON Schema of a scenario file with a description of each key; editors use it to check a file.

    Example: serve-app-loadtest schema > scenario.schema.json
    """
    from loadtest.plan.reference import json_schema, page

    typer.echo(page() if markdown else json_schema(), nl=False)


@app.command()
@sends_load
def run(
    scenario: ScenarioFile,
    load: LoadOptions,
    below_pid: Annotated[int | None, typer.Option(help="Faults may touch processes below this one.")] = None,
    report: Annotated[bool, typer.Option(help="Write the HTML page.")] = True,
    bind: Annotated[str, typer.Option(help="Wait at HOST:PORT for workers that `locust --worker` starts elsewhere.")] = "",
    wait_s: Annotated[float, typer.Option(help="For all of them.", min=1)] = 120.0,
    judge_later: Annotated[bool, typer.Option(help="Exit with 0 once there are results; `verdict` judges them.")] = False,
    repeat: Annotated[
        int, typer.Option(help="So many runs, with this seed and those that follow, pooled as pool does.", min=1)
    ] = 1,
) -> None:
    """Run a scenario against a target, and write records, summary and report into one folder.

    Example: serve-app-loadtest run chat-qps-4 --target http://127.0.0.1:8000 --set slo=ttft_p99=500ms
    """
    from loadtest.control.faults import below
    from loadtest.control.processes import Elsewhere

    loaded = scenario_of(scenario, load.sets, **load.over())
    loaded = loaded.model_copy(update={"faults": below(loaded.faults, below_pid)})
    elsewhere = Elsewhere.at(bind, wait_s) if bind else None
    if repeat == 1:
        _run(loaded, load, report=report, elsewhere=elsewhere, judge_later=judge_later)
    if bind or judge_later:
        raise UsageError(
            "--repeat", f"{repeat} does not go with --bind or --judge-later: workers elsewhere end with the first run"
        )
    from loadtest.control.repeat import repeat as repeat_runs
    from loadtest.control.runner import default_out

    where = load.out or default_out(loaded)
    raise typer.Exit(repeat_runs(loaded, load.asked(), where, repeat, command=_command(), say=typer.echo, report=report))


@app.command()
def pool(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs of one scenario, each with its own seed.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Pool replicates: one 95 % interval per figure, from what differs between the runs. Exit status: that of the SLO over all of them.

    Example: serve-app-loadtest pool results/chat/seed-*
    """
    from msgspec.json import encode, format

    from loadtest.judge.replicates import pool as pool_runs

    pooled = pool_runs(runs)
    typer.echo(format(encode(pooled)).decode() if json else "\n".join(pooled.lines()))
    raise typer.Exit(pooled.exit_code())


@app.command()
def verdict(run_folder: Run) -> None:
    """Judge the records of a run again: print the verdict, and exit with its status.

    Example: serve-app-loadtest verdict results/chat
    """
    from loadtest.control.progress import print_verdict
    from loadtest.judge.analysis import analyse
    from loadtest.records import read_manifest
    from loadtest.seal import without_digest
    from loadtest.wording import NEVER_STARTED, VERDICTS

    manifest = read_manifest(run_folder)
    if manifest.state == "running":
        way_out = "wait for its end; `report` shows the records so far"
        raise UsageError(str(run_folder), f"the run continues, or was killed with all its processes: {way_out}")
    has_rows = (run_folder / "rows.jsonl").exists()
    if manifest.state == "interrupted" and not (manifest.epoch_unix_s or manifest.problems or has_rows):
        typer.echo(NEVER_STARTED)
        raise typer.Exit(ExitCode.UNDECIDED)
    summary = analyse(run_folder)
    summary.threats.extend(without_digest(run_folder, manifest))
    print_verdict(summary, manifest, run_folder)
    raise typer.Exit(VERDICTS[summary.verdict].code)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def locust(ctx: typer.Context, api_key_file: KeyFile = None) -> None:
    """Start Locust with this kit: its web UI, --headless, or a --worker of a master elsewhere. All other options are Locust's own.

    Example: serve-app-loadtest locust --worker --master-host 10.0.0.7
    """
    from loadtest.control.processes import LOCUST

    os.environ[API_KEY_VARIABLE] = api_key(api_key_file)
    os.execv(sys.executable, [*LOCUST, *ctx.args])


@app.command()
@sends_load
def saturate(
    scenario: ScenarioFile,
    load: LoadOptions,
    slo: Annotated[str, typer.Option("--slo", help="Limits, or a preset: ttft_p99=500ms,itl_p99=80ms.")] = "",
    start_rate: Annotated[float, typer.Option(help="Of the first probe; 0: the scenario's.")] = 0.0,
    step: Annotated[float, typer.Option(help="Bisect until rates differ by this share.", min=0.001)] = 0.03,
    max_requests: Annotated[int, typer.Option(help="Per rate.", min=1)] = 20_000,
    max_probes: Annotated[int, typer.Option(help="In all.", min=1)] = 80,
) -> None:
    """Search the highest rate that keeps an SLO, and state it as an interval.

    Example: serve-app-loadtest saturate chat-qps-4 --target http://127.0.0.1:8000 --slo ttft_p99=500ms,itl_p99=80ms
    """
    from loadtest.control.runner import default_out
    from loadtest.control.saturate import saturate as search_capacity
    from loadtest.judge.search import SearchSettings

    loaded = scenario_of(scenario, load.sets, **load.over(), slo=slo or None)
    settings = SearchSettings(
        start_rate=start_rate or getattr(loaded.arrival, "rate", 1.0),
        quantiles=tuple(limit.quantile for limit in loaded.slo.limits),
        step=step,
        max_requests=max_requests,
        max_probes=max_probes,
        seed=loaded.seed,
    )
    where = load.out or default_out(loaded)
    raise typer.Exit(search_capacity(loaded, load.asked(), where, settings, command=_command(), say=typer.echo))


@app.command()
@sends_load
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="CSV or JSONL file of recorded requests.")],
    load: LoadOptions,
    speed: Annotated[float, typer.Option(help="2 replays twice as fast.")] = 1.0,
    dequantise_s: Annotated[float, typer.Option(help="Spread times recorded in steps of this length.")] = 0.0,
    duration_s: Annotated[float, typer.Option(help="Of the replay: later requests are left out.")] = 600.0,
) -> None:
    """Send the requests of a recorded trace at their recorded times.

    Example: serve-app-loadtest replay conversations.csv --target http://127.0.0.1:8000 --speed 2
    """
    arrival = {"law": "trace", "file": str(trace.absolute()), "speed": speed, "dequantise_s": dequantise_s}
    values: dict[str, Any] = {"name": "replay", "arrival": arrival, "duration_s": duration_s}
    values |= {"requests": [{"endpoint": "chat", "prompt": "text"}]}
    values |= {"warmup_s": 0.0} | overrides(values, load.sets or (), **load.over())
    _run(parse_scenario(values), load)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of a run of the same schedule.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Compare invalid runs too, with that mark.")] = False,
) -> None:
    """Compare two runs of one schedule: ratios A / B with intervals; those that exclude 1 are differences.

    Example: serve-app-loadtest compare results/before results/after
    """
    from loadtest.judge.compare import compare as compare_runs

    typer.echo("\n".join(compare_runs(a, b, anyway=anyway).lines()))


@app.command()
def audit(
    run_folder: Run,
    reference: Annotated[Path | None, typer.Option(help="Run of the same schedule whose texts must be the same.")] = None,
    server_log: Annotated[
        list[Path] | None,
        typer.Option(
            help="Log of the server, a line per request with its X-Request-Id, or the folder of serve-app's ledger; repeatable."
        ),
    ] = None,
    id_key: Annotated[str, typer.Option(help="Key of the id in JSON lines of that log; default: anywhere in the line.")] = "",
    log_lines: Annotated[str, typer.Option(help="Only lines of that log with these words count.")] = "",
    allow: Annotated[list[str] | None, typer.Option(help="A state that is no finding, as timeout; repeatable.")] = None,
) -> None:
    """Check that schedule, client and server agree about every request.

    Example: serve-app-loadtest audit results/chat --server-log truth.jsonl
    """
    from loadtest.audit.audit import audit as audit_run
    from loadtest.audit.server_log import ServerLog

    allowed = frozenset(state for state in get_args(State) if state in (allow or ()))
    if wrong := set(allow or ()) - allowed:
        raise UsageError("--allow", f"{min(wrong)!r} is not one of {', '.join(get_args(State))}")
    log = ServerLog(server_log, id_key, log_lines) if server_log else None
    result = audit_run(run_folder, reference=reference, server_log=log, allow=allowed)
    typer.echo(result.table())
    if not result.ok:
        raise AuditMismatch(sum(result.counts.values()), result.lines()[0])


@app.command()
def report(
    run_folder: Run,
    other: Annotated[Path | None, typer.Option(help="A second run to set beside it.")] = None,
) -> None:
    """Make summary and report of a run again from its records; print the page's path.

    Example: serve-app-loadtest report results/after --other results/before
    """
    from loadtest.records import read_manifest
    from loadtest.report.report import write_report

    try:
        typer.echo(write_report(run_folder, other=other))
    except OSError as exc:
        raise UsageError(
            str(run_folder), f"the report cannot be written: {exc.strerror}; call `report` again when it can"
        ) from exc
    if (run_folder / "manifest.json").exists() and read_manifest(run_folder).state == "running":
        typer.echo("note: the run continues, or was killed with all its processes; these are the records so far", err=True)


@app.command()
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter checks.")] = False,
    only: Annotated[str, typer.Option(help="Names of checks, as T3,T4.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder, new or empty, for the records and selftest.json.")] = None,
) -> None:
    """Measure the generator against a server whose latencies are known. Exit status 3: a check failed.

    Example: serve-app-loadtest selftest --quick
    """
    from loadtest.proof.selftest import selftest as run_selftest

    raise typer.Exit(run_selftest(quick=quick, only=only, out=out))


def _run(scenario: Scenario, load: LoadOptions, *, judge_later: bool = False, **options: Any) -> None:
    from loadtest.control.runner import default_out
    from loadtest.control.runner import run as run_scenario

    code = run_scenario(scenario, load.asked(), load.out or default_out(scenario), command=_command(), **options)
    raise typer.Exit(0 if judge_later else code)


def _command() -> list[str]:
    return ["serve-app-loadtest", *sys.argv[1:]]


def api_key(file: Path | None) -> str:
    """Return the key in the file, else in LOADTEST_API_KEY, else none.

    Raises:
        UsageError: The file cannot be read.
    """
    if file is None:
        return os.environ.get(API_KEY_VARIABLE, "")
    return read_text(file).strip()


def main() -> None:
    """Run the command and exit with its status; an error is one line on stderr."""
    # Python's own handler would exit with 1, which means that an SLO was missed. A run installs its own handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    outputs = Outputs()
    status = _status()
    if lost := outputs.lost():
        typer.secho(f"error: not all could be printed: {lost}", fg="red", err=True)
        status = status or ExitCode.USAGE
    sys.exit(status)


def _status() -> int:
    """Run the command; return its exit status."""
    try:
        app()
    except SystemExit as exc:
        return int(exc.code or 0)
    except LoadtestError as exc:
        typer.secho(f"error: {shown(str(exc), MAX_ERROR)}", fg="red", err=True)  # the message may quote the target
        return exc.exit_code
    except Exception as exc:  # the root: Python would exit with 1 here too
        if not (isinstance(exc, OSError) and exc.filename and exc.errno in _OF_A_DISK):
            traceback.print_exc()
            return ExitCode.INVALID
        way_out = "free space on its disk, or see that it can be read and written, and try again"
        typer.secho(f"error: {shown(str(exc.filename))}: {exc.strerror}; {way_out}", fg="red", err=True)
        return ExitCode.USAGE
    return ExitCode.PASS


if __name__ == "__main__":
    main()
