"""The runner takes one run from scenario to verdict: folder, schedule, Locust's processes, scrapes and faults, analysis, report.

The generator has its own processes, which only make load (`loadtest.control.processes`). The runner's process scrapes the target, injects
faults and shows progress, so that none of these delays a request.
"""

import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from loadtest.control.faults import FaultRunner, check_faults, relay_needed
from loadtest.control.observe import Observer
from loadtest.control.processes import Elsewhere, Generator, caught_signals
from loadtest.control.progress import Progress, print_verdict
from loadtest.errors import ExitCode, InvalidRun, UsageError
from loadtest.judge.analysis import analyse
from loadtest.judge.summary import read_summary
from loadtest.plan.request_class import RECORDED
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.schedule import Schedule, make_schedule
from loadtest.plan.workload import load_tokenizer
from loadtest.recorder import Recorder, as_lines, claim, give_up, replace_file, write_json, write_manifest
from loadtest.records import Machine, Manifest, Row, RunEvent, TokenCount, read_lines, read_manifest
from loadtest.seal import SCENARIO, scenario_digest
from loadtest.wire.relay import Relay
from loadtest.wire.target import Target, preflight
from loadtest.wording import NEVER_STARTED, VERDICTS

LATE_S = 60.0
"""Time after the drain for the generator to hand over its rows; then it is ended."""


def run(
    scenario: Scenario,
    target: Target,
    out: Path,
    *,
    command: Sequence[str] = (),
    quiet: bool = False,
    report: bool = True,
    elsewhere: Elsewhere | None = None,
) -> ExitCode:
    """Run the scenario against the target, write everything to ``out``, and return the exit code.

    Args:
        command: The command that repeats the run, for the manifest.
        quiet: No progress and no verdict on the terminal.
        report: Also write the HTML page and its figures.
        elsewhere: Wait at this address for ``scenario.workers`` workers instead of starting them.

    Raises:
        UsageError: The folder is not empty, or scenario or target cannot be used; no request was sent.
        InvalidRun: The generator could not be started, or the folder was removed in mid-run.
    """
    schedule = _prepare(scenario, target, out, command, elsewhere)
    try:
        return _run_prepared(scenario, target, out, schedule, elsewhere, quiet=quiet, report=report)
    except UsageError as exc:  # a file that the kit wrote itself, so this is no mistake of the command line
        raise InvalidRun([f"records were removed or changed during the run, and are lost: {exc}"]) from exc


def _run_prepared(
    scenario: Scenario,
    target: Target,
    out: Path,
    schedule: Schedule,
    elsewhere: Elsewhere | None,
    *,
    quiet: bool,
    report: bool,
) -> ExitCode:
    with ExitStack() as stack:
        signals = stack.enter_context(caught_signals())
        beside = stack.enter_context(Beside(scenario, target, out))
        generator = stack.enter_context(Generator(scenario.workers, replace(target, base_url=beside.url), out, elsewhere))
        progress = stack.enter_context(Progress(out, scenario, schedule, quiet=quiet))
        limit_s = scenario.duration_s + scenario.drain_s + LATE_S
        failed: list[str] = []
        try:
            generator.wait(signals, limit_s=limit_s, on_start=[beside.start, progress.start], each=progress.update)
        except InvalidRun as exc:
            failed = exc.reasons
        beside.stop()
    if generator.killed_by and not read_manifest(out).epoch_unix_s:
        return _never_started(out, quiet=quiet)
    settle(out, [*(failed or generator.last_words()), *beside.problems], beside.not_begun)
    if failed and not (out / "rows.jsonl").exists():
        raise InvalidRun(failed)
    return conclude(out, quiet=quiet, report=report)


def _never_started(out: Path, *, quiet: bool) -> ExitCode:
    write_manifest(out, msgspec.structs.replace(read_manifest(out), state="interrupted"))
    if not quiet:
        print(NEVER_STARTED, file=sys.stderr, flush=True)
    return ExitCode.UNDECIDED


