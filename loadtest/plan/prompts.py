"""This module reads prompts from a file: texts of real users instead of generated words.

    JSON     a list of records                                                         ShareGPT's files
    JSONL    a record a line
    Parquet  a column `conversations`, `messages` or `prompt`

A record is ``{"conversations": [{"from": "human", "value": ...}, ...]}``, ``{"messages": [{"role": "user", "content": ...}, ...]}`` or
``{"prompt": ...}``. Of a record, the kit uses the user's messages and a system message before them. Each is a text or a list of
``{"type": "text"}`` parts. The target gives the answers, so messages of an assistant or a tool may have any form, or be missing. Records
without a user's message are left out. The scenario's seed, the class and the request's id alone decide which record a request gets.
"""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadtest.errors import UsageError
from loadtest.inputs import bounded_lines, regular

MAX_FILE_BYTES = 1 << 30
"""Largest file of prompts. Each worker holds the file in memory; ShareGPT's file of 90,000 conversations has 0.7 GB."""
MAX_RECORDS = 1_000_000
_USERS, _SYSTEMS = frozenset({"human", "user"}), frozenset({"system"})
_COLUMNS = ("conversations", "messages", "prompt")


class PromptRecord(NamedTuple):
    """A record: the system message (empty if there is none), and the user's messages, turn by turn."""

    system: str
    turns: tuple[str, ...]


@lru_cache(maxsize=8)
def read_prompts(path: Path) -> tuple[PromptRecord, ...]:
    """Return the records in the order of the file.

    Raises:
        UsageError: The file cannot be read, is too large or has too many records; a record is of no known form; or no record has a
            message of a user.
    """
    try:
        size = regular(path).stat().st_size
    except OSError as exc:
        raise UsageError(str(path), f"cannot be read: {exc.strerror}") from exc
    if size > MAX_FILE_BYTES:
        raise UsageError(str(path), f"has {size:,} bytes, at most {MAX_FILE_BYTES:,}; cut it")
    said: list[PromptRecord] = []
    for number, record in enumerate(_records(path), 1):
        if number > MAX_RECORDS:
            raise UsageError(str(path), f"has more than {MAX_RECORDS:,} records; cut it")
        said.append(_said(path, number, record))
    kept = tuple(record for record in said if record.turns)
    if not kept:
        raise UsageError(str(path), f"in none of its {len(said)} records does a user say anything")
    return kept


def prompts_digest(path: Path) -> str:
    """Return the SHA-256 of the file's records, whatever the format of the file."""
    return hashlib.sha256(msgspec.json.encode(read_prompts(path))).hexdigest()


def record_of(path: Path, *, seed: int, cls: str, first_id: int) -> PromptRecord:
    """Return the record for the request ``first_id``, or for the conversation whose first turn has that id."""
    records = read_prompts(path)
    key = hashlib.blake2b(f"{seed}/prompts/{cls}/{first_id}".encode(), digest_size=8).digest()
    return records[int.from_bytes(key, "little") % len(records)]


def _records(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    where = str(path)
    try:
        if _first_byte(path) == b"[":
            yield from msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=list[Any])
            return
        for number, line in enumerate(bounded_lines(path), 1):
            where = f"{path}:{number}"
            if line.strip():
                yield msgspec.json.decode(line)
    except OSError as exc:
        raise UsageError(str(path), f"cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise UsageError(where, f"{exc}; give a list of records, or one record a line") from exc


def _first_byte(path: Path) -> bytes:
    """Return the first byte that is neither blank nor part of a byte order mark. Reading a line instead could read the whole file: a
    JSON list may be a single line."""
    with path.open("rb") as file:
        chunk = file.read(4096).removeprefix(codecs.BOM_UTF8)
        while chunk:
            if told := chunk.lstrip():
                return told[:1]
            chunk = file.read(4096)
    return b""


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # imported here: it takes 60 ms, and only scenarios with such a file need it
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        found = [name for name in _COLUMNS if name in file.schema_arrow.names][:1]
        if not found:
            raise UsageError(str(path), f"has columns {', '.join(file.schema_arrow.names)}; one must be of {', '.join(_COLUMNS)}")
        for batch in file.iter_batches(columns=found):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as exc:
        raise UsageError(str(path), f"is no Parquet file: {exc}") from exc


def _said(path: Path, number: int, record: Any) -> PromptRecord:
    try:
        if isinstance(record, str):
            return _of_turns([("user", record)])
        if "prompt" in record and isinstance(record["prompt"], str):
            return _of_turns([("user", record["prompt"])])
        if (turns := record.get("conversations")) is not None:
            return _of_turns((turn["from"], turn.get("value")) for turn in turns)
        return _of_turns((turn["role"], turn.get("content")) for turn in record["messages"])
    except (KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"{path}: record {number}",
            "must have conversations (from, value), messages (role, content) or prompt; what a user or a system says must be text",
        ) from exc


def _of_turns(turns: Iterable[tuple[str, Any]]) -> PromptRecord:
    system = ""
    said: list[str] = []
    for who, content in turns:
        if who not in _SYSTEMS | _USERS:
            continue
        text = _text(content)
        if who in _SYSTEMS and not said:
            system = text
        elif who in _USERS and text.strip():
            said.append(text)
    return PromptRecord(system, tuple(said))


def _text(content: Any) -> str:
    """Return a text unchanged, or the text parts of a list joined by line ends, as vLLM joins them.

    Raises:
        TypeError: The content is neither, or a part is not a text but, for example, an image.
    """
    if isinstance(content, str):
        return content
    texts: list[Any] = [part["text"] if part["type"] == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(content)
    return "\n".join(texts)
