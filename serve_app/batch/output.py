"""This module writes the output of a batch: each line in the form of OpenAI's Batch API, and the file in one piece."""

import json
import os
from collections.abc import Iterable
from pathlib import Path


def output_line(key: str, custom_id: str, response: object, error: object) -> str:
    """Return the line. Either ``response`` or ``error`` may be None."""
    line = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line)  # ASCII: an answer may hold half a surrogate pair, which has no UTF-8


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write the file in one piece, durably; return its size in bytes. At each moment there is the old file or the whole new one."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
        put_in_place(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # a full disk must not stay full of it
        raise
    return num_bytes


def put_in_place(part: Path, path: Path) -> None:
    """Rename a part that is on the disk to ``path``, durably: without the folder's fsync, a power cut may undo the renaming."""
    part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
