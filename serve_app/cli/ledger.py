"""``serve-app ledger`` checks whether the record of requests is whole, and prints what it says."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from serve_app.books.ledger_check import Report

app = typer.Typer(
    help="Check the ledger, in which ingresses record each request if `ingress.ledger` is set.", no_args_is_help=True
)

SHOWN = 20
"""Most findings, and most notes, that are printed."""


@app.command()
def verify(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE...", help="The folder of `ingress.ledger.dir`, or files of it.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the sums, findings and notes as JSON.")] = False,
) -> None:
    """Check that each request has one line and no line is missing, and print sums.

    Exit status 0: nothing is wrong, though notes may name requests that ran when an ingress was killed. 1: each line on stderr
    names a file, a line and what is wrong. 2: there is no ledger, or it cannot be read.
    """
    from serve_app.books.ledger_check import check

    try:
        report = check(files_of(paths))
    except OSError as exc:
        raise typer.BadParameter(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    if as_json:
        typer.echo(json.dumps(_plain(report), indent=2))
        if report.num_findings:
            raise typer.Exit(1)
        return
    for line in (*_summary(report), *limited([f"note: {note}" for note in report.notes], report.num_notes)):
        typer.echo(line)
    if report.num_findings:
        for line in limited([f"error: {finding}" for finding in report.findings], report.num_findings):
            typer.secho(line, fg="red", err=True)
        raise typer.Exit(1)
    typer.secho("nothing is wrong", fg="green")


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files; the files of a folder come in their order.

    Raises:
        typer.BadParameter: A path does not exist, or holds no ledger.
    """
    from serve_app.books.ledger_lines import ledger_files

    for path in paths:
        files = ledger_files(path) if path.is_dir() else [path]
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist; `ingress.ledger.dir` of the configuration says where the ledger is")
        if not files:
            raise typer.BadParameter(
                f"{path} holds no file ledger-*.jsonl; is `ingress.ledger` set, and did an ingress run here?"
            )
        yield from files


def _plain(report: "Report") -> dict[str, Any]:
    """Return the report as plain data. Gaps are median, 99th percentile and maximum in seconds, None without any."""
    counts = {name: value for name, value in vars(report).items() if name.startswith("num_") or name.endswith("_tokens")}
    reasons = [{"outcome": outcome, "reason": reason, "requests": n} for (outcome, reason), n in report.reasons.most_common()]
    named = {"outcomes": dict(report.outcomes), "reasons": reasons, "attempts": dict(sorted(report.attempts.items()))}
    return {**counts, **named, "gaps_s": report.gaps(), "findings": report.findings, "notes": report.notes}


def limited(lines: list[str], num: int) -> list[str]:
    return lines[:SHOWN] + ([f"... and {num - SHOWN} more"] if num > SHOWN else [])


def _summary(report: "Report") -> Iterator[str]:
    yield f"{report.num_lines} requests in {report.num_files} files of {report.num_ingresses} ingress processes"
    for outcome, num in report.outcomes.items():
        reasons = ", ".join(
            f"{reason or 'without an engine'} {n}" for (o, reason), n in report.reasons.most_common() if o == outcome
        )
        yield f"{outcome:<10}{num:>10}  {reasons}"
    if report.num_without_outcome:
        yield f"{'none':<10}{report.num_without_outcome:>10}  they still ran when their ingress ended, or run now"
    attempts = ", ".join(f"{n}: {num}" for n, num in sorted(report.attempts.items()))
    yield f"attempts of a request: {attempts or 'none'}"
    gaps = report.gaps()
    silence = "" if gaps is None else f"; silence p50 {gaps[0]:.2f} s, p99 {gaps[1]:.2f} s, longest {gaps[2]:.2f} s"
    yield f"resumed within the answer: {report.num_resumed}{silence}"
    yield f"tokens: prompt {report.prompt_tokens}, output {report.output_tokens}"
    if report.num_same_id():
        yield f"{report.num_same_id()} lines have the id of an earlier line: a client tried again, or gives several requests one id"
