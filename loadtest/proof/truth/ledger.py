"""The ledger records what the law server did: its log, its totals, and /metrics from the same entries.

Times of the log are those of CLOCK_MONOTONIC, which is `time.perf_counter()` of every process on this machine.
"""

import time
from collections import Counter
from hashlib import sha256
from typing import Any, BinaryIO, Literal

import msgspec

from loadtest.proof.truth.answer import Asked
from loadtest.proof.truth.laws import Timing
from loadtest.proof.truth.settings import Law

Outcome = Literal["ok", "dropped", "truncated", "error_event", "status", "html", "client_gone", "shutdown"]
_PARTS = ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token")


class Entry(msgspec.Struct):
    """A line of the log: a generation request, written at its end. ``arrival_s`` is monotonic; other times count from ``arrival_s``."""

    request_id: str
    """The X-Request-Id header."""
    number: int
    """Order of arrival, from 1."""
    connection: int
    path: str
    arrival_s: float
    """When the request had been read."""
    arrival_unix_s: float
    kind: str = "request"
    model: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    max_tokens: int = 0
    injected: str = ""
    """The kind of failure that the law injected."""
    outcome: Outcome = "ok"
    status: int = 200
    """Status of the answer; 0: dropped without one."""
    tokens_sent: int = 0
    scheduled_first_s: float | None = None
    """When the first write that completes tokens was due; ``sent_first_s``: when it was made. None if there was none."""
    sent_first_s: float | None = None
    scheduled_last_s: float | None = None
    sent_last_s: float | None = None
    ended_s: float = 0.0
    queue_s: float | None = None
    """Scheduled time, like the next three, which /metrics sums over successful requests. None if the request got no slot."""
    prefill_s: float | None = None
    decode_s: float | None = None
    edge_s: float | None = None
    late_max_s: float = 0.0
    """The largest delay of a write against its schedule: the server's own error."""
    writes: list[tuple[float, int]] = []
    """The time and number of tokens of each write that completed tokens."""
    text_sha256: str = ""
    """SHA-256 of the sent text."""

    def note_write(self, due: float, now: float, num_tokens: int) -> None:
        """Record a write that was due at ``due`` and made at ``now``, both monotonic."""
        self.late_max_s = max(self.late_max_s, now - due)
        if num_tokens:
            self.scheduled_last_s, self.sent_last_s = due - self.arrival_s, now - self.arrival_s
            if not self.tokens_sent:
                self.scheduled_first_s, self.sent_first_s = self.scheduled_last_s, self.sent_last_s
            self.writes.append((round(self.sent_last_s, 7), num_tokens))
            self.tokens_sent += num_tokens


class TruthLedger:
    """The ledger of running and ended requests."""

    def __init__(self, law: Law, log: BinaryIO) -> None:
        self._law = law
        self._log = log
        self._live: dict[int, tuple[Entry, Asked, Timing]] = {}
        self._num: Counter[str] = Counter()  # ended requests by outcome, and totals of tokens
        self._sums_s = [0.0] * len(_PARTS)
        self._late_max_s = 0.0

    def begin(self, entry: Entry, asked: Asked, timing: Timing) -> None:
        """Add a running request that the law answers."""
        entry.stream, entry.prompt_tokens, entry.max_tokens = asked.stream, asked.prompt_tokens, len(asked.tokens)
        entry.model = asked.model
        if timing.made_s:
            entry.queue_s = timing.start_s - timing.arrival_s
            entry.prefill_s = timing.made_s[0] - timing.start_s
            entry.decode_s = timing.made_s[-1] - timing.made_s[0]
            entry.edge_s = timing.sent_s[0] - timing.made_s[0]
        self._live[entry.number] = (entry, asked, timing)

    def end(self, entry: Entry, outcome: Outcome) -> None:
        """Count the request and write it to the log; twice if it was processed twice."""
        entry.outcome, entry.ended_s = outcome, time.monotonic() - entry.arrival_s
        if entry.number in self._live:
            tokens = self._live.pop(entry.number)[1].tokens
            entry.text_sha256 = sha256("".join(tokens[: entry.tokens_sent]).encode()).hexdigest()
        self._late_max_s = max(self._late_max_s, entry.late_max_s)
        for _ in range(2 if entry.injected == "duplicate" else 1):
            self._num.update({outcome: 1, "generation_tokens": entry.tokens_sent})
            if outcome == "ok" and entry.queue_s is not None and entry.prefill_s is not None and entry.decode_s is not None:
                self._num["prompt_tokens"] += entry.prompt_tokens
                parts = (entry.queue_s, entry.prefill_s, entry.decode_s, entry.queue_s + entry.prefill_s)
                self._sums_s = [total + part for total, part in zip(self._sums_s, parts, strict=True)]
            self._write(entry)

    def close(self, origin_s: float) -> None:
        """Write the totals; ``origin_s`` is the monotonic time of the first request."""
        self._write({"kind": "totals", "origin_s": origin_s, "late_max_s": self._late_max_s, **self._num})

    def _write(self, line: Any) -> None:
        self._log.write(msgspec.json.encode(line) + b"\n")
        self._log.flush()

    def metrics(self, now_s: float) -> str:
        """Return vLLM's series at ``now_s`` after the first request. Times are those scheduled, without the edge, for successful
        requests; tokens of running requests count as they are sent."""
        label = f'engine="0",model_name="{self._law.model}"'
        timed = [(entry, timing) for entry, _, timing in self._live.values() if timing.made_s]
        running = [entry for entry, timing in timed if timing.start_s <= now_s < timing.made_s[-1]]
        held = sum(entry.prompt_tokens + entry.tokens_sent for entry in running)
        generated = self._num["generation_tokens"] + sum(entry.tokens_sent for entry, _, _ in self._live.values())
        failed = self._num["truncated"] + self._num["error_event"]
        samples = [
            ("num_requests_running", "gauge", "", len(running)),
            ("num_requests_waiting", "gauge", "", sum(now_s < timing.start_s for _, timing in timed)),
            ("kv_cache_usage_perc", "gauge", "", min(held / self._law.kv_tokens, 1.0)),
            ("prompt_tokens_total", "counter", "", self._num["prompt_tokens"]),
            ("generation_tokens_total", "counter", "", generated),
            ("request_success_total", "counter", ',finished_reason="length"', self._num["ok"]),
            ("request_success_total", "counter", ',finished_reason="abort"', self._num["client_gone"]),
            ("request_success_total", "counter", ',finished_reason="error"', failed),
        ]
        lines = []
        for name, kind, more, value in samples:
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{label}{more}}} {value}"]
        for part, total in zip(_PARTS, self._sums_s, strict=True):
            lines.append(f"# TYPE vllm:{part}_seconds histogram")
            lines.append(f'vllm:{part}_seconds_bucket{{{label},le="+Inf"}} {self._num["ok"]}')
            lines.append(f"vllm:{part}_seconds_count{{{label}}} {self._num['ok']}")
            lines.append(f"vllm:{part}_seconds_sum{{{label}}} {total!r}")
        return "\n".join([*dict.fromkeys(lines), ""])  # each TYPE line only once
