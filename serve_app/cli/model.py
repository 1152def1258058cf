"""`serve-app model` fetches the embedded model or weights for a volume, makes tiny models for tests, and lists what is there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from serve_app.cli.options import AsJson
from serve_app.environment import as_typed
from serve_app.errors import CheckpointError

app = typer.Typer(help="Fetch and make model checkpoints.", no_args_is_help=True)

DEFAULT_MODEL = "smollm2-135m-instruct"
Kind = Literal["llama", "opt", "embedding"]
CacheDir = Annotated[
    Path | None, typer.Option(help="Where checkpoints are kept. Default: SERVE_APP_CACHE, else ~/.cache/serve-app.")
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder on the volume.")]
Mark = Annotated[str, typer.Argument(metavar="MARK", help="The mark of the complete folder.")]
STAGES = {"wait": "waiting for another fetch", "convert": "converting"}


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Which embedded model.")] = DEFAULT_MODEL, cache_dir: CacheDir = None) -> None:
    """Download an embedded model, convert it, and print the path of its checkpoint.

    Does nothing if it is there already.
    """
    from serve_app.checkpoints import fetch_embedded
    from serve_app.config import default_cache_dir

    with _errors_on_one_line(), _progress() as report:
        path = fetch_embedded(name, cache_dir or default_cache_dir(), report=report)
    typer.echo(path)


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist or is empty.")],
    kind: Annotated[Kind, typer.Option(help="Which architecture.")] = "llama",
) -> None:
    """Make a two-layer checkpoint with random weights, the same on each run, and print its path."""
    from serve_app.checkpoints import KINDS

    with _errors_on_one_line():
        path = KINDS[kind](directory)
    typer.echo(path)


@app.command(name="list")
def list_models(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Show the embedded models and whether they are fetched."""
    import json

    from rich.console import Console
    from rich.table import Column, Table

    from serve_app.checkpoints import EMBEDDED, problem_with
    from serve_app.config import default_cache_dir

    directory = cache_dir or default_cache_dir()
    problems = {name: problem_with(model, directory / name) for name, model in EMBEDDED.items()}
    if as_json:
        rows = [
            {
                "model": f"embedded:{name}",
                "description": EMBEDDED[name].description,
                "path": str(directory / name),
                "problem": problem,
            }
            for name, problem in problems.items()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(Column("model", no_wrap=True), "description", Column("state", overflow="fold"))
    for name, problem in problems.items():
        state = str(directory / name) if problem is None else f"{problem}; run `{as_typed()} model fetch {name}`"
        table.add_row(f"embedded:{name}", EMBEDDED[name].description, state)
    Console().print(table)


@app.command()
def download(folder: Folder, mark: Mark) -> None:
    """Fetch hf:ORG/NAME@COMMIT from the Hugging Face hub into DIR, compare checksums, mark it complete."""
    from serve_app.checkpoints import weights

    with _errors_on_one_line():
        weights.download(folder, mark, say=typer.echo)


@app.command()
def verify(
    folder: Folder, mark: Mark, sha256: Annotated[str, typer.Option(help="Checksum of the file SHA256SUMS in DIR.")]
) -> None:
    """Compare the files in DIR with its SHA256SUMS, mark it complete."""
    from serve_app.checkpoints import weights

    with _errors_on_one_line():
        weights.verify(folder, mark, sha256=sha256, say=typer.echo)


@app.command()
def wait(
    folders_and_marks: Annotated[list[str], typer.Argument(metavar="DIR MARK...", help="Folders and their marks in turn.")],
    timeout_s: Annotated[float, typer.Option(min=0, help="Seconds until giving up.")] = 14400.0,
) -> None:
    """Wait until each DIR is complete, that is, marked with its MARK."""
    if len(folders_and_marks) % 2:
        raise typer.BadParameter("give pairs: DIR MARK DIR MARK")
    from serve_app.checkpoints.weights import wait_for

    pairs = [(Path(folder), mark) for folder, mark in zip(folders_and_marks[::2], folders_and_marks[1::2], strict=True)]
    with _errors_on_one_line():
        wait_for(pairs, timeout_s=timeout_s, say=typer.echo)


@contextmanager
def _errors_on_one_line() -> Iterator[None]:
    try:
        yield
    except CheckpointError as exc:
        typer.echo(f"error: {exc}", err=True)
        raise typer.Exit(1) from exc


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that draws the stage on standard error, except for the download, where pip draws its own bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("")

    def stop() -> None:
        if progress.live.is_started:  # without a started display, `stop` would print an empty line
            progress.stop()

    def report(stage: str, done: int, total: int) -> None:
        if stage == "download":
            stop()
        else:
            progress.start()
            progress.update(task, description=STAGES[stage], completed=done, total=total)

    try:
        yield report
    finally:
        stop()
