"""A journal counts a batch's lines without reading their results."""

import sqlite3
from pathlib import Path

from serve_app.batch.journal import _FORMAT, Journal, JournalCounts

_BEFORE = f"""
CREATE TABLE runs (run INTEGER PRIMARY KEY, format INTEGER NOT NULL) STRICT;
CREATE TABLE lines (
  key TEXT PRIMARY KEY, digest TEXT NOT NULL, run INTEGER NOT NULL, position INTEGER NOT NULL,
  state INTEGER NOT NULL, result TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX of_run ON lines (run, position);
INSERT INTO runs (format) VALUES ({_FORMAT});
INSERT INTO lines VALUES ('id-1', 'digest', 1, 1, 1, 'answer');
"""
"""A journal as serve-app wrote it when lines had no index by state."""


def test_lines_are_counted_without_a_look_at_their_results_also_in_an_older_journal(tmp_path: Path) -> None:
    older = sqlite3.connect(tmp_path / "journal")
    older.executescript(_BEFORE)
    older.close()
    with Journal(tmp_path / "journal") as journal:
        for key in ("id-2", "id-1", "id-3"):
            journal.see(key, "digest", again=False)
        journal.record("id-3", "failure", failed=True)
        journal.record("id-2", "another", failed=False)
        statements: list[str] = []
        journal._db.set_trace_callback(statements.append)
        assert journal.counts() == JournalCounts(answered=2, failed=1)
        journal._db.set_trace_callback(None)
        plans = [row[3] for sql in statements for row in journal._db.execute(f"EXPLAIN QUERY PLAN {sql}")]
        assert [plan for plan in plans if "COVERING INDEX" in plan], plans
        assert list(journal.results(failed=False)) == ["another", "answer"], "in the order of the input"
