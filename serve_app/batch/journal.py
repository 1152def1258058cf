"""`Journal` remembers through any crash what a batch has answered so far, in a SQLite file beside the output.

A process holds the file's lock until it ends, for whatever reason; then the kernel frees the lock. So two processes never write at once,
and nothing waits for a killed process. The output is made from the journal at the end, in one piece.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from serve_app.errors import BatchError, JournalBroken

_FORMAT = 1
_PENDING, _ANSWERED, _FAILED = range(3)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS runs (run INTEGER PRIMARY KEY, format INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS lines (
  key TEXT PRIMARY KEY, digest TEXT NOT NULL, run INTEGER NOT NULL, position INTEGER NOT NULL,
  state INTEGER NOT NULL, result TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_run_by_state ON lines (run, state, position);
DROP INDEX IF EXISTS of_run;
INSERT INTO runs (format) VALUES ({_FORMAT});
"""

_MAKE_ROOM = "make room and run the same command: what is in the journal is kept"

LineState = Literal["new", "done", "twice"]


class JournalLine(NamedTuple):
    """A line that has its result, as one journal hands it to another journal."""

    key: str
    digest: str
    failed: bool
    result: str


@dataclass(frozen=True)
class JournalCounts:
    """Numbers of lines of this run's input."""

    answered: int
    failed: int


class Journal:
    """One batch's journal, held by this process until it is closed. Two threads must not use it at once."""

    def __init__(self, path: Path, *, notes_recorded: bool = False) -> None:
        """Open or make the journal and lock it.

        Args:
            notes_recorded: Whether `recorded` returns recorded lines. The caller has to drop them by `forget_recorded`, because their keys
                are held in memory.

        Raises:
            JournalBroken: The file is not a journal.
            BatchError: Another process holds the journal, or it cannot be written.
        """
        self.path = path
        self._num_seen = 0
        self._notes_recorded = notes_recorded
        self._recorded: list[str] = []
        """Keys of lines whose result was recorded and which `forget_recorded` has not dropped. `recorded` drops a key whose result was
        undone by a failed statement or commit."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=2.0, check_same_thread=False)
            try:
                # With this locking mode, WAL needs no memory that processes share, which network file systems do not have.
                self._db.executescript(
                    "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; BEGIN EXCLUSIVE;"
                )
                self._db.executescript(_SCHEMA)
                (self._run,) = self._db.execute("SELECT max(run) FROM runs").fetchone()
                self._refuse_other_formats()
                self._db.execute("BEGIN")
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as exc:
            raise _failed(path, exc) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, if the disk has room, and close."""
        try:
            self.commit()
        except BatchError:
            if kind is None:
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the journal, and drop changes since the last commit."""
        self._db.close()

    def see(self, key: str, digest: str, *, again: bool) -> LineState:
        """Note the next line of the input and return whether it has to be asked.

        Args:
            digest: If it differs from the earlier digest, the line was edited, and its old answer is dropped.
            again: Whether lines that failed before are asked again.
        """
        found = self._do("SELECT digest, run, state FROM lines WHERE key = ?", key).fetchone()
        if found is not None and found[1] == self._run:
            return "twice"
        self._num_seen += 1
        if found is not None and found[0] == digest and (found[2] == _ANSWERED or (found[2] == _FAILED and not again)):
            self._do("UPDATE lines SET run = ?, position = ? WHERE key = ?", self._run, self._num_seen, key)
            return "done"
        self._do("INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?, ?, '')", key, digest, self._run, self._num_seen, _PENDING)
        return "new"

    def record(self, key: str, result: str, *, failed: bool) -> None:
        """Note the line's result, which the next commit stores. A line that has a result keeps its first one."""
        change = "UPDATE lines SET state = ?, result = ? WHERE key = ? AND run = ? AND state = ?"
        changed = self._do(change, _FAILED if failed else _ANSWERED, result, key, self._run, _PENDING).rowcount
        if changed and self._notes_recorded:
            self._recorded.append(key)

    def recorded(self, limit: int, *, max_chars: int) -> list[JournalLine]:
        """Return lines that were recorded here and that `forget_recorded` has not dropped yet, the oldest first.

        A line whose result was lost with a failed transaction is left out.

        Args:
            limit: The most lines.
            max_chars: The most characters of their results together. A line that is longer is returned alone.
        """
        lines: list[JournalLine] = []
        while len(lines) < min(limit, len(self._recorded)):
            sql = "SELECT key, digest, state = ?, result FROM lines WHERE key = ? AND state != ?"
            found = self._do(sql, _FAILED, self._recorded[len(lines)], _PENDING).fetchone()
            if found is None:
                # When a statement or a commit finds no room, SQLite undoes the whole transaction, and the result with it.
                del self._recorded[len(lines)]
                continue
            key, digest, failed, result = found
            max_chars -= len(result)
            if lines and max_chars < 0:
                break
            lines.append(JournalLine(key, digest, bool(failed), result))
        return lines

    def forget_recorded(self, num: int) -> None:
        """Drop the first ``num`` lines of `recorded`."""
        del self._recorded[:num]

    def restore(self, lines: Iterable[JournalLine]) -> None:
        """Add lines of an earlier journal of the same batch. Of two lines with one key the later one counts."""
        values = "INSERT OR REPLACE INTO lines VALUES (?, ?, 0, 0, ?, ?)"
        for line in lines:
            self._do(values, line.key, line.digest, _FAILED if line.failed else _ANSWERED, line.result)

    def commit(self) -> None:
        """Make the noted results outlive this process, whatever ends it. A power cut may lose the last commits.

        Raises:
            BatchError: The disk is full; nothing is half written.
        """
        if not self._db.in_transaction:  # a statement has failed, and its error may have gone to another task
            raise BatchError(
                f"{self.path} cannot be written: a write failed, and what was noted since the last commit is lost", _MAKE_ROOM
            )
        self._do("COMMIT")
        self._do("BEGIN")

    def counts(self) -> JournalCounts:
        """Return how many lines of this run's input are answered and failed."""
        found = dict(self._do("SELECT state, count(*) FROM lines WHERE run = ? GROUP BY state", self._run))
        return JournalCounts(found.get(_ANSWERED, 0), found.get(_FAILED, 0))

    def results(self, *, failed: bool) -> Iterator[str]:
        """Yield the results of this run's lines in the order of the input: answers, or failures."""
        state = _FAILED if failed else _ANSWERED
        with closing(
            self._do("SELECT result FROM lines WHERE run = ? AND state = ? ORDER BY position", self._run, state)
        ) as found:
            for (result,) in found:
                yield result

    def _do(self, sql: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as exc:
            raise _failed(self.path, exc) from exc

    def _refuse_other_formats(self) -> None:
        (found,) = self._db.execute("SELECT max(format) FROM runs").fetchone()
        if found != _FORMAT:
            raise BatchError(
                f"{self.path} is a journal of format {found}, not {_FORMAT}", "finish it with the newer version that wrote it"
            )


def _failed(path: Path, exc: sqlite3.Error) -> BatchError:
    said = str(exc)
    if "disk is full" in said or "disk I/O" in said:
        return BatchError(f"{path} cannot be written: {said}", _MAKE_ROOM)
    if "locked" in said:
        return BatchError(f"another process is writing {path}", "let it finish or end it, or choose another --output")
    if any(words in said for words in ("not a database", "no such column", "has no column", "malformed")):
        return JournalBroken(f"{path} is not the journal of a batch", "remove it, or choose another --output")
    return BatchError(f"{path} cannot be used: {said}", "choose a folder that can be written")
