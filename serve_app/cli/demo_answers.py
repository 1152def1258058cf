"""`DemoAnswer` records how one streamed answer of ``serve-app demo`` ended, and `Summary` sums up many. Pure."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.table import Table


@dataclass
class DemoAnswer:
    """One streamed chat answer; give each line of its event stream to `take`."""

    text: str = ""
    num_tokens: int = 0
    """The server's count, from its last event."""
    ttft_s: float | None = None
    """Seconds from sending to the first non-empty token; None before it."""
    error: str = ""
    """The server's own error message."""
    lost: str = ""
    """How the connection broke."""
    finish_reason: str = ""
    done: bool = False

    def take(self, line: str) -> str:
        """Add one line and return the text that came with it."""
        if line == "data: [DONE]":
            self.done = True
        if not line.startswith("data: {"):
            return ""
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        if error := event.get("error"):
            self.error = str(error.get("message", error))
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]
        text = ""
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += text
        return text

    @property
    def outcome(self) -> Literal["complete", "failed", "truncated"]:
        """The outcome. Truncated: the answer began, and ended without a finish reason and without an error, which is always wrong."""
        if self.done and self.finish_reason and not self.error:
            return "complete"
        return "truncated" if self.text and not self.error else "failed"

    @property
    def problem(self) -> str:
        """Return what went wrong, empty if nothing did."""
        if self.outcome == "complete":
            return ""
        return self.error or self.lost or "the stream ended without a finish reason"


@dataclass(frozen=True)
class Summary:
    """Figures of many answers. Percentiles are over the answers that had a first token; None if no answer had one."""

    num_requests: int
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    failed: int
    truncated: int

    @classmethod
    def of(cls, answers: Sequence[DemoAnswer], elapsed_s: float) -> "Summary":
        outcomes = Counter(answer.outcome for answer in answers)
        ttfts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
        p50, p99 = (float(value) for value in np.percentile(ttfts, [50, 99])) if ttfts else (None, None)
        rate = sum(answer.num_tokens for answer in answers) / elapsed_s
        return cls(len(answers), rate, p50, p99, outcomes["failed"], outcomes["truncated"])

    @property
    def good(self) -> bool:
        return self.num_requests > 0 and self.failed == self.truncated == 0

    def table(self) -> Table:
        table = Table("requests", "tok/s", "TTFT p50", "TTFT p99", "failed", "truncated")
        p50, p99 = ("-" if value is None else f"{value:.2f} s" for value in (self.ttft_p50_s, self.ttft_p99_s))
        table.add_row(str(self.num_requests), f"{self.tokens_per_s:.0f}", p50, p99, str(self.failed), str(self.truncated))
        return table
