"""This module reads files that the user names, up to a limit: a device or an endless file ends with an error before memory is full."""

import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

from loadtest.errors import UsageError

MAX_TEXT_CHARS = 1 << 20
"""Most characters of a scenario or a key file."""
MAX_LINE_CHARS = 1 << 24
"""Most characters of a line of a trace or a log: a row of another run with times of 1,000,000 tokens has some 15 MB."""
MAX_EXPANDED = 4 * MAX_TEXT_CHARS
"""Most values plus characters of a YAML file with each ``*alias`` expanded. No file without aliases has so many."""
MAX_DEPTH = 100
"""Deepest nesting of lists and mappings of a YAML file with each ``*alias`` expanded. The schema of a tool has some 30 levels."""
MAX_NUMBER_CHARS = 300
"""Most characters of a whole number in a YAML file. Python cannot print one of more than 4,300 digits, and an error message must."""
_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?)")
"""Numbers of YAML 1.1 with surprising values: 1:30 is 90, and 010 is 8."""


def regular(path: Path) -> Path:
    """Return the path if it can be read to an end; opening it reports any other error.

    Raises:
        UsageError: The path is a pipe, a socket or a device: reading may wait, or continue, without an end.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(str(path), "is a pipe, a socket or a device, which may have no end; give the path of a file")
    return path


def read_text(path: Path) -> str:
    """Return a small text file.

    Raises:
        UsageError: The file cannot be read, is no text, or is larger than `MAX_TEXT_CHARS`.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARS + 1)
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, or a path with a NUL byte
        raise UsageError(str(path), " ".join(str(exc).split())) from exc
    if len(text) > MAX_TEXT_CHARS:
        raise UsageError(str(path), f"holds more than {MAX_TEXT_CHARS:,} characters; is it the right file?")
    return text


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys (PyYAML takes the last), large aliases, and numbers like 1:30.

    Every error has its line.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            size, depth = _expanded(node, {})
            if depth > MAX_DEPTH:
                raise RecursionError
            if size > MAX_EXPANDED:
                many = f"aliases (*name) stand for more than {MAX_EXPANDED:,} values and characters; write fewer of them"
                raise yaml.composer.ComposerError(None, None, many, None)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > MAX_NUMBER_CHARS:
            long = f"the number {node.value[:20]}... has {len(node.value):,} characters, at most {MAX_NUMBER_CHARS}; write a shorter one"
            raise yaml.constructor.ConstructorError(None, None, long, node.start_mark)
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError) as exc:  # raised for tags such as !!int ""
            wrong = f"{str(node.value)[:60]!r} cannot be read as {node.tag.rpartition(':')[2]}: {exc}"
            raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark) from exc
        if isinstance(value, int | float) and isinstance(node, yaml.ScalarNode) and _OTHER_BASE.fullmatch(node.value):
            read = f"YAML reads {node.value[:60]} as {value}; write {value}, or '{node.value[:60]}' for a text"
            raise yaml.constructor.ConstructorError(None, None, read, node.start_mark)
        return value

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


def _expanded(node: yaml.Node, known: dict[yaml.Node, tuple[float, float]]) -> tuple[float, float]:
    """Return the number of values plus characters of the node, and the depth of its lists and mappings, with aliases expanded.

    Args:
        known: Results for other nodes: an alias is the same node again.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value), 0
    if node not in known:
        known[node] = math.inf, math.inf  # until it is counted: a node that contains itself has no end
        pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
        inside = [_expanded(child, known) for pair in pairs for child in pair]
        known[node] = 1 + sum(size for size, _ in inside), 1 + max((depth for _, depth in inside), default=0)
    return known[node]


def read_yaml(path: Path) -> Any:
    """Return the value of a small YAML file.

    Raises:
        UsageError: As `regular`, `read_text` and `parse_yaml`.
    """
    return parse_yaml(read_text(regular(path)), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML document. ``where`` precedes the line in an error.

    Raises:
        UsageError: The text is no YAML; a mapping has a key twice; a value does not fit its tag, or is a number in base 60 or 8 or of
            more than `MAX_NUMBER_CHARS`; values are nested too deep; or aliases make too many of them.
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
    except yaml.YAMLError as exc:
        raise UsageError(where, f"is no YAML that can be read: {' '.join(str(exc).split())}") from exc


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        UsageError: The file cannot be opened, or is a pipe or a device.
    """
    try:
        return regular(path).open("rb")
    except OSError as exc:
        raise UsageError(str(path), f"cannot be read: {exc.strerror}") from exc


def bounded_lines(path: Path, *, max_lines: int | None = None, errors: str = "strict") -> Iterator[str]:
    """Yield the unchanged lines, each with its line end. A byte order mark is left out.

    Args:
        errors: Treatment of bytes that are no UTF-8, as for `open`.
    Raises:
        UsageError: The file cannot be read, is no text, has more than ``max_lines`` lines, or a line longer than `MAX_LINE_CHARS`.
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
