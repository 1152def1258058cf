"""Files that the user names, read with a limit: a device, or a file of another kind, ends with an error instead of filling memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

from loadtest.errors import UsageError

MAX_TEXT_CHARS = 1 << 20
"""Of a scenario or a key."""
MAX_LINE_CHARS = 1 << 24
"""Of a trace or a log: a row of another run, with a time for each of 1,000,000 tokens, has some 15 MB."""


def read_text(path: Path) -> str:
    """Return a small text file.

    Raises:
        UsageError: It cannot be read, is no text, or is larger than `MAX_TEXT_CHARS`.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARS + 1)
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(str(path), " ".join(str(exc).split())) from exc
    if len(text) > MAX_TEXT_CHARS:
        raise UsageError(str(path), f"holds more than {MAX_TEXT_CHARS:,} characters; is it the right file?")
    return text


class _Loader(yaml.SafeLoader):
    """YAML in which no mapping has a key twice; of two PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    twice = f"{key.value!r} is given twice, in lines {lines[name]} and {line}; keep one of them"
                    raise yaml.composer.ComposerError(None, None, twice, key.start_mark)
                lines[name] = line
        return node


def read_yaml(path: Path) -> Any:
    """Return what a small YAML file says.

    Raises:
        UsageError: As `read_text` and `parse_yaml`.
    """
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return what a YAML document says. ``where`` stands before the line in an error.

    Raises:
        UsageError: It is no YAML, a mapping has a key twice, a value is not what its tag says, or values lie too deep in each other.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise UsageError(
            f"{where}:{mark.line + 1}" if mark else where, " ".join(str(exc.problem or exc.context).split())
        ) from exc
    except RecursionError as exc:
        raise UsageError(where, "lists or mappings lie too deep in each other; is it the right file?") from exc
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as exc:  # the last four by tags such as !!int ""
        raise UsageError(where, f"is no YAML that can be read: {' '.join(str(exc).split())}") from exc


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        UsageError: It cannot be opened.
    """
    try:
        return path.open("rb")
    except OSError as exc:
        raise UsageError(str(path), f"cannot be read: {exc.strerror}") from exc


def bounded_lines(path: Path, *, max_lines: int | None = None, errors: str = "strict") -> Iterator[str]:
    """Yield the lines as they are, each with its end. A byte order mark is left out.

    Args:
        errors: What to do with bytes that are no UTF-8, as of `open`.
    Raises:
        UsageError: The file cannot be read, is no text, has more lines, or one is longer than `MAX_LINE_CHARS`.
    """
    try:
        with path.open(encoding="utf-8-sig", errors=errors, newline="") as file:
            for number, line in enumerate(_lines(path, file), 1):
                if max_lines is not None and number > max_lines:
                    raise UsageError(str(path), f"has more than {max_lines:,} lines; cut it")
                yield line
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(str(path), f"cannot be read as text: {exc}") from exc


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARS + 1):
        if len(line) > MAX_LINE_CHARS:
            raise UsageError(str(path), f"has a line of more than {MAX_LINE_CHARS:,} characters; is it the right file?")
        yield line
