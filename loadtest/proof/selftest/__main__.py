"""``python -m loadtest.proof.selftest coverage``: the published table of how often the intervals hold the truth."""

from typing import Annotated

import typer

from loadtest.proof.coverage import coverage_table, print_table

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Parts of the self-test that make tables of their own."""


@app.command()
def coverage(
    runs: Annotated[int, typer.Option(help="Simulated runs of each queue.")] = 300,
    replicates: Annotated[int, typer.Option(help="Also intervals from so many runs together; 0: not.")] = 0,
) -> None:
    """Print how often the intervals hold the closed form of a queue, as Markdown."""
    print_table(coverage_table(runs, replicates=replicates))


if __name__ == "__main__":
    app()
