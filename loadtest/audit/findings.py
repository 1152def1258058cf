"""This module names the kinds of findings of an audit, and collects the findings of one audit."""

from collections import Counter

import msgspec

from loadtest.wording import shown

KINDS = {
    "schedule": "the schedule's file is not the one that the manifest names",
    "edited": "records are not as the recorder wrote them",
    "implausible": "times, tokens or a status that no run can have recorded",
    "text-edited": "the text does not match its own hash",
    "missing": "scheduled, no row",
    "duplicate-row": "several rows of one id",
    "unknown-id": "a row of an id that was not scheduled",
    "timeout": "neither answered nor refused in time",
    "truncated": "the answer ended without its end mark",
    "connect-error": "no connection",
    "bad-answer": "neither an answer nor an error status or event",
    "no-reason": "never sent, and no reason given",
    "no-retry-after": "429 or 503 without Retry-After",
    "text-differs": "complete, with another text than the reference's",
    "wrong-length": "complete, with another number of tokens than asked",
    "usage-differs": "more tokens received than the server's usage says",
    "server-missing": "sent, not in the server's log",
    "server-duplicate": "several times in the server's log",
    "server-unsent": "in the server's log, never sent",
    "server-differs": "the server's log has another outcome, status, number of tokens or text",
    "counters": "the server's counters do not fit the rows",
}
MAX_LISTED = 20
"""Number of listed findings per kind."""
MAX_TEXT = 600
"""Kept characters of a finding: a row's reason has at most 300, and two quoted texts have 120."""


class Finding(msgspec.Struct, frozen=True):
    kind: str
    """A key of `KINDS`."""
    id: int | None
    text: str


class Findings:
    """The findings so far. The ids in ``touched`` are mismatches."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.touched: set[int] = set()

    def add(self, kind: str, request_id: int | None, text: str) -> None:
        """Add a finding. The text may quote the target: it is shortened, and its control characters are written as ``\\x1b``."""
        self.counts[kind] += 1
        if request_id is not None:
            self.touched.add(request_id)
        if self.counts[kind] <= MAX_LISTED:
            self.findings.append(Finding(kind, request_id, shown(text, MAX_TEXT)))
