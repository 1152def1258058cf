"""The ledger of one ingress process: each HTTP request that asks a model becomes one line, at its one outcome.

Counted are POST requests to the routes of models, with a good API key where one is asked for: else anybody could push out what
the ledger holds. ``account.py`` knows what became of a request, ``ledger_file.py`` writes, ``ledger_lines.py`` describes each field.
"""

import time

import msgspec

from serve_app.books.ledger_lines import OUTCOMES, Counts, Head, Last, Line, file_name
from serve_app.config import LedgerSettings
from serve_app.errors import ServingError
from serve_app.ingress.books.ledger_file import LedgerFiles
from serve_app.ingress.exchange.account import Account
from serve_app.ingress.exchange.outcomes import Answer


class Ledger:
    """``begin`` and ``end`` cost the event loop some microseconds and never wait."""

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

    def begin(self, path: str, key: str | None) -> Account:
        """A request came."""
        account = Account(self._begun, path, key)
        self._open.add(self._begun)
        self._begun += 1
        return account

    def end(self, account: Account, answer: Answer, error: ServingError | None, *, stalled: bool) -> Line:
        """The request has ended: write its line, and return it."""
        line = account.line(self._seq, answer, error, stalled=stalled)
        data = self._encode(line) + b"\n"
        if self._files.wants_new_file or self._num_bytes + len(data) > self._file_bytes:
            self._begin_file()
        self._num_bytes += len(data)
        self._files.put(data)
        self._seq += 1
        self._open.remove(account.number)
        self._outcomes[line.outcome] += 1
        return line

    def close(self) -> None:
        """Write the last line; waits for the disk, for seconds at most."""
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

    def _counts(self) -> Counts:
        return Counts(seq=self._seq, begun=self._begun, open=sorted(self._open), outcomes=dict(self._outcomes))
