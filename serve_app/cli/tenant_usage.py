"""``serve-app tenants usage`` prints who used how much, from the ledgers of one or several ingresses."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from serve_app.cli.ledger import files_of, limited
from serve_app.cli.options import AsJson

if TYPE_CHECKING:
    from serve_app.books.ledger_check import Report
    from serve_app.books.usage import Group, Usage, Use


def usage(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DIR|FILE...", help="The folder of `ingress.ledger.dir`, of each node, or files of it."),
    ],
    begin: Annotated[
        str, typer.Option("--from", help="Leave out what began before: 2026-11-01 or 2026-11-01T07:00, UTC.", show_default=False)
    ] = "",
    end: Annotated[
        str, typer.Option("--to", help="Leave out what began then or later: November ends at 2026-12-01.", show_default=False)
    ] = "",
    by: Annotated[str, typer.Option(help="Groups, with commas between them: tenant, key, model, hour, day.")] = "tenant,model",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, without the total.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print requests, tokens and GPU-seconds by tenant, API key, model and time (UTC), from the ledger.

    Exit status 0: the ledger is whole. 1: lines are missing, so the sums are too low; each line on stderr that begins with `error:`
    names a file and what is missing. 2: there is no ledger, or it cannot be read.
    """
    from serve_app.books.ledger_check import check
    from serve_app.books.usage import Usage

    if as_csv and as_json:
        raise typer.BadParameter("choose one of --csv and --json")
    found = Usage(_groups(by), **_span(begin, end))
    try:
        report = check(dict.fromkeys(file.resolve() for file in files_of(paths)), found.add)
    except OSError as exc:
        raise typer.BadParameter(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    notes = [*_gaps(found), *report.notes]
    if as_json:
        typer.echo(json.dumps(_plain(found, report, notes), indent=2))
    elif as_csv:
        _write_csv(found)
    else:
        for line in _table(found):
            typer.echo(line)
    _say(report, notes)


def _groups(by: str) -> "list[Group]":
    from serve_app.books.usage import GROUPS

    groups = list(dict.fromkeys(each.strip() for each in by.split(",") if each.strip()))
    if unknown := [each for each in groups if each not in GROUPS]:
        raise typer.BadParameter(f"{unknown[0]!r} is no group; choose from {', '.join(GROUPS)}", param_hint="--by")
    return cast("list[Group]", groups)


def _span(begin: str, end: str) -> dict[str, float]:
    span = {name: _time(text, option) for name, text, option in (("begin", begin, "--from"), ("end", end, "--to")) if text}
    if len(span) == 2 and span["begin"] >= span["end"]:
        raise typer.BadParameter(f"{end} is not after {begin}", param_hint="--to")
    return span


def _time(text: str, option: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time; write 2026-11-01 or 2026-11-01T07:00", param_hint=option) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _gaps(found: "Usage") -> Iterator[str]:
    """Yield what the lines do not say."""
    if found.seen is None:
        yield "the ledger has no request"
    elif not found.total.requests:
        first, last = (datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for at in found.seen)
        yield f"no request began in this time; the ledger's first began at {first}, its last at {last}"
    if found.num_unmeasured:
        yield (
            f"{found.num_unmeasured} answered requests have no GPU-seconds: no replica of their model had measured its steps. Where the "
            "model makes text, start a replica again while its machine is less busy (docs/ledger.md)"
        )
    if found.num_without_cached:
        yield f"{found.num_without_cached} answered requests have no cached tokens: an older release wrote their lines"


def _say(report: "Report", notes: Sequence[str]) -> None:
    """Print notes and findings on stderr, and end the command if there are findings."""
    hidden = report.num_notes - len(report.notes)
    for line in limited([f"note: {note}" for note in notes], len(notes) + hidden):
        typer.echo(line, err=True)
    if report.num_findings:
        for line in limited([f"error: {finding}" for finding in report.findings], report.num_findings):
            typer.secho(line, fg="red", err=True)
        raise typer.Exit(1)


def _columns() -> list[str]:
    from serve_app.books.usage import Use

    return [each.name for each in fields(Use)]


def _plain(found: "Usage", report: "Report", notes: Sequence[str]) -> dict[str, Any]:
    rows = [dict(zip(found.by, group, strict=True)) | _rounded(use) for group, use in found.rows()]
    return {"by": list(found.by), "rows": rows, "total": _rounded(found.total), "findings": report.findings, "notes": list(notes)}


def _rounded(use: "Use") -> dict[str, Any]:
    return asdict(use) | {"gpu_s": None if use.gpu_s is None else round(use.gpu_s, 6)}


def _write_csv(found: "Usage") -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow([*found.by, *_columns()])
    for group, use in found.rows():
        table.writerow([*(value or "" for value in group), *_rounded(use).values()])


def _table(found: "Usage") -> Iterator[str]:
    num_groups = len(found.by)
    shown = [[value or "-" for value in group] + _cells(use) for group, use in found.rows()]
    shown = [[*found.by, *(name.removesuffix("_tokens") for name in _columns())], *shown]
    if num_groups:
        shown.append(["total", *[""] * (num_groups - 1), *_cells(found.total)])
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        left = [cell.ljust(width) for cell, width in zip(row[:num_groups], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[num_groups:], widths[num_groups:], strict=True)]
        yield "  ".join([*left, *right])


def _cells(use: "Use") -> list[str]:
    return [
        *(str(value) for name, value in asdict(use).items() if name != "gpu_s"),
        "-" if use.gpu_s is None else f"{use.gpu_s:.3f}",
    ]
