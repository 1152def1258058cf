"""The ledger of one ingress writes one line for each HTTP request that asks a model, when the request has ended.

It records POST requests to the routes of models, and only those with a valid API key if keys are required: otherwise any client could push
out older lines. ``ledger_file.py`` writes the files, ``serve_app/books/ledger_lines.py`` describes each field.
"""

import time

import msgspec

from serve_app.books.ledger_lines import (
    MAX_ATTEMPTS_LISTED,
    OUTCOMES,
    Head,
    Last,
    LedgerCounts,
    LedgerLine,
    LedgerMove,
    LedgerRoute,
    file_name,
)
from serve_app.config import LedgerSettings
from serve_app.core.trail import Move, Route
from serve_app.ingress.books.ledger_file import LedgerFiles
from serve_app.ingress.exchange.engine_requests import Totals
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.exchange.outcomes import Ending


class Ledger:
    """The ledger of one ingress. ``begin`` and ``end`` take the event loop some microseconds and never wait."""

    def __init__(self, settings: LedgerSettings, ingress_id: str) -> None:
        self._ingress_id = ingress_id
        self._started = time.time()
        self._file_bytes = settings.file_bytes
        self._files = LedgerFiles(settings.dir, max_bytes=settings.max_bytes, file_bytes=settings.file_bytes)
        self._encode = msgspec.json.Encoder().encode
        self._open: set[int] = set()
        self._begun = self._seq = self._num_files = self._num_bytes = 0
        self._outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._begin_file()

    def begin(self, exchange: Exchange) -> None:
        """Give a new exchange its number."""
        exchange.number = self._begun
        self._open.add(self._begun)
        self._begun += 1

    def end(self, exchange: Exchange, ending: Ending, totals: Totals, gpu_s: float | None) -> LedgerLine:
        """Write the line of an exchange that has ended, and return the line."""
        line = line_of(exchange, ending, totals, gpu_s, seq=self._seq)
        data = self._encode(line) + b"\n"
        if self._files.wants_new_file or self._num_bytes + len(data) > self._file_bytes:
            self._begin_file()
        self._num_bytes += len(data)
        self._files.put(data)
        self._seq += 1
        self._open.remove(exchange.number)
        self._outcomes[line.outcome] += 1
        return line

    def close(self) -> None:
        """Write the last line. This waits for the disk, for seconds at most."""
        last = Last(closed=round(time.time(), 3), counts=self._counts())
        self._files.close(self._encode(last) + b"\n")

    def _begin_file(self) -> None:
        head = Head(
            ingress=self._ingress_id,
            started=round(self._started, 3),
            time=round(time.time(), 3),
            file=self._num_files,
            counts=self._counts(),
        )
        data = self._encode(head) + b"\n"
        self._files.begin_file(file_name(self._ingress_id, self._started, self._num_files), data)
        self._num_files += 1
        self._num_bytes = len(data)

    def _counts(self) -> LedgerCounts:
        return LedgerCounts(seq=self._seq, begun=self._begun, open=sorted(self._open), outcomes=dict(self._outcomes))


def line_of(exchange: Exchange, ending: Ending, totals: Totals, gpu_s: float | None, *, seq: int) -> LedgerLine:
    """Return the ledger's line of an exchange that has ended. ``totals`` are those of its engine requests."""
    first_at = totals.first_token_at
    return LedgerLine(
        seq=seq,
        number=exchange.number,
        time=round(exchange.time, 3),
        id=exchange.shown_id,
        key=exchange.key,
        tenant=exchange.tenant,
        model=exchange.model or None,
        path=exchange.path,
        stream=exchange.stream,
        outcome=ending.outcome,
        status=ending.status or None,
        reason=ending.reason or totals.reason,
        engine_requests=exchange.requests.num,
        attempts=totals.num_attempts,
        replicas=totals.replicas[:MAX_ATTEMPTS_LISTED],
        ends=totals.ends[:MAX_ATTEMPTS_LISTED],
        routes=[_route(*each, exchange.arrived_at) for each in totals.routes[:MAX_ATTEMPTS_LISTED]],
        moves=[_move(*each, exchange.arrived_at) for each in totals.moves[:MAX_ATTEMPTS_LISTED]],
        prompt_tokens=exchange.requests.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        output_tokens=totals.output_tokens,
        queued_s=None if totals.queued_s is None else round(totals.queued_s, 4),
        first_token_s=None if first_at is None else round(first_at - exchange.arrived_at, 4),
        total_s=round(exchange.ended_at - exchange.arrived_at, 4),
        gpu_s=None if gpu_s is None else round(gpu_s, 6),
        gaps_s=[round(gap_s, 4) for gap_s in totals.gaps_s[:MAX_ATTEMPTS_LISTED]],
    )


def _route(reason: str, start: float, route: Route, arrived_at: float) -> LedgerRoute:
    saves_s = round(route.saves_s, 4) if route.saves_s else 0.0
    return LedgerRoute(reason, round(start - arrived_at, 4), route.hit_tokens, route.tokens_before, saves_s)


def _move(attempt: int, move: Move, arrived_at: float) -> LedgerMove:
    return LedgerMove(
        attempt=attempt,
        at_s=round(move.at - arrived_at, 4),
        cause=move.cause,
        saves_s=round(move.saves_s, 4),
        read_s=None if move.read_s is None else round(move.read_s, 4),
        result=move.result,
        read_tokens=move.read_tokens,
    )
