"""`check` finds out whether a ledger is whole: no line is missing, each request has one outcome, and the sums agree with the lines.

Lines are read one at a time. The check keeps 8 bytes of each line for its id, 8 bytes for each gap, and the numbers of requests that ran
at one moment, as intervals. Ten million lines take 80 MB of memory, and as much again while ids are compared.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from serve_app.books.ledger_lines import (
    MAX_ATTEMPTS_LISTED,
    NO_LINE,
    OUTCOMES,
    VERSION,
    Head,
    Last,
    LedgerCounts,
    LedgerLine,
    is_written,
)

MAX_KEPT = 1000
"""Most findings, and most notes, that are kept; all are counted."""
_ROUNDING_S = 0.001
MAX_LINE_BYTES = 1 << 24
"""Most bytes of a line. A head with a million running requests has 8 MB."""
_HEAD, _LINE, _LAST = msgspec.json.Decoder(Head), msgspec.json.Decoder(LedgerLine), msgspec.json.Decoder(Last)


@dataclass
class Report:
    """The result of a check: findings, notes and sums."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_findings: int = 0
    num_notes: int = 0
    num_files: int = 0
    num_ingresses: int = 0
    num_lines: int = 0
    num_without_outcome: int = 0
    num_resumed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    on_line: Callable[[LedgerLine], None] = lambda line: None
    _gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    _ids: "array[int]" = field(default_factory=lambda: array("q"))

    def wrong(self, finding: str) -> None:
        self.num_findings += 1
        if len(self.findings) < MAX_KEPT:
            self.findings.append(finding)

    def note(self, note: str) -> None:
        self.num_notes += 1
        if len(self.notes) < MAX_KEPT:
            self.notes.append(note)

    def add(self, line: LedgerLine) -> None:
        """Add a request to the sums."""
        self.num_lines += 1
        self.outcomes[line.outcome] += 1
        self.reasons[line.outcome, line.reason] += 1
        self.attempts[line.attempts] += 1
        self.num_resumed += bool(line.gaps_s)
        self.prompt_tokens += line.prompt_tokens
        self.output_tokens += line.output_tokens
        self._gaps_s.extend(line.gaps_s)
        self.on_line(line)
        if line.id:
            self._ids.append(hash(line.id))

    def gaps(self) -> tuple[float, float, float] | None:
        """Return median, 99th percentile and maximum of the gaps, in seconds; None without any."""
        if not self._gaps_s:
            return None
        p50, p99, longest = np.quantile(np.asarray(self._gaps_s), (0.5, 0.99, 1.0), method="inverted_cdf")
        return float(p50), float(p99), float(longest)

    def num_same_id(self) -> int:
        """Return how many lines have the id of an earlier line, up to chance collisions of 64 bits."""
        return len(self._ids) - len(np.unique(np.asarray(self._ids)))


class Numbers:
    """A set of whole numbers, stored as intervals: running requests are few, but a gap in the file leaves many numbers in a row open."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for number in sorted(numbers):
            self.add(number, number + 1)

    def count(self) -> int:
        """Return how many numbers are in the set. It has no `__len__`, because a changed file may hold more than `len` can return."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add start, ..., end - 1, which are above all numbers in the set."""
        if start < end:
            self._starts.append(start)
            self._ends.append(end)

    def remove(self, number: int) -> bool:
        """Remove the number; return whether it was in the set."""
        i = bisect_right(self._starts, number) - 1
        if i < 0 or number >= self._ends[i]:
            return False
        start, end = self._starts[i], self._ends[i]
        left = [(start, number)] * (start < number) + [(number + 1, end)] * (number + 1 < end)
        self._starts[i : i + 1] = [s for s, _ in left]
        self._ends[i : i + 1] = [e for _, e in left]
        return True