def _prepare(scenario: Scenario, target: Target, out: Path, command: Sequence[str], elsewhere: Elsewhere | None) -> Schedule:
    """As `prepare`, but also tell workers elsewhere if there is no run: else they would seek a master for five minutes and fail."""
    if elsewhere is None:
        return prepare(scenario, target, out, command=command)
    try:
        if relay_needed(scenario):
            raise UsageError(
                "faults", "cut-link cuts a relay on this machine, which workers elsewhere do not pass; leave out --bind"
            )
        return prepare(scenario, target, out, command=command)
    except UsageError as exc:
        print(f"no run: {exc}", file=sys.stderr, flush=True)
        with caught_signals() as signals, Generator(scenario.workers, target, Path(os.devnull), elsewhere) as generator:
            generator.dismiss(signals)
        raise


def prepare(scenario: Scenario, target: Target, out: Path, *, command: Sequence[str]) -> Schedule:
    """Check the target and write schedule and manifest to the new folder ``out``.

    Raises:
        UsageError: As `run`.
    """
    check_faults(scenario.faults, scenario.duration_s + scenario.drain_s)
    _check_tokenizer(scenario)
    schedule = make_schedule(scenario)
    model, target_info = check_target(scenario, target)
    is_new = claim(out)
    described = scenario.model_dump(mode="json")
    manifest = Manifest(
        state="running",
        scenario=described,
        sealed={SCENARIO: scenario_digest(described)},
        schedule_sha256=schedule.sha256,
        num_scheduled=len(schedule.requests),
        num_left_out=schedule.num_left_out,
        num_after_end=schedule.num_after_end,
        target=target.base_url,
        model=model,
        epoch_unix_s=0.0,
        command=list(command),
        workers=scenario.workers,
        versions=versions(),
        machine=machine(),
        target_info=target_info,
    )
    try:
        schedule.write(out / "schedule.jsonl")
        write_manifest(out, manifest)
    except OSError as exc:
        give_up(out, ["schedule.jsonl", "manifest.json"], is_new=is_new)
        raise UsageError(str(out), f"cannot be written: {exc.strerror}; free space there, or take another --out") from exc
    return schedule


def check_target(scenario: Scenario, target: Target) -> tuple[str, dict[str, Any]]:
    """Return the manifest's ``model`` and ``target_info``.

    Raises:
        UsageError: The target does not answer, or does not list a model that requests name.
    """
    named = {f"requests.{number}.model": cls.model for number, cls in enumerate(scenario.requests) if cls.model}
    # If each class names its own model, no request names the target's first model.
    model = next(iter(named.values())) if len(named) == len(scenario.requests) else scenario.model
    return preflight(target, model, named)


def _check_tokenizer(scenario: Scenario) -> None:
    """Check the tokenizer before the run: an error while the answers are counted would lose the run."""
    if not scenario.tokenizer:
        return
    if not scenario.keep_text:
        raise UsageError("keep_text", "false leaves nothing that the tokenizer could count; leave out one of the two")
    load_tokenizer(scenario.tokenizer)


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("serve-app", "locust", "gevent")} | {"python": platform.python_version()}


def machine() -> Machine:
    """Return a description of the machine that makes the load, for readers of the figures."""
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def settle(out: Path, problems: Sequence[str], not_begun: Sequence[str] = ()) -> None:
    """Add to the manifest how the generator's processes ended, and the faults that did not happen.

    Args:
        not_begun: Faults whose time had not come; they are problems unless the run was interrupted.

    Raises:
        InvalidRun: The manifest is gone or cannot be written.
    """
    try:
        manifest = read_manifest(out)
    except UsageError as exc:
        raise InvalidRun([f"the records are lost: {exc}", *problems]) from exc
    if manifest.state == "finished":
        problems = [*problems, *not_begun]
    if manifest.state == "running":
        lost = "the generator ended before it could say how the run went"
        manifest = msgspec.structs.replace(manifest, state="interrupted", problems=[*manifest.problems, lost, *problems])
    elif problems:
        manifest = msgspec.structs.replace(manifest, problems=[*manifest.problems, *problems])
    else:
        return
    try:
        write_manifest(out, manifest)
    except OSError as exc:
        raise InvalidRun([*manifest.problems, f"{out}: {exc.strerror}"]) from exc


