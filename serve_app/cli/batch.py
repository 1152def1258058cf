"""``serve-app batch run`` answers the lines of a file by a running service, or by one that is started for it."""

import asyncio
import contextlib
import functools
import itertools
import json
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer
from rich.console import Console

from serve_app.batch.output import write_lines
from serve_app.batch.urls import beside, is_url, refuse_no_room, remove_url, shown, without_query, write_url
from serve_app.cli import batch_options as options
from serve_app.errors import BatchError

if TYPE_CHECKING:  # `--help` loads none of these modules
    from serve_app.batch.client import Limits
    from serve_app.batch.fleet_process import FleetProcess
    from serve_app.batch.journal import Journal
    from serve_app.batch.requests import Defaults, Request
    from serve_app.batch.rows import InputRow
    from serve_app.batch.runner import Progress, Runner

app = typer.Typer(help="Answer the lines of a file, through any crash.", no_args_is_help=True)
console = Console(stderr=True, highlight=False, soft_wrap=True)

FAILED_LINES = 3


@app.command()
def run(
    source: options.Source,
    output: options.Output,
    journal: options.Journal = None,
    url: options.Url = "",
    embedded: options.Embedded = None,
    address: options.Address = "",
    model: options.Model = "",
    chat: options.Chat = True,
    system: options.System = "",
    prompt_field: options.PromptField = "prompt",
    parameter: options.Parameter = None,
    schema: options.Schema = None,
    priority: options.Priority = "normal",
    form: options.Form = "",
    concurrency: options.Concurrency = 256,
    tries: options.Tries = 5,
    patience_s: options.PatienceS = 600.0,
    tokens_per_minute: options.TokensPerMinute = None,
    api_key_file: options.ApiKeyFile = None,
    retry_failed: options.RetryFailed = False,
) -> None:
    """Ask a service for each line of INPUT and write one line for each.

    OUTPUT is written at the end, in one piece and in the order of the input. Until then answers are in the journal: after Ctrl-C or any
    crash the same command continues. Lines that failed are in OUTPUT.errors.jsonl.

    Exit status 0: each line has an answer. 3: some lines failed. 1: it could not begin or continue.
    2: an option or the API key is wrong. 130: Ctrl-C.
    """
    from serve_app.batch.client import Limits, key_of_environment, key_of_file
    from serve_app.batch.requests import Defaults
    from serve_app.batch.rows import checked_format, format_of
    from serve_app.core.fair_tags import BACKGROUND_PRIORITY

    parameters = ({"priority": BACKGROUND_PRIORITY} if priority == "background" else {}) | _parameters(
        parameter or [], schema, chat=chat
    )
    limits = Limits(concurrency=concurrency, tries=tries, patience_s=patience_s, tokens_per_minute=tokens_per_minute)
    files = _Files(output, _journal_of(output, journal))
    files.refuse_to_write(source)
    _refuse_two_services(url, embedded, address)
    form = checked_format(form) if form else format_of(source)
    key = key_of_file(api_key_file) if api_key_file else key_of_environment()
    defaults = Defaults(model, chat, system, prompt_field, parameters)
    service = url or options.DEFAULT_URL if embedded is None else _OwnFleet(embedded, address)
    _answer(source, form, files, defaults, limits, service, key, retry_failed=retry_failed)


def _answer(
    source: str,
    form: str,
    files: "_Files",
    defaults: "Defaults",
    limits: "Limits",
    service: "str | _OwnFleet",
    key: str,
    *,
    retry_failed: bool,
) -> None:
    """Ask for the lines that have no answer in the journal, and write the output. ``service``: a URL, or a fleet to start."""
    import uvloop

    from serve_app.batch.client import connect, only_model
    from serve_app.batch.journal import Journal
    from serve_app.batch.requests import request_of
    from serve_app.batch.rows import open_input, rows
    from serve_app.batch.runner import Runner

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_input(source))
        journal = stack.enter_context(Journal(files.journal))
        fleet = stack.enter_context(_fleet(service)) if isinstance(service, _OwnFleet) else None
        url = fleet.url if fleet else str(service)
        http = connect(url, key, limits)
        complete = functools.cache(lambda: replace(defaults, model=only_model(url, key, limits)))

        def request(row: "InputRow") -> "Request":
            """Return the row's request; the service is asked for its model only for a row that names none."""
            made = request_of(row, defaults)
            return made if defaults.model or made.model or made.body is None else request_of(row, complete())

        runner = Runner(http, journal, limits, retry_failed=retry_failed)
        watch = functools.partial(_watch, fleet, functools.partial(_share_read, file, source))
        uvloop.run(_run(runner, http, (request(row) for row in rows(file, form, name=source)), watch))
        files.finish(journal)


@dataclass(frozen=True)
class _OwnFleet:
    """A fleet that is started for the batch, on the Ray cluster at ``address``; "": on a cluster of its own."""

    config: Path
    address: str


def _refuse_two_services(url: str, embedded: Path | None, address: str) -> None:
    if url and embedded:
        raise typer.BadParameter("leave out --url: with --embedded the batch has a service of its own", param_hint="--embedded")
    if address and not embedded:
        raise typer.BadParameter(
            "give --embedded: only a fleet of the batch's own is started on a cluster", param_hint="--address"
        )


@contextlib.contextmanager
def _fleet(own: _OwnFleet) -> "Iterator[FleetProcess]":
    from serve_app.batch.fleet_process import FleetProcess

    began_at = time.monotonic()
    console.print(f"starting the fleet of {own.config}" + (f" on the Ray cluster at {own.address}" if own.address else ""))
    with FleetProcess(
        own.config, address=own.address, on_progress=lambda line: console.print(f"  {line}", markup=False)
    ) as fleet:
        console.print(f"the fleet is ready after {time.monotonic() - began_at:.0f} s")
        yield fleet


