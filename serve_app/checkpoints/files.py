"""This module puts a checkpoint on the disk: written beside its place, then renamed, so that no process ever sees half of one."""

import errno
import filecmp
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serve_app.errors import CheckpointError


def publish_directory(target: Path, write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a new directory beside ``target``, then rename it to ``target``; return ``target``.

    If ``target`` holds the same bytes already, nothing is changed, so that equal calls may run at the same time.

    Raises:
        CheckpointError: ``target`` holds something else, or the file system refuses (full, read-only, no permission).
    """
    # Stage beside the target, not in TMPDIR: a rename is atomic only within one file system.
    staging = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        staging.mkdir(parents=True)
        write(staging)
        _rename_or_compare(staging, target)
    except OSError as exc:
        raise file_error(exc, target) from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def file_error(exc: OSError, target: Path) -> CheckpointError:
    """Return the error for a refusal of the file system: a sentence with the way out."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"no space left for {target}: free some room, or choose a directory on another disk")
    return CheckpointError(f"cannot write {target}: {exc.strerror or exc}; choose a directory that you may write to")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` the same way each time: keys in their given order, two spaces, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rename_or_compare(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)  # succeeds on an absent or an empty directory only
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not _same_files(staging, target):
            problem = f"{target} exists and holds something else: remove it, or choose another directory"
            raise CheckpointError(problem) from exc


def _same_files(ours: Path, theirs: Path) -> bool:
    """Return whether ``theirs`` holds all files of ``ours`` with the same bytes; further files in ``theirs`` are ignored."""
    names = [str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file()]
    _, different, unreadable = filecmp.cmpfiles(ours, theirs, names, shallow=False)
    return not different and not unreadable
