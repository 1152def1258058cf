"""``serve-app batch run``: the lines of a file, answered by a running service, or by one that is started for it.

`run` is longer than functions are here: two thirds of it are the command's options, each with its help.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from serve_app.errors import BatchError

if TYPE_CHECKING:
    from serve_app.batch.fleet_process import FleetProcess
    from serve_app.batch.journal import Journal
    from serve_app.batch.runner import Progress, Runner

app = typer.Typer(help="Answer the lines of a file, through any crash.", no_args_is_help=True)
console = Console(stderr=True, highlight=False, soft_wrap=True)

FAILED_LINES = 3
_URL = "http://127.0.0.1:8010"


@app.command()
def run(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="JSONL, CSV, text or Parquet; a path, or a URL that fsspec opens.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the answers go: JSONL in the form of OpenAI's Batch API.")
    ],
    url: Annotated[str, typer.Option(help=f"The running service. Default: {_URL}.")] = "",
    embedded: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Start this fleet here for the batch, in place of a running service, and end it."),
    ] = None,
    model: Annotated[str, typer.Option(help="Of lines that name none. Default: the one that is served.")] = "",
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="A prompt is a user's message, or text to go on with.")] = True,
    system: Annotated[str, typer.Option(help="The system's message before each prompt of a chat.")] = "",
    prompt_field: Annotated[str, typer.Option(help="The column or key that holds the prompt.")] = "prompt",
    parameter: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="A field of each request, as NAME=VALUE: max_tokens=64, temperature=0."),
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="A JSON schema that each answer of a chat has to fit.")] = None,
    form: Annotated[str, typer.Option("--format", help="jsonl, csv, text or parquet. Default: by the name.")] = "",
    concurrency: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests at once, at most; fewer where the service is full.")
    ] = 256,
    tries: Annotated[int, typer.Option(min=1, help="Of a request that the service fails.")] = 5,
    patience_s: Annotated[float, typer.Option(min=1, help="Stop, to be resumed, when for so long nothing was answered.")] = 600.0,
    tokens_per_minute: Annotated[
        int | None, typer.Option("--max-tokens-per-minute", min=1, help="Of prompts and answers.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Its first line that is no comment and no digest is the API key. Default: $SERVE_APP_API_KEY, or none."
        ),
    ] = None,
    retry_failed: Annotated[bool, typer.Option(help="Ask again for lines that failed in an earlier run.")] = False,
) -> None:
    """Ask a service for each line of INPUT and write one line for each.

    OUTPUT is written at the end, in one piece and in the order of the input. Until then answers are in OUTPUT.journal: after Ctrl-C or any
    crash the same command goes on. Lines that failed are in OUTPUT.errors.jsonl.

    Exit status 0: each line has an answer. 3: some lines failed. 1: it could not begin, or not go on.
    2: an option or the API key is wrong. 130: Ctrl-C.
    """
    from serve_app.batch.client import Limits, connect, key_of_environment, key_of_file, only_model
    from serve_app.batch.journal import Journal
    from serve_app.batch.requests import Defaults, request_of
    from serve_app.batch.rows import checked_format, format_of, open_input, rows
    from serve_app.batch.runner import Runner

    parameters = _parameters(parameter or [], schema, chat=chat)
    limits = Limits(concurrency=concurrency, tries=tries, patience_s=patience_s, tokens_per_minute=tokens_per_minute)
    _refuse_to_write(source, output)
    _refuse_two_services(url, embedded)
    form = checked_format(form) if form else format_of(source)
    key = key_of_file(api_key_file) if api_key_file else key_of_environment()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_input(source))
        journal = stack.enter_context(Journal(_journal_of(output)))
        fleet = stack.enter_context(_fleet(embedded)) if embedded else None
        url = fleet.url if fleet else url or _URL
        http = connect(url, key, limits)
        defaults = Defaults(model or only_model(url, key, limits), chat, system, prompt_field, parameters)
        runner = Runner(http, journal, limits, retry_failed=retry_failed)
        asyncio.run(_run(runner, http, (request_of(row, defaults) for row in rows(file, form, name=source)), fleet))
        _finish(journal, output)


def _refuse_two_services(url: str, embedded: Path | None) -> None:
    if url and embedded:
        raise typer.BadParameter("leave out --url: with --embedded the batch has a service of its own", param_hint="--embedded")


@contextlib.contextmanager
def _fleet(config: Path) -> "Iterator[FleetProcess]":
    from serve_app.batch.fleet_process import FleetProcess

    began_at = time.monotonic()
    console.print(f"starting the fleet of {config}")
    with FleetProcess(config) as fleet:
        console.print(f"the fleet is ready after {time.monotonic() - began_at:.0f} s")
        yield fleet


async def _run(runner: "Runner", http: Any, requests: Iterator[Any], fleet: "FleetProcess | None") -> None:
    """Let it run until its end or a signal; what was answered is kept in any case."""
    task = asyncio.ensure_future(runner.run(requests, watch=functools.partial(_watch, fleet)))
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
            console.print(f"stopped after {progress.lines:,} lines; the same command goes on from there")
            raise typer.Exit(128 + stopped[0]) from None


async def _watch(fleet: "FleetProcess | None", progress: "Progress") -> None:
    """Print a line each few seconds, over the last one on a terminal; raise when the batch's own fleet has ended."""
    for second in itertools.count(1):
        await asyncio.sleep(1.0)
        if fleet is not None:
            fleet.refuse_end()
        if second % 10 and not console.is_terminal:
            continue
        took_s = time.monotonic() - progress.began_at
        rates = f"{progress.answered / took_s:,.1f} lines/s, {progress.tokens / took_s:,.0f} tokens/s"
        before = f" ({progress.kept:,} of them before)" if progress.kept else ""
        line = f"{progress.lines:,} lines{before}, {progress.failed:,} failed, {rates}, up to {int(progress.window)} at once"
        line += f"; no answer now: {progress.trouble}" if progress.trouble else ""
        console.print(line, end="\r" if console.is_terminal else "\n")


def _errors_of(output: Path) -> Path:
    return output.with_name(output.name + ".errors.jsonl")


def _journal_of(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def _refuse_to_write(source: str, output: Path) -> None:
    """Raise BatchError when a file that the command writes is the input, by whatever path, or cannot be one."""
    if not output.name or output.is_dir():
        raise BatchError(f"--output is {str(output)!r}, a folder", "name a file in it, for example answers.jsonl")
    if not output.parent.is_dir():
        raise BatchError(f"the folder {output.parent} of --output does not exist", f"mkdir -p {output.parent}")
    if "://" in (local := source.removeprefix("file://")):
        return
    for written in (output, _errors_of(output), _journal_of(output)):
        if Path(local).resolve() == written.resolve():
            raise BatchError(f"INPUT is {written}, which this command writes", "choose another --output")


def _finish(journal: "Journal", output: Path) -> None:
    from serve_app.batch.output import write_lines

    counts = journal.counts()
    if counts.answered + counts.failed == 0:
        raise BatchError("the input has no lines", "give a file with at least one prompt")
    errors = _errors_of(output)
    write_lines(output, journal.results(failed=False))
    if counts.failed:
        write_lines(errors, journal.results(failed=True))
    else:
        errors.unlink(missing_ok=True)
    console.print(f"{counts.answered:,} lines answered: {output}")
    if counts.failed:
        console.print(f"{counts.failed:,} lines failed: {errors}", style="red")
        raise typer.Exit(FAILED_LINES)


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
            raise BatchError(f"{schema} is no JSON schema: {exc}", "give a file that holds one") from exc
        parameters["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": held}}
    return parameters
