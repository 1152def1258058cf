"""Files that the user names, read with a limit: a device, or a file of another kind, ends with an error instead of filling memory."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, TextIO

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
    """YAML in which no mapping has a key twice; PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                twice = f"{name!r} is given twice, in lines {lines[name]} and {line}; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return what a small YAML file says.

    Raises:
        UsageError: As `read_text`; it is no YAML, a mapping has a key twice, or values lie too deep in each other.
    """
    try:
        return yaml.load(read_text(path), _Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(where, " ".join(str(exc.problem or exc.context).split())) from exc
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a number in form only, such as 0b_
        raise UsageError(str(path), " ".join(str(exc).split())) from exc
    except RecursionError as exc:
        raise UsageError(str(path), "lists or mappings lie too deep in each other; is it the right file?") from exc


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