def conclude(out: Path, *, quiet: bool = False, report: bool = True) -> ExitCode:
    """Analyse the run, write summary and report, and return the exit code.

    Raises:
        InvalidRun: The disk is full.
    """
    manifest = read_manifest(out)
    page = out
    if report and not quiet:
        print("analysing the records and drawing the report", file=sys.stderr, flush=True)
    try:
        count_tokens(out, parse_scenario(manifest.scenario, context=RECORDED).tokenizer)
        if report:
            from loadtest.report.report import (
                write_report,  # imported here: matplotlib takes a second or two, too long before a run or in a probe
            )

            page = write_report(out)
        else:
            write_json(out / "summary.json", analyse(out))
    except OSError as exc:
        raise InvalidRun([*manifest.problems, f"the results cannot be written to {out}: {exc.strerror}"]) from exc
    summary = read_summary(out)
    if not quiet:
        print_verdict(summary, manifest, page)
    return VERDICTS[summary.verdict].code


def count_tokens(out: Path, tokenizer: str) -> None:
    """Count the tokens of each answer's text; called after the run, because the generator has no time for it."""
    rows_file = out / "rows.jsonl"
    if not tokenizer or not rows_file.exists():
        return
    encode = load_tokenizer(tokenizer).encode
    texts = ((row.id, row.text) for row in read_lines(rows_file, Row) if row.text)
    counts = [TokenCount(row_id, len(encode(text, add_special_tokens=False).ids)) for row_id, text in texts]
    replace_file(out / "tokens.jsonl", as_lines(counts))


def default_out(scenario: Scenario) -> Path:
    return Path("results") / f"{scenario.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


class Beside:
    """The activities beside the load: scrapes of the target once a second, faults at their times, the relay that faults cut."""

    def __init__(self, scenario: Scenario, target: Target, out: Path) -> None:
        self._scenario = scenario
        self._relay = Relay(target.base_url) if relay_needed(scenario) else None
        self.url = self._relay.url if self._relay else target.base_url
        """Address to which the load is sent."""
        self.problems: list[str] = []
        self.not_begun: list[str] = []
        self._observer = Observer(scenario.observe, target)
        self._recorder = Recorder(out)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._faults: FaultRunner | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._relay:
            self._relay.close()

    def start(self, epoch_unix_s: float) -> None:
        self._epoch = time.perf_counter() + epoch_unix_s - time.time()
        self._faults = FaultRunner(self._scenario.faults, self._now, self._emit, relay=self._relay)
        self._faults.start()
        self._thread = threading.Thread(target=self._observe, name="observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop all activities; may be called twice."""
        self._stopping.set()
        if self._faults:
            self._faults.stop()
            self.problems, self.not_begun, self._faults = self._faults.problems, self._faults.not_begun, None
        if self._thread:
            self._thread.join()
            self._thread = None
        self._observer.close()
        self._recorder.close()

    def _now(self) -> float:
        return time.perf_counter() - self._epoch

    def _observe(self) -> None:
        interval_s = self._scenario.observe.interval_s
        while not self._stopping.wait(interval_s - self._now() % interval_s):
            if samples := self._observer.sample(self._now()):
                self._append("server.jsonl", samples)

    def _emit(self, event: RunEvent) -> None:
        self._append("events.jsonl", [event])

    def _append(self, name: str, records: Sequence[msgspec.Struct]) -> None:
        try:
            self._recorder.append(name, as_lines(records))
        except OSError:  # the rows, which matter more, cannot be written either, and the generator reports that
            self._stopping.set()
