"""This module reads and writes files that a URL names: in an object store by pyarrow, over other protocols by fsspec."""

import contextlib
from collections.abc import Iterable
from io import BufferedReader
from typing import Any, BinaryIO, cast

from serve_app.errors import BatchError

_STORES = ("s3://", "gs://")
"""The object stores. Their URLs have the form of `ingress.batch.files`: s3://BUCKET/NAME?region=REGION, or
&endpoint_override=HOST:PORT for another server."""
_CHUNK_CHARS = 1 << 20


def is_url(name: str) -> bool:
    """Return whether the name is a URL of another place than this machine's files."""
    return "://" in name and not name.startswith("file://")


def is_store(name: str) -> bool:
    return name.startswith(_STORES)


def without_query(name: str) -> str:
    """Return a path as it is, and a URL without its query."""
    return name.partition("?")[0] if is_url(name) else name


def shown(name: str) -> str:
    """Return a path as it is, and a URL as messages may show it: without passwords and the signature of a presigned URL."""
    return _masked(name) if is_url(name) else name


def beside(name: str, suffix: str) -> str:
    """Return the path or URL of another file in the same place, whose name has the suffix appended."""
    file = without_query(name)
    return f"{file}{suffix}{name.removeprefix(file)}"


def open_url(name: str) -> BinaryIO:
    """Open a file for reading; its suffix says whether it is compressed.

    Raises:
        BatchError: There is no such file, the file cannot be reached, or the package for its protocol is not installed.
    """
    try:
        import fsspec
        from fsspec.utils import infer_compression

        compression = infer_compression(without_query(name))
        if is_store(name):
            files, path = _store(name)
            file = fsspec.core.OpenFile(_by_fsspec(files), path, "rb", compression=compression).open()
        else:
            file = fsspec.open(name, "rb", compression=compression).open()
        return cast(BinaryIO, file if hasattr(file, "readline") and compression != "zstd" else BufferedReader(file))
    except ImportError as exc:  # fsspec names the package for the protocol
        raise BatchError(
            f"{shown(name)} cannot be opened: {exc}", "install the package for this protocol beside serve-app"
        ) from exc
    except (OSError, ValueError) as exc:
        said = getattr(exc, "strerror", None) or _masked(str(exc))
        raise BatchError(f"{shown(name)} cannot be opened: {said}", "give a file that is there and can be read") from exc


def refuse_no_room(name: str) -> None:
    """Write a small object beside ``name`` and remove it, so that no batch begins whose answers could not be written.

    Raises:
        BatchError: ``name`` is not a URL of an object store, or nothing can be written there.
    """
    if not is_store(name):
        raise BatchError(f"--output is {shown(name)}", f"give a local file, or a URL that begins with {' or '.join(_STORES)}")
    write_url(probe := beside(name, ".check"), ())
    remove_url(probe)


def write_url(name: str, lines: Iterable[str]) -> None:
    """Write an object, first beside its place: until its last line is stored, the store shows no object or the old one.

    Raises:
        BatchError: The object cannot be written.
    """
    try:
        files, path = _store(name)
        partial = f"{path}.part"
        try:
            with files.open_output_stream(partial) as stored:
                for chunk in _chunks(lines):
                    stored.write(chunk)
            files.move(partial, path)  # a copy in the store, of 5 GiB at most in S3
        except BaseException:
            remove_url(beside(name, ".part"))  # pyarrow completes the object even when the block fails
            raise
    except ImportError as exc:
        raise BatchError(f"{shown(name)} cannot be written: {exc}", "install pyarrow beside serve-app") from exc
    except (OSError, ValueError) as exc:
        hint = "fix the cause and run the same command: what was answered is in the journal"
        raise BatchError(f"{shown(name)} cannot be written: {_masked(str(exc))}", hint) from exc


def remove_url(name: str) -> None:
    """Remove the object if it exists and may be removed."""
    with contextlib.suppress(OSError, ValueError):
        files, path = _store(name)
        files.delete_file(path)


def _store(name: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    files, path = FileSystem.from_uri(name)
    return files, path


def _by_fsspec(files: Any) -> Any:
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(files)


def _chunks(lines: Iterable[str]) -> Iterable[bytes]:
    held: list[str] = []
    num_chars = 0
    for line in lines:
        held.append(line + "\n")
        num_chars += len(line)
        if num_chars >= _CHUNK_CHARS:
            yield "".join(held).encode()
            held, num_chars = [], 0
    yield "".join(held).encode()


def _masked(text: str) -> str:
    from serve_app.config.batch_urls import masked  # `--help` loads no configuration

    return masked(text)
