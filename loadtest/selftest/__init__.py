"""``serve-app-loadtest selftest``: the generator measured against a server whose latencies, counts and failures are known.

A check is a function whose docstring is its claim and its pass rule. What concerns time only is tried again on a machine that was
busy, and the number of tries is told; the law server's own log says whether server or client was late.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.errors import ExitCode, UsageError
from loadtest.recorder import claim, write_json
from loadtest.selftest import estimates, soundness, times
from loadtest.selftest.bench import TRIES, Bench, Disturbed, Point, Skipped, Verdict, cpu_waited_s

Check = Callable[[Bench], Iterator[Point]]
CHECKS: tuple[tuple[str, Check, bool], ...] = (
    ("T1", times.t1_laws, True),
    ("T2", times.t2_two_points, True),
    ("T3", times.t3_chunks, True),
    ("T4", times.t4_stall, True),
    ("T5", estimates.t5_coverage, True),
    ("T5", estimates.t5_live, False),
    ("T6", soundness.t6_arrivals, True),
    ("T7", soundness.t7_audit, True),
    ("T7", soundness.t7_killed, False),
    ("T8", soundness.t8_sick, True),
    ("T8", soundness.t8_healthy, True),
    ("T9", estimates.t9_simulated, True),
    ("T9", estimates.t9_live, False),
    ("T10", times.t10_warm_up, False),
    ("T11", times.t11_timeouts, False),
    ("T13", times.t13_attribution, False),
    ("T14", soundness.t14_throughput, True),
    ("T15", times.t15_clock, False),
)
"""The last says whether ``--quick`` has it too."""
COVERED = {
    "T3": ("Locust's own reader fails the chunk times", "test_locust_reader.py"),
    "T12": ("a replayed trace has the file's due times, lengths and sessions", "test_traces.py test_schedule.py"),
    "T16": ("the report's figures are those of the rows", "test_report.py test_plots.py test_analysis.py"),
    "T17": ("HTTP at its limits: keep-alive races, refusals, trailers, HTTP/1.0", "test_client.py test_sse.py"),
    "T18": ("the autoscaling analyser finds known delays", "test_autoscale.py"),
}
"""Not measured here: pytest files in tests/loadtest."""


class Finding(msgspec.Struct, frozen=True):
    """A line of the table."""

    test: str
    claim: str
    seen: str
    limit: str
    verdict: Verdict
    tries: int = 1
    cpu_pressure: float = 0.0
    """Share of the check's time for which something on this machine waited for a CPU."""


class Result(msgspec.Struct, frozen=True):
    """What selftest.json holds."""

    quick: bool
    findings: list[Finding]
    num_repeated: int
    """Runs that the generator called invalid."""


def selftest(*, quick: bool = False, only: str = "", out: Path | None = None) -> ExitCode:
    """Run the checks and print the table; return 0 if none failed, otherwise 3.

    Args:
        only: Names as T3,T4; empty: all.
        out: New folder that keeps what each run left, and the table in selftest.json.

    Raises:
        UsageError: There is no such check, or the folder is not empty.
    """
    chosen = choose(only, quick=quick)
    console = Console()
    with ExitStack() as stack:
        if out:
            claim(out)
        folder = out or Path(stack.enter_context(TemporaryDirectory(prefix="selftest-")))
        bench = Bench(folder, quick=quick)
        findings: list[Finding] = []
        for test, check in chosen:
            findings += (new := carried_out(test, check, bench))
            for finding in new:
                console.print(f"{finding.test} {finding.claim}: {finding.seen}: {finding.verdict}", markup=False, highlight=False)
        findings += [
            Finding(test, claimed, f"tests/loadtest/{files.replace(' ', ', ')}", "", "covered")
            for test, (claimed, files) in COVERED.items()
            if not only or test in only.split(",")
        ]
        console.print(table_of(findings))
        if out:
            write_json(out / "selftest.json", Result(quick, findings, bench.num_repeated))
    num_failed = sum(finding.verdict == "FAIL" for finding in findings)
    busiest = max((finding.cpu_pressure for finding in findings), default=0.0)
    console.print(
        f"{len(findings)} findings, {num_failed} failed; {bench.num_repeated} runs were repeated; something waited for a CPU "
        f"during up to {busiest:.0%} of a check"
    )
    return ExitCode.INVALID if num_failed else ExitCode.PASS


def choose(only: str, *, quick: bool) -> list[tuple[str, Check]]:
    """Return the checks to run.

    Raises:
        UsageError: One of the names is none.
    """
    known = list(dict.fromkeys([test for test, _, _ in CHECKS] + list(COVERED)))
    names = [name for name in re.split(r"[,\s]+", only) if name] or known
    if wrong := [name for name in names if name not in known]:
        raise UsageError("--only", f"no check {', '.join(wrong)}; there are {', '.join(known)}")
    return [(test, check) for test, check, is_quick in CHECKS if test in names and (is_quick or not quick)]


def carried_out(test: str, check: Check, bench: Bench) -> list[Finding]:
    """Carry out the check, again as long as nothing but time is wrong, `TRIES` times at most; return what was seen last."""
    claimed = (check.__doc__ or "").partition(".")[0]
    tries, again = 0, True
    while again:
        begin_s, waited_s = time.monotonic(), cpu_waited_s()
        points = list(points_of(check, bench))
        pressure = round((cpu_waited_s() - waited_s) / (time.monotonic() - begin_s), 3)
        failed = [point for point in points if point.verdict == "FAIL"]
        tries += 1
        again = bool(failed) and all(point.timing for point in failed) and tries < TRIES
    return [
        Finding(test, f"{claimed}: {p.case}" if p.case else claimed, p.seen, p.limit, p.verdict, tries, pressure) for p in points
    ]


def points_of(check: Check, bench: Bench) -> Iterator[Point]:
    """Yield what the check saw, and why it ended early if it did."""
    try:
        yield from check(bench)
    except Skipped as exc:
        yield Point("", str(exc), "", "skipped")
    except Disturbed as exc:
        yield Point("", str(exc), "a valid run", "FAIL")
    except Exception as exc:  # the root of the check's work
        yield Point("", f"{type(exc).__name__}: {exc}", "no error", "FAIL")


def table_of(findings: Sequence[Finding]) -> Table:
    table = Table("test", "claim", "seen", "limit", "verdict")
    colours = {"pass": "green", "FAIL": "bold red"}
    for f in findings:
        text = f.verdict if f.tries == 1 else f"{f.verdict} (try {f.tries})"
        table.add_row(f.test, *(Text(part) for part in (f.claim, f.seen, f.limit)), Text(text, colours.get(f.verdict, "")))
    return table
