"""This check (T21) tests if a large run fits a machine: it bounds the cost of an analysis of rows by `loadtest.proof.many`."""

import shutil
from collections.abc import Iterator

from loadtest.proof.many import TOKENS, AnalysisCost, cost_of, write_run
from loadtest.proof.selftest.bench import Bench, Point, judged

NUM = 1_000_000
PEAK_BYTES, CPU_S = 1e9, 120.0
FEW, MORE = 5_000, 40_000
ANSWER_BYTES = 1000
"""Most memory per answer: a million answers then take 1 GB in addition to the interpreter. As Python objects they take 2 to 9 GB."""


def t21_large(bench: Bench) -> Iterator[Point]:
    """A run of a million requests is analysed within 1 GB of memory and 120 s of one core.

    1,000,000 answers of 128 tokens that were never asked, every 50th refused: all requests and all gaps between tokens count, owed ones
    too, and the SLO is missed. The analysis is a process of its own, whose interpreter counts. Quick: 5,000 and 40,000 answers, between
    which the peak of the memory grows by at most 1,000 bytes an answer; no limit of time.
    """
    if bench.quick:
        few, point = _analysed(bench, FEW)
        yield point
        more, point = _analysed(bench, MORE)
        yield point
        each = (more.peak_bytes - few.peak_bytes) / (more.requests - few.requests)
        seen = f"{each:.0f} bytes, from {few.peak_bytes / 1e6:.0f} to {more.peak_bytes / 1e6:.0f} MB"
        yield judged("memory of an answer", seen, f"<= {ANSWER_BYTES} bytes", each <= ANSWER_BYTES)
        return
    cost, point = _analysed(bench, NUM)
    yield point
    files = f"{cost.rows_bytes / 1e9:.1f} GB of rows, {cost.parquet_bytes / 1e9:.1f} GB as Parquet"
    yield judged("memory", f"{cost.peak_bytes / 1e6:.0f} MB at the peak; {files}", "<= 1 GB", cost.peak_bytes <= PEAK_BYTES)
    yield judged("CPU time", f"{cost.cpu_s:.0f} s", f"<= {CPU_S:.0f} s", cost.cpu_s <= CPU_S, timing=True)


def _analysed(bench: Bench, num: int) -> tuple[AnalysisCost, Point]:
    """Write a run of about ``num`` requests, analyse it and remove it: a million take 3 GB."""
    folder = bench.new_folder()
    try:
        due = write_run(folder / "run", num)
        cost = cost_of(folder / "run")
    finally:
        shutil.rmtree(folder)
    found, expected = (cost.requests, cost.gaps, cost.verdict), (due, due * (TOKENS - 1), "slo-missed")
    seen, limit = (f"{requests:,} requests, {gaps:,} gaps, {verdict}" for requests, gaps, verdict in (found, expected))
    return cost, judged(f"{num:,} answers", seen, limit, found == expected)
