"""This command has two parts: ``coverage`` prints how often the intervals hold the truth, ``many`` the cost of a large run."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtest.proof.coverage import coverage_table, print_table
from loadtest.proof.many import cost_of, write_run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Run a part of the self-test that makes its own table."""


@app.command()
def coverage(
    runs: Annotated[int, typer.Option(help="Simulated runs of each queue.")] = 300,
    replicates: Annotated[int, typer.Option(help="Also intervals from so many runs together; 0: not.")] = 0,
) -> None:
    """Print, as Markdown, how often the intervals contain the closed form of a queue."""
    print_table(coverage_table(runs, replicates=replicates))


@app.command()
def many(
    out: Annotated[
        Path, typer.Argument(help="Folder for the run, 2.6 kB a request; one that is there already is analysed again.")
    ],
    requests: Annotated[int, typer.Option(min=1000)] = 1_000_000,
) -> None:
    """Write a synthetic run, analyse it on one core, and print the cost as JSON."""
    if not out.exists():
        write_run(out, requests)
    print(msgspec.json.encode(cost_of(out)).decode())


if __name__ == "__main__":
    app()