class _Chain:
    """The files of one ingress process, in their order, line by line."""

    def __init__(self, report: Report, head: Head) -> None:
        self.file = head.file
        self._report = report
        self._closed = False
        self._take(head.counts)

    def _take(self, counts: LedgerCounts) -> None:
        self._seq, self._begun = counts.seq, counts.begun
        self._running = Numbers(counts.open)
        self._outcomes = Counter(counts.outcomes)
        self._num_missing = 0

    def line(self, where: str, line: LedgerLine) -> None:
        if line.seq < self._seq:
            self._report.wrong(
                f"{where}: line number {line.seq} comes again, or out of order: {self._seq} was next; the file was changed"
            )
            return
        self._skip_to(where, line.seq)
        self._seq = line.seq + 1
        self._running.add(self._begun, line.number + 1)
        self._begun = max(self._begun, line.number + 1)
        if not self._running.remove(line.number):
            self._report.wrong(f"{where}: request number {line.number} has an outcome already; its id here is {line.id!r}")
        self._outcomes[line.outcome] += 1
        for problem in _problems(line):
            self._report.wrong(f"{where}: request {line.id!r} {problem}")
        self._report.add(line)

    def _skip_to(self, where: str, seq: int) -> None:
        if num_missing := max(seq - self._seq, 0):
            self._num_missing += num_missing
            which = f"{self._seq}" if num_missing == 1 else f"{self._seq} to {seq - 1}"
            way_out = "the ingress's log and serve_app_ledger_lost_total say why, unless they were removed"
            self._report.wrong(f"{where}: lines number {which} of the ingress are missing before it: {way_out}")

    def compare(self, where: str, counts: LedgerCounts) -> None:
        """Compare the ingress's own counts with those of the lines so far, and continue from the ingress's counts."""
        self._skip_to(where, counts.seq)
        self._running.add(self._begun, counts.begun)
        num_running = self._running.count()
        if not self._num_missing:
            if num_running != len(counts.open) or not all(map(self._running.remove, counts.open)):
                problem = f"{len(counts.open)} requests had no outcome yet, by the lines before it {num_running}, or others"
                self._report.wrong(f"{where}: by this line {problem}; the file was changed")
            elif self._outcomes != Counter(counts.outcomes):
                problem = f"requests ended {counts.outcomes}, by the lines before it {dict(self._outcomes)}"
                self._report.wrong(f"{where}: by this line {problem}; the file was changed")
        self._take(counts)

    def next_file(self, where: str, head: Head) -> None:
        """Continue with the ingress's next file among the given files."""
        if head.file == self.file + 1:
            self.compare(where, head.counts)
        else:
            self._report.wrong(f"{where}: is file {head.file} of its ingress, and the one before it here is file {self.file}")
            self._take(head.counts)
        self.file = head.file

    def close(self, where: str, counts: LedgerCounts) -> None:
        """Check the counts of the ingress's last line."""
        self.compare(where, counts)
        self._closed = True

    def end(self, where: str, *, runs: bool) -> None:
        """Note the requests that have no outcome after the ingress's last file. ``runs``: whether the ingress ran at the first look."""
        num = max(self._running.count() - self._num_missing, 0)
        self._report.num_without_outcome += num
        if not self._closed and not runs:
            why = "its ingress was killed, or still ran when the file was copied"
            self._report.note(f"{where}: no last line: {why}; {num} requests have no outcome")
        elif not self._closed and num:
            self._report.note(f"{where}: {num} requests have no outcome yet: their ingress runs")
        elif num:
            self._report.note(f"{where}: {num} requests had no outcome yet when the ingress ended")


def _problems(line: LedgerLine) -> Iterator[str]:
    """Yield the contradictions of a line."""
    listed = min(line.attempts, MAX_ATTEMPTS_LISTED)
    if len(line.replicas) < listed or len(line.ends) < listed:
        yield f"had {line.attempts} attempts, but {len(line.replicas)} replicas and {len(line.ends)} ends are listed"
    if line.output_tokens and not (line.attempts and line.first_token_s is not None):
        yield f"got {line.output_tokens} tokens without an attempt or a first token"
    if line.outcome == "rejected" and line.attempts and not line.reason.startswith("http_4"):  # vLLM finds some mistakes late
        yield f"was rejected, and started {line.attempts} times"
    if line.outcome == "complete" and not 200 <= (line.status or 0) < 400:
        yield f"is complete with the status {line.status}"
    times_s = (line.queued_s or 0.0, line.first_token_s or 0.0, *line.gaps_s)
    if min(times_s) < 0 or max(times_s) > line.total_s + _ROUNDING_S:
        yield f"lasted {line.total_s} s, and a part of it {max(times_s)} s, or a part has a negative time"


def check(files: Iterable[Path], on_line: Callable[[LedgerLine], None] = lambda line: None) -> Report:
    """Return the report about the files. ``on_line`` is called with each line that counts, which is each request once.

    Raises:
        OSError: A file cannot be read.
    """
    report = Report(on_line=on_line)
    heads = sorted(_heads(files, report), key=lambda item: (item[1].started, item[1].ingress, item[1].file))
    for _, group in groupby(heads, key=lambda item: (item[1].started, item[1].ingress)):
        _check_ingress(list(group), report)
    return report


def _check_ingress(files: Sequence[tuple[Path, Head]], report: Report) -> None:
    path, head = files[0]
    report.num_ingresses += 1
    if head.file:
        report.note(f"{path}: is file {head.file} of its ingress; earlier files were removed to make room, or are not given")
    chain = _Chain(report, head)
    runs = is_written(files[-1][0])
    for path, head in files:
        if head.file != chain.file:
            chain.next_file(f"{path}:1", head)
        _read(path, chain, report, is_last=path == files[-1][0])
    chain.end(str(path), runs=runs)


def _heads(files: Iterable[Path], report: Report) -> Iterator[tuple[Path, Head]]:
    for path in dict.fromkeys(files):
        report.num_files += 1
        with path.open("rb") as file:
            line = file.readline(MAX_LINE_BYTES)
        try:
            head = _HEAD.decode(line)
        except NO_LINE as exc:
            if line:
                report.wrong(
                    f"{path}:1: is not the first line of a ledger's file: {exc}; the file was changed, or is something else"
                )
            else:
                report.note(f"{path}: is empty: nothing could be written to it")
            continue
        if head.ledger == VERSION:
            yield path, head
        else:
            report.wrong(f"{path}:1: is of version {head.ledger}; this serve-app reads {VERSION}: use the version that wrote it")


def _read(path: Path, chain: _Chain, report: Report, *, is_last: bool) -> None:
    with path.open("rb") as file:
        file.readline(MAX_LINE_BYTES)
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 2):
            where = f"{path}:{number}"
            if is_last and not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                report.note(f"{where}: the last line is cut off: its ingress was killed while it wrote it, or writes now")
                return
            try:
                if line.startswith(b'{"closed":'):
                    chain.close(where, _LAST.decode(line).counts)
                else:
                    chain.line(where, _LINE.decode(line))
            except NO_LINE as exc:
                report.wrong(f"{where}: is not a line of a ledger: {exc}; the file was changed, or its disk is damaged")
