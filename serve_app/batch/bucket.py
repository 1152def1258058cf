"""`Bucket` keeps the bytes of files in an object store, or in a folder that several machines mount. A file is there whole or not at all.

Files are written in a scratch folder of this machine first, and read from a copy there. The file `serve-app-database` beside them, the
marker, names the database of their records. Ingresses of another database are refused, because each would take the other's files for
leftovers and remove them.
Needs the extra `serve-app[shared-batches]`.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NoReturn

from pyarrow import ArrowException, NativeFile
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from serve_app.batch.folder import LEFTOVER_S, Folder, storage_error
from serve_app.batch.output import put_in_place
from serve_app.config.batch_urls import masked
from serve_app.errors import StorageAway, StorageFailed

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0
_COPY_BYTES = 1 << 20
_NAME = re.compile(r"file-[0-9a-f]{32}")
"""Names of files that ingresses store. `sweep` removes no file of another name."""
_MARKER = "serve-app-database"


@dataclass(slots=True)
class _Copy:
    """A copy of a file on this machine's disk. ``lock`` is held while the copy is fetched."""

    path: Path
    lock: Lock = field(default_factory=Lock)
    num_readers: int = 0
    is_whole: bool = False


class Bucket:
    """The files below ``url``, such as ``s3://BUCKET/PREFIX?region=eu-central-1``. The store's client finds the credentials by itself.

    Any thread may call the methods. Each call waits for the network, and raises `StorageAway` when the network fails. Nothing is sent
    before the first call.
    """

    def __init__(self, url: str, scratch: Folder, database: Callable[[], str], has_files: Callable[[], bool]) -> None:
        """``database`` and ``has_files`` may wait for the network, too.

        Args:
            database: Returns the identity of the database that has the records of the files.
            has_files: Returns whether the database has a record of any file. If it has, a missing marker means that the store is away, not
                that the store is new.
        """
        self._url, self._scratch, self._database, self._has_files = url, scratch, database, has_files
        self._lock, self._root_lock = Lock(), Lock()
        self._copies: dict[str, _Copy] = {}
        self._found: tuple[FileSystem, str] | None = None
        self._has_seen_marker = False
        """Whether the marker of this database was there before. A marker that is missing later is not made again: a volume may be away for
        a moment."""

    def keep(self, part: Path, file_id: str) -> None:
        """Store a whole part under the id, and remove the part."""
        with _away_on_error():
            files, root = self._root()
            if isinstance(files, LocalFileSystem):  # where the volume is not mounted, its empty folder would take the file
                self._require_marker(files, root)
            with part.open("rb") as source, files.open_output_stream(f"{root}/{file_id}") as stored:
                shutil.copyfileobj(source, stored, _COPY_BYTES)
            if isinstance(files, LocalFileSystem):
                _sync(Path(root, file_id))
        part.unlink(missing_ok=True)

    @contextmanager
    def on_disk(self, file_id: str) -> Iterator[Path]:
        """Lend a copy on this machine's disk. Readers of the same file share one copy, so that slow readers take no more room.

        Raises:
            FileNotFoundError: There is no such file.
            StorageAway: The store does not answer, or all its files are away.
        """
        with self._lock:
            copy = self._copies.setdefault(file_id, _Copy(self._scratch.part()))
            copy.num_readers += 1
        try:
            with copy.lock:
                if not copy.is_whole:
                    with _away_on_error():
                        self._fetch(file_id, copy.path)
                    copy.is_whole = True
            yield copy.path
        finally:
            with self._lock:
                copy.num_readers -= 1
                if not copy.num_readers:
                    del self._copies[file_id]
                    copy.path.unlink(missing_ok=True)

    def _fetch(self, file_id: str, part: Path) -> None:
        try:
            files, root = self._root()
            with self._unless_all_is_away(files, root), files.open_input_stream(f"{root}/{file_id}") as stored:
                _copy(stored, part)
        except BaseException:
            part.unlink(missing_ok=True)  # the next reader tries again
            raise

    def remove(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            with contextlib.suppress(FileNotFoundError), _away_on_error():
                files, root = self._root()
                with self._unless_all_is_away(files, root):
                    files.delete_file(f"{root}/{file_id}")

    def sweep(self, file_ids: Collection[str], open_batches: Collection[str]) -> None:
        """Remove leftovers of killed ingresses: all files with names like ours but the given ones, unless they are young."""
        with self._lock:
            lent = {copy.path.name for copy in self._copies.values()}  # a job reads its input for hours, and writes nothing to it
        self._scratch.sweep(lent, open_batches)
        with _away_on_error():
            files, root = self._root(check_again=True)  # two databases may have begun at the same moment
            for found in files.get_file_info(FileSelector(root, allow_not_found=True)):
                is_old = (
                    found.type == FileType.File and found.mtime_ns is not None and found.mtime_ns / 1e9 < time.time() - LEFTOVER_S
                )
                if is_old and _NAME.fullmatch(found.base_name) and found.base_name not in file_ids:
                    with contextlib.suppress(FileNotFoundError):
                        files.delete_file(found.path)

    def _root(self, *, check_again: bool = False) -> tuple[FileSystem, str]:
        with self._root_lock:
            if self._found is None or check_again:
                self._found = None  # after a refusal each call checks again, and is refused until the marker names this database
                files, root = FileSystem.from_uri(self._url)
                if isinstance(files, LocalFileSystem):
                    files.create_dir(root, recursive=True)
                self._refuse_another_database(files, root.rstrip("/"))
                self._found = files, root.rstrip("/")
            return self._found

    def _refuse_another_database(self, files: FileSystem, root: str) -> None:
        """Make the marker if there is none, or an empty one.

        Raises:
            StorageFailed: The marker names another database.
            StorageAway: There is no marker, though this process has seen it before, or the database has records of files.
        """
        path, ours = f"{root}/{_MARKER}", self._database()
        if not files.get_file_info(path).size:
            if self._has_seen_marker or self._has_files():
                self._refuse_while_away(path, ours)
            if isinstance(files, LocalFileSystem):
                _write_whole(Path(path), ours)
            else:
                with files.open_output_stream(path) as marker:
                    marker.write(ours.encode())
        found = _text_of(files, path)
        self._has_seen_marker = self._has_seen_marker or found == ours
        if found != ours:
            hint = f"give each database a prefix of its own in ingress.batch.files, or remove {path} if that database is gone"
            logger.error(
                "the files at %s belong to the database %.80s, and this one is %s: %s", masked(self._url), found, ours, hint
            )
            raise StorageFailed

    @contextmanager
    def _unless_all_is_away(self, files: FileSystem, root: str) -> Iterator[None]:
        """Let a FileNotFoundError through only if the marker is there: then only this file is lost, and not the whole store away.

        Raises:
            StorageAway: The marker is missing; raised in place of FileNotFoundError.
        """
        try:
            yield
        except FileNotFoundError:
            self._require_marker(files, root)
            raise

    def _require_marker(self, files: FileSystem, root: str) -> None:
        """Raise StorageAway unless the marker names this database: a shared volume may be unmounted, or another one mounted there."""
        path, ours = f"{root}/{_MARKER}", self._database()
        try:
            found = _text_of(files, path)
        except FileNotFoundError:
            found = ""
        if found != ours:
            self._refuse_while_away(path, ours)

    def _refuse_while_away(self, path: str, ours: str) -> NoReturn:
        said = "the files at %s are away: %s is missing or of another database; %s"
        hint = f"mount the volume, or, if its files were removed on purpose, write the text {ours} into {path}"
        logger.error(said, masked(self._url), path, hint)
        raise StorageAway(retry_after_s=_RETRY_AFTER_S)


def _text_of(files: FileSystem, path: str) -> str:
    """Return the text of a marker, without the line end that an editor or `echo` writes."""
    with files.open_input_stream(path) as marker:
        return str(marker.read().decode(errors="replace").rstrip())


def _copy(stored: NativeFile, part: Path) -> None:
    """Write the stream to a new file of this machine.

    Raises:
        StorageFailed: This machine's disk failed. Raised also for a missing scratch folder, which must not read as a lost file.
    """
    try:
        copy = part.open("xb", buffering=0)
    except OSError as exc:
        raise storage_error(exc) from exc
    with copy:
        while left := memoryview(stored.read(_COPY_BYTES)):
            try:
                while left:
                    left = left[copy.write(left) :]
            except OSError as exc:
                raise storage_error(exc) from exc


def _write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all, also when the disk is full or this process is killed."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_text(text)
        _sync(part)
        put_in_place(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    """Make the file and its name outlive a power cut."""
    for name in (path, path.parent):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _away_on_error() -> Iterator[None]:
    """Map the errors of pyarrow: OSError, and ArrowException for a URL that pyarrow does not understand.

    Raises:
        FileNotFoundError: The file is not there.
        StorageAway: pyarrow raised another OSError.
        StorageFailed: pyarrow raised ArrowException.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        logger.warning("the object store of batches failed: %s", masked(str(exc)))
        raise StorageAway(retry_after_s=_RETRY_AFTER_S) from exc
    except ArrowException as exc:
        logger.error("the object store of batches cannot be used; check ingress.batch.files: %s", masked(str(exc)))
        raise StorageFailed from exc