async def _run(runner: "Runner", http: Any, requests: Iterator[Any], watch: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Run until the end or a signal; answers are kept in any case."""
    task = asyncio.ensure_future(runner.run(requests, watch=watch))
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    async with http:
        try:
            await task
        except asyncio.CancelledError:
            progress = runner.progress
            console.print(f"stopped after {_lines(progress.lines)}; the same command continues from there")
            raise typer.Exit(128 + stopped[0]) from None


async def _watch(fleet: "FleetProcess | None", share_read: Callable[[], float], progress: "Progress") -> None:
    """Print a line every few seconds, on a terminal over the last line; raise when the batch's own fleet has ended."""
    for second in itertools.count(1):
        await asyncio.sleep(1.0)
        if fleet is not None:
            fleet.refuse_end()
        if second % 10 and not console.is_terminal:
            continue
        took_s = time.monotonic() - progress.began_at
        rates = f"{progress.answered / took_s:,.1f} lines/s, {progress.tokens / took_s:,.0f} tokens/s"
        before = f" ({progress.kept:,} of them before)" if progress.kept else ""
        line = f"{_lines(progress.lines)}{before}, {progress.failed:,} failed, {rates}, up to {int(progress.window)} at once"
        line += _left(progress, took_s, share_read())
        line += f"; no answer now: {progress.trouble}" if progress.trouble else ""
        console.print(line, end="\r" if console.is_terminal else "\n")


def _lines(count: int) -> str:
    return f"{count:,} line{'s' * (count != 1)}"


def _share_read(file: BinaryIO, source: str) -> float:
    """Return the share of a plain local file that was read, 0..1; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError):
        if not is_url(source) and (size := Path(source).stat().st_size):
            return min(1.0, file.tell() / size)
    return 0.0


def _left(progress: "Progress", took_s: float, share_read: float) -> str:
    """Return the time left at the rate so far, if lines are spread evenly over the bytes; empty while that cannot be computed.

    That is so as well when all bytes are read: lines that run may still take minutes.
    """
    done = progress.answered + progress.failed
    if not done or share_read in (0.0, 1.0):
        return ""
    left_s = int(progress.lines * (1 / share_read - 1) * took_s / done)
    return f", about {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"


@dataclass(frozen=True)
class _Files:
    """The files that the command writes. ``output`` is a path or a URL, and the file of errors is beside it."""

    output: str
    journal: Path

    @property
    def errors(self) -> str:
        return beside(self.output, ".errors.jsonl")

    def refuse_to_write(self, source: str) -> None:
        """Raise BatchError if two of the input and the written files are the same file, by whatever path, or one cannot be a file."""
        self._refuse_one_for_two(source)
        if is_url(self.output):
            refuse_no_room(self.output)
            return
        output = Path(self.output)
        if not output.name or output.is_dir():
            raise BatchError(f"--output is {self.output!r}, a folder", "name a file in it, for example answers.jsonl")
        if output.exists() and not output.is_file():  # the output is renamed to this name, and would replace it
            problem = f"--output is {self.output!r}, which is not a regular file"
            raise BatchError(problem, "name a file, for example answers.jsonl")
        if not output.parent.is_dir():
            raise BatchError(f"the folder {output.parent} of --output does not exist", f"mkdir -p {output.parent}")

    def _refuse_one_for_two(self, source: str) -> None:
        hint = "choose another --output or --journal"
        written = {"--output": self.output, "the file of errors": self.errors, "--journal": str(self.journal)}
        for name in written.values():
            if _place(name) == _place(source):
                raise BatchError(f"INPUT is {shown(name)}, which this command writes", hint)
        for first, second in itertools.combinations(written, 2):
            if _place(written[first]) == _place(written[second]):
                raise BatchError(f"{first} and {second} are both {shown(written[first])}", hint)

    def finish(self, journal: "Journal") -> None:
        """Write the output, and the errors if there are any."""
        counts = journal.counts()
        if counts.answered + counts.failed == 0:
            raise BatchError("the input has no lines", "give a file with at least one prompt")
        _write(self.output, journal.results(failed=False))
        if counts.failed:
            _write(self.errors, journal.results(failed=True))
        elif is_url(self.output):
            remove_url(self.errors)
        else:
            Path(self.errors).unlink(missing_ok=True)
        console.print(f"{_lines(counts.answered)} answered: {shown(self.output)}")
        if counts.failed:
            console.print(f"{_lines(counts.failed)} failed: {shown(self.errors)}", style="red")
            raise typer.Exit(FAILED_LINES)


def _place(name: str) -> str | Path:
    """Return a value that is the same for all names of one file."""
    return without_query(name) if is_url(name) else Path(name.removeprefix("file://")).resolve()


def _journal_of(output: str, given: Path | None) -> Path:
    if given is None and is_url(output):
        raise typer.BadParameter("name a file of this machine: --output is a URL", param_hint="--journal")
    return given or Path(f"{output}.journal")


def _write(name: str, lines: Iterator[str]) -> None:
    if is_url(name):
        write_url(name, lines)
    else:
        write_lines(Path(name), lines)


def _parameters(given: list[str], schema: Path | None, *, chat: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, for example max_tokens=64", param_hint="--param")
        try:
            parameters[name] = json.loads(value)
        except ValueError:
            parameters[name] = value
    if schema is not None:
        if not chat:
            raise typer.BadParameter("a schema is for chats: leave out --no-chat", param_hint="--schema")
        try:
            held = json.loads(schema.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise BatchError(f"{schema} is not a JSON schema: {exc}", "give a file that holds one") from exc
        parameters["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": held}}
    return parameters
