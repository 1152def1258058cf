"""``serve-app-loadtest selftest`` measures the generator against a server whose latencies, counts and failures are known.

A check is a function whose docstring is its claim and its pass rule. A check that fails only in timing is repeated, because the machine
may have been busy, and the number of tries is reported; the law server's own log shows whether server or client was late.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.control.runner import machine, versions
from loadtest.errors import ExitCode, UsageError
from loadtest.proof.selftest import conversations, estimates, large, refusals, simulated, soundness, times
from loadtest.proof.selftest.bench import TRIES, Bench, Disturbed, Point, Skipped, Verdict, cpu_waited_s
from loadtest.recorder import claim, write_json
from loadtest.records import Machine


class Check(NamedTuple):
    test: str
    run: Callable[..., Iterator[Point]]
    """The check; it is given the bench and, if there are cases, one case. Each case is repeated separately."""
    cases: tuple[str, ...] = ()
    num_quick: int = 0
    """Number of cases that are also in ``--quick``; without cases, 1 puts the check there."""


CHECKS = (
    Check("T1", times.t1_laws, tuple(times.LAWS), 1),
    Check("T2", times.t2_two_points, (), 1),
    Check("T3", times.t3_chunks, tuple(times.CHUNKS), 1),
    Check("T4", times.t4_stall, ("open", "closed"), 2),
    Check("T5", estimates.t5_coverage, (), 1),
    Check("T5", estimates.t5_rates, (), 1),
    Check("T5", estimates.t5_live),
    Check("T6", soundness.t6_arrivals, (), 1),
    Check("T7", soundness.t7_audit, (), 1),
    Check("T7", soundness.t7_killed, ("worker", "master", "master, started again")),
    Check("T8", soundness.t8_sick, ("SIGSTOP for 300 ms", "GC storm", "late reads", "CPU hog", "overload"), 3),
    Check("T8", simulated.t8_simulated, (), 1),
    Check("T8", soundness.t8_healthy, ("first", "second", "third"), 1),
    Check("T9", estimates.t9_simulated, (), 1),
    Check("T9", estimates.t9_live),
    Check("T10", times.t10_warm_up, ("slow for 20 s", "steady")),
    Check("T11", times.t11_timeouts),
    Check("T13", times.t13_attribution),
    Check("T14", soundness.t14_throughput, (), 1),
    Check("T15", times.t15_clock),
    Check("T19", conversations.t19_conversations, (), 1),
    Check("T20", refusals.t20_half, tuple(refusals.LIMITS), 2),
    Check("T20", refusals.t20_capacity, ("simulated", "real"), 1),
    Check("T21", large.t21_large, (), 1),
)
COVERED = {
    "T3": ("Locust's own reader fails the chunk times", "tests/loadtest", "wire/test_locust_reader.py"),
    "T12": ("A replayed trace has the file's due times, lengths and sessions", "tests/loadtest", "plan/test_traces.py"),
    "T16": (
        "The report's figures are those of the rows",
        "tests/loadtest",
        "report/test_report.py report/test_plots.py judge/test_analysis.py judge/test_verdicts.py",
    ),
    "T17": (
        "HTTP at its limits: keep-alive races, refusals, trailers, HTTP/1.0",
        "tests/loadtest",
        "wire/test_client.py wire/test_client_connections.py wire/test_sse.py",
    ),
    "T18": ("The autoscaling analyser finds known delays", "tests/loadtest", "judge/test_autoscale.py"),
}
"""Tests that pytest runs instead of the self-test: claim, folder, files."""


class TableLine(msgspec.Struct, frozen=True):
    """A line of the table."""

    test: str
    claim: str
    rule: str
    """The rule in words; ``limit`` has the number."""
    case: str
    seen: str
    limit: str
    verdict: Verdict
    tries: int = 1
    cpu_pressure: float = 0.0
    """Share of the check's time in which some process of this machine waited for a CPU."""


class Result(msgspec.Struct, frozen=True):
    """The content of selftest.json; selftest.md is its table."""

    quick: bool
    versions: dict[str, str]
    machine: Machine
    findings: list[TableLine]
    num_repeated: int
    """Number of runs that were invalid and repeated."""


def selftest(*, quick: bool = False, only: str = "", out: Path | None = None) -> ExitCode:
    """Run the checks and print the table; return 0 if none failed, otherwise 3.

    Args:
        only: Names as T3,T4; empty: all.
        out: New folder for the records of each run, and the table in selftest.json and selftest.md.

    Raises:
        UsageError: A check does not exist, or the folder is not empty.
    """
    chosen = choose(only, quick=quick)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    with ExitStack() as stack:
        if out:
            claim(out)
        folder = out or Path(stack.enter_context(TemporaryDirectory(prefix="selftest-")))
        bench = Bench(folder, quick=quick)
        findings: list[TableLine] = []
        for check in chosen:
            begin_s = time.monotonic()
            findings += (new := carried_out(check, bench))
            worst = "FAIL" if any(f.verdict == "FAIL" for f in new) else new[0].verdict
            console.print(f"{check.test} {new[0].claim}: {worst} ({time.monotonic() - begin_s:.0f} s)", markup=False)
        findings += covered(only)
        result = Result(quick, versions(), machine(), findings, bench.num_repeated)
        if out:
            write_json(out / "selftest.json", result)
            (out / "selftest.md").write_text(markdown_of(result))
    console.print(table_of(findings), summed_up(result), sep="\n")
    return ExitCode.INVALID if any(f.verdict == "FAIL" for f in findings) else ExitCode.PASS


