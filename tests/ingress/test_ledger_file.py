"""Ledger files keep their size, and keep whole lines when the disk, the folder or the process fails."""

import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from serve_app.books.ledger_check import check
from serve_app.books.ledger_lines import ledger_files
from serve_app.config import LedgerSettings
from serve_app.ingress.books import ledger_file
from serve_app.ingress.books.ledger import Ledger
from serve_app.ingress.exchange.engine_requests import Totals
from serve_app.ingress.exchange.exchange import Exchange

num_lost = partial(REGISTRY.get_sample_value, "serve_app_ledger_lost_total")


def small(folder: Path) -> LedgerSettings:
    return LedgerSettings(dir=folder, max_bytes=1 << 20, file_bytes=1 << 16)


def answer(ledger: Ledger, num: int = 1) -> None:
    """Let requests come and be answered, one after the other."""
    for _ in range(num):
        exchange = Exchange("/v1/completions")
        ledger.begin(exchange)
        exchange.id = f"id-{exchange.number}"
        exchange.status, exchange.answered = 200, True
        ledger.end(exchange, exchange.end(), Totals(), None)


def until(holds: object) -> None:
    deadline = time.monotonic() + 30
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in ledger_files(folder))


def test_the_folder_stays_within_its_limit_and_what_is_left_is_whole(tmp_path: Path) -> None:
    ledger = Ledger(small(tmp_path), "ingress-1")
    answer(ledger, 6000)
    ledger.close()
    report = check(ledger_files(tmp_path))
    assert (1 << 20) - (1 << 17) < num_bytes(tmp_path) <= 1 << 20
    assert report.findings == []
    assert [note.partition(": ")[2].partition(" of its")[0] for note in report.notes] == [f"is file {first(tmp_path)}"]
    assert 2000 < report.num_lines < 6000


def first(folder: Path) -> int:
    number = int(ledger_files(folder)[0].stem[-6:])
    assert number > 0
    return number


def test_many_starts_leave_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "MAX_FILES", 5)
    for start in range(9):
        ledger = Ledger(small(tmp_path), f"ingress-{start}")
        answer(ledger)
        ledger.close()
    report = check(ledger_files(tmp_path))
    assert (report.num_files, report.num_ingresses, report.findings, report.notes) == (5, 5, [], [])


def test_a_file_that_another_ingress_writes_is_not_removed(tmp_path: Path) -> None:
    quiet, busy = Ledger(small(tmp_path), "quiet"), Ledger(small(tmp_path), "busy")
    answer(quiet)
    until(lambda: any("quiet" in path.name and path.read_text().count("\n") == 2 for path in ledger_files(tmp_path)))
    answer(busy, 8000)
    busy.close()
    answer(quiet)
    quiet.close()
    report = check(ledger_files(tmp_path))
    assert (report.num_ingresses, report.findings, num_bytes(tmp_path) <= 1 << 20) == (2, [], True)
    assert next(path for path in ledger_files(tmp_path) if "quiet" in path.name).read_text().count("\n") == 4


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    append = ledger_file.LedgerFiles._append

    def hanging(files: ledger_file.LedgerFiles, data: bytes) -> object:
        hangs.wait()
        return append(files, data)

    monkeypatch.setattr(ledger_file.LedgerFiles, "_append", hanging)
    monkeypatch.setattr(ledger_file, "QUEUED", 10)
    ledger, before = Ledger(small(tmp_path), "ingress-1"), num_lost() or 0.0
    answer(ledger, 100)
    lost = (num_lost() or 0.0) - before
    hangs.set()
    ledger.close()
    report = check(ledger_files(tmp_path))
    assert lost >= 80
    assert report.num_lines == 100 - lost
    assert "are missing" in report.findings[0]


def test_a_folder_that_was_removed_costs_lines_and_is_made_again_and_a_clock_that_steps_does_not_change_for_how_long_it_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = map(float, range(0, 1 << 20, 3600))
    monkeypatch.setattr(ledger_file, "time", SimpleNamespace(time=hours.__next__, monotonic=time.monotonic, sleep=time.sleep))
    folder = tmp_path / "ledger"
    ledger, before = Ledger(small(folder), "ingress-1"), num_lost() or 0.0
    answer(ledger)
    until(lambda: folder.exists() and num_bytes(folder) > 300)
    (file,) = ledger_files(folder)
    file.unlink()
    folder.rmdir()
    answer(ledger)
    until(lambda: num_lost() == before + 1)
    answer(ledger)
    ledger.close()
    report = check(ledger_files(folder))
    assert (report.num_lines, report.findings) == (1, [])
    assert [note.partition(": ")[2].partition(";")[0] for note in report.notes] == ["is file 1 of its ingress"]
    said = [record.getMessage() for record in caplog.records if "ledger" in record.getMessage()]
    assert said[0] == f"the ledger in {folder} cannot be written: its file was removed; requests continue without it"
    assert re.fullmatch(rf"the ledger in {folder} is written again, after \d\d? s", said[1])


CHILD = """
    import os, resource, signal, sys, time
    from pathlib import Path
    from serve_app.ingress.books import ledger_file
    from tests.ingress.test_ledger_file import Exchange, Ledger, answer, num_lost, small, until
    folder = Path(sys.argv[1])
"""


def child(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run it in a process of its own: what it does to itself ends or limits a whole process."""
    program = textwrap.dedent(CHILD) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120, check=False)


def test_a_full_disk_costs_lines_until_it_has_room_again(tmp_path: Path) -> None:
    ended = child(
        """
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))
        ledger = Ledger(small(folder), "ingress-1")
        answer(ledger, 30)
        until(lambda: num_lost())
        answer(ledger, 5)
        time.sleep(0.2)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        answer(ledger, 5)
        ledger.close()
        print(int(num_lost()))
        """,
        tmp_path,
    )
    assert (ended.returncode, ended.stderr.count("cannot be written: File too large")) == (0, 1), ended.stderr
    report, lost = check(ledger_files(tmp_path)), int(ended.stdout)
    assert lost > 20
    assert report.num_lines == 40 - lost
    (finding,) = report.findings
    assert f"lines number {35 - lost} to 34 of the ingress are missing before it" in finding
    assert report.notes == []


def test_a_process_that_is_killed_within_a_line_leaves_all_lines_before_it(tmp_path: Path) -> None:
    ended = child(
        """
        ledger = Ledger(small(folder), "ingress-1")
        answer(ledger, 7)
        until(lambda: list(folder.iterdir()) and next(folder.iterdir()).read_text().count("\\n") == 8)
        write = os.write
        def torn(fd, data):
            write(fd, data[:-40])
            os.kill(os.getpid(), signal.SIGKILL)
        os.write = torn
        running = Exchange("/v1/completions")
        ledger.begin(running)
        answer(ledger)
        time.sleep(60)
        """,
        tmp_path,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    report = check(ledger_files(tmp_path))
    (file,) = ledger_files(tmp_path)
    assert (report.num_lines, report.findings) == (7, [])
    assert report.notes == [
        f"{file}:9: the last line is cut off: its ingress was killed while it wrote it, or writes now",
        f"{file}: no last line: its ingress was killed, or still ran when the file was copied; 0 requests have no outcome",
    ]
