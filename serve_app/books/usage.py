"""`Usage` sums the lines of a ledger by tenant, API key, model and time: the requests, tokens and GPU-seconds of a bill. Pure.

A request belongs to the hour in which it began. Prompt tokens count only if an engine answered, because a prompt that only waited was no
work.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, get_args

from serve_app.books.ledger_lines import LedgerLine

Group = Literal["tenant", "key", "model", "hour", "day"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(slots=True)
class Use:
    """The sums of some requests. Refused requests are in ``requests``, and cached tokens in ``prompt_tokens``."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_s: float | None = None
    """GPU-seconds of the answered requests that have them; None if none has."""

    def add(self, line: LedgerLine) -> None:
        self.requests += 1
        self.refused += line.outcome == "rejected"
        if was_answered(line):
            self.prompt_tokens += line.prompt_tokens
            self.cached_tokens += line.cached_tokens or 0
        self.output_tokens += line.output_tokens
        if line.gpu_s is not None and was_answered(line):
            self.gpu_s = (self.gpu_s or 0.0) + line.gpu_s


@dataclass
class Usage:
    """The sums of all requests that began from ``begin`` to before ``end``, in seconds since the epoch, by groups."""

    by: Sequence[Group]
    begin: float = -math.inf
    end: float = math.inf
    total: Use = field(default_factory=Use, init=False)
    num_unmeasured: int = field(default=0, init=False)
    """Answered requests without GPU-seconds."""
    num_without_cached: int = field(default=0, init=False)
    """Requests with output tokens whose line has no number of cached tokens."""
    seen: tuple[float, float] | None = field(default=None, init=False)
    """The times of the first and the last request of the whole ledger; None without any."""
    _uses: dict[tuple[str | None, ...], Use] = field(default_factory=dict, init=False)

    def add(self, line: LedgerLine) -> None:
        """Add a request, if it began within the time."""
        first, last = self.seen or (line.time, line.time)
        self.seen = min(first, line.time), max(last, line.time)
        if not self.begin <= line.time < self.end:
            return
        self.total.add(line)
        self._uses.setdefault(tuple([_GROUP[group](line) for group in self.by]), Use()).add(line)
        self.num_unmeasured += line.gpu_s is None and was_answered(line)
        self.num_without_cached += line.cached_tokens is None and line.output_tokens > 0

    def rows(self) -> Iterator[tuple[tuple[str | None, ...], Use]]:
        """Yield the value of each group, None for requests without one, and their sums, in the order of the groups."""
        yield from sorted(self._uses.items(), key=lambda item: [(value is None, value or "") for value in item[0]])


def was_answered(line: LedgerLine) -> bool:
    """Return whether an engine has read the request's prompt."""
    return bool(line.engine_requests) and (line.first_token_s is not None or line.outcome == "complete")


_GROUP: Mapping[Group, Callable[[LedgerLine], str | None]] = {
    # A line of an older release has no tenant. There each key was a tenant of its own, named like its key.
    "tenant": lambda line: line.tenant or line.key,
    "key": lambda line: line.key,
    "model": lambda line: line.model,
    "hour": lambda line: f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%dT%H:00Z}",
    "day": lambda line: f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%d}",
}
