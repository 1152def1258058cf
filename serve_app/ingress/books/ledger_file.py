"""Ledger files are written and rotated by a thread, which keeps all files of the folder together within their limit.

The event loop never waits for a disk: it puts lines into a bounded queue. A line that finds no room, in the queue or on the disk, is lost
and counted; the log has one line about it. Lines are written again as soon as there is room. Each write is one system call for all waiting
lines, so a killed process leaves whole lines and at most a piece of the last one.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from serve_app.books.ledger_lines import is_written, ledger_files
from serve_app.books.series import counter

logger = logging.getLogger(__name__)

QUEUED = 10_000
"""The most lines that wait for the disk: some 5 MB."""
MAX_FILES = 1000
"""The most files in the folder, however small they are: each start of an ingress begins one."""
_BATCH = 1000
_REST_S = 0.02  # the pause after each write: waking the thread for each line would cost the event loop more than the line itself
_CLOSE_S = 5.0  # the longest wait for a disk that hangs; Serve ends the process soon after

LOST = counter("ledger_lost")


class LedgerFiles:
    """The files of one ingress. Call ``begin_file``, then ``put`` lines. All methods but ``close`` return at once.

    Args:
        max_bytes: The limit for all files in the folder, including those of other ingresses. The oldest files are removed first, and no
            file that is being written.
        file_bytes: The expected largest size of a file.
    """

    def __init__(self, folder: Path, *, max_bytes: int, file_bytes: int) -> None:
        self._folder = folder
        self._max_bytes, self._file_bytes = max_bytes, file_bytes
        self._queue: SimpleQueue[bytes | tuple[str, bytes] | None] = SimpleQueue()
        self._fd: int | None = None
        self._name, self._head = "", b""
        self._fails_since: float | None = None
        self.wants_new_file = False
        """Whether the file can no longer be used, for example because an operator removed it."""
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def begin_file(self, name: str, head: bytes) -> None:
        """Begin a new file with this line. Later lines go to this file."""
        self.wants_new_file = False
        self._queue.put((name, head))

    def put(self, line: bytes) -> None:
        """Queue the line, which ends with a newline, to be written soon. If the queue is full, the line is lost."""
        if self._queue.qsize() < QUEUED:
            self._queue.put(line)
        else:
            LOST.inc()

    def close(self, last: bytes) -> None:
        """Write the waiting lines and this last line, which counts lost lines, and end the thread."""
        self._queue.put(last)
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        lines: list[bytes] = []
        while True:
            item = self._queue.get()
            while isinstance(item, bytes):
                lines.append(item)
                if len(lines) == _BATCH or self._queue.empty():
                    break
                item = self._queue.get()
            if lines:
                self._write(lines)
                lines.clear()
            if item is None:
                self._close_file()
                return
            if isinstance(item, tuple):
                self._close_file()
                self._name, self._head = item
                self._write([])
            time.sleep(_REST_S)

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join([self._head, *lines])
        try:
            self._open()
            written, problem = self._append(data)
        except OSError as exc:
            written, problem = 0, exc
        if written:
            self._head = b""
        num_lost = data.count(b"\n", written) - bool(self._head)
        if problem is None:
            self._say_again(len(lines))
            return
        LOST.inc(num_lost)
        if self._fails_since is None:
            self._fails_since = time.monotonic()
            logger.error("the ledger in %s cannot be written: %s; requests continue without it", self._folder, problem.strerror)

    def _say_again(self, num_lines: int) -> None:
        if self._fails_since is not None and num_lines:
            logger.warning("the ledger in %s is written again, after %.0f s", self._folder, time.monotonic() - self._fails_since)
            self._fails_since = None

    def _append(self, data: bytes) -> tuple[int, OSError | None]:
        """Return how many bytes were appended, all in whole lines, and the error if these are not all."""
        assert self._fd is not None
        status, done = os.fstat(self._fd), 0
        if not status.st_nlink:
            self.wants_new_file = True
            return 0, FileNotFoundError(errno.ENOENT, "its file was removed")
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as exc:
            whole = data.rfind(b"\n", 0, done) + 1
            os.ftruncate(self._fd, status.st_size + whole)
            return whole, exc
        return done, None

    def _open(self) -> None:
        if self._fd is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another ingress has removed a file first; the next call makes up for it
            self._make_room()
        self._fd = os.open(self._folder / self._name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # until the file is closed; `is_written` asks for it

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _make_room(self) -> None:
        """Remove the oldest files until a new file fits. A file that is being written counts with its expected size."""
        files = sorted(ledger_files(self._folder), key=lambda path: path.stat().st_mtime)
        sizes = {path: max(path.stat().st_size, self._file_bytes * is_written(path)) for path in files}
        num_bytes, num_files = sum(sizes.values()) + self._file_bytes, len(sizes) + 1
        for path, size in sizes.items():
            if num_bytes <= self._max_bytes and num_files <= MAX_FILES:
                return
            if not is_written(path):
                path.unlink(missing_ok=True)
                num_bytes, num_files = num_bytes - size, num_files - 1