def choose(only: str, *, quick: bool) -> list[Check]:
    """Return the checks to run, with their cases.

    Raises:
        UsageError: A name is not that of a check.
    """
    known = sorted({*COVERED, *(check.test for check in CHECKS)}, key=lambda test: int(test[1:]))
    names = only.split(",") if only else known
    if wrong := set(names) - set(known):
        raise UsageError("--only", f"no check {', '.join(sorted(wrong))}; there are {', '.join(known)}")
    chosen = [check for check in CHECKS if check.test in names]
    return [check._replace(cases=check.cases[: check.num_quick]) for check in chosen if check.num_quick] if quick else chosen


def covered(only: str) -> list[TableLine]:
    """Return a line for each test that pytest runs."""
    chosen = only.split(",") if only else COVERED
    rule = "pytest passes them; `make selftest-loadtest` runs them too, and leaves pytest.xml"
    return [
        TableLine(test, claimed, rule, folder, files, "", "covered")
        for test, (claimed, folder, files) in COVERED.items()
        if test in chosen
    ]


def carried_out(check: Check, bench: Bench) -> list[TableLine]:
    """Run each case; repeat it while only timing is wrong, at most `TRIES` times. Return the last results."""
    claimed, _, rule = (" ".join(part.split()) for part in (check.run.__doc__ or "").partition(".\n\n"))
    findings = []
    cases: list[tuple[str, ...]] = [(case,) for case in check.cases] or [()]
    for args in cases:
        tries, again = 0, True
        while again:
            begin_s, waited_s = time.monotonic(), cpu_waited_s()
            points = list(points_of(check.run(bench, *args)))
            pressure = round((cpu_waited_s() - waited_s) / (time.monotonic() - begin_s), 3)
            failed = [point for point in points if point.verdict == "FAIL"]
            tries += 1
            again = bool(failed) and all(point.timing for point in failed) and tries < TRIES
        findings += [TableLine(check.test, claimed, rule, p.case, p.seen, p.limit, p.verdict, tries, pressure) for p in points]
    return findings


def points_of(points: Iterator[Point]) -> Iterator[Point]:
    """Yield the points, and the reason if the check ended early."""
    try:
        yield from points
    except Skipped as exc:
        yield Point("", str(exc), "", "skipped")
    except Disturbed as exc:
        yield Point("", str(exc), "a valid run", "FAIL")
    except Exception as exc:  # the root of the check's work
        yield Point("", f"{type(exc).__name__}: {exc}", "no error", "FAIL")


def table_of(findings: Sequence[TableLine]) -> Table:
    table = Table("test", "claim", "seen", "limit", "verdict")
    colours = {"pass": "green", "FAIL": "bold red"}
    claimed = ""
    for f in findings:
        if f.claim != claimed:
            table.add_section()
            table.add_row(f.test, Text(f.claim, "bold"))
            claimed = f.claim
        verdict = f.verdict if f.tries == 1 else f"{f.verdict} (try {f.tries})"
        table.add_row("", *(Text(part) for part in (f"  {f.case}", f.seen, f.limit)), Text(verdict, colours.get(f.verdict, "")))
    return table


def markdown_of(result: Result) -> str:
    """Return the table for the docs."""
    ran = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    lines = [f"{ran}; {result.machine['cores']} cores, {result.machine['system'].partition('-')[0]}. {summed_up(result)}.", ""]
    lines += ["| test | check | seen | limit | verdict |", "|---|---|---|---|---|"]
    claimed = ""
    for f in result.findings:
        if f.claim != claimed:
            lines.append(f"| **{f.test}** | **{f.claim}.** {f.rule} | | | |")
            claimed = f.claim
        cells = [cell.replace("|", "\\|") for cell in (f.case, f.seen, f.limit)]
        lines.append("| | " + " | ".join([*cells, f.verdict if f.tries == 1 else f"{f.verdict} (try {f.tries})"]) + " |")
    return "\n".join([*lines, ""])


def summed_up(result: Result) -> str:
    counts = Counter(finding.verdict for finding in result.findings)
    busiest = max((finding.cpu_pressure for finding in result.findings), default=0.0)
    return (
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + f"; {result.num_repeated} runs were invalid and made again; during the busiest check something waited for a CPU "
        f"for {busiest:.0%} of the time"
    )
