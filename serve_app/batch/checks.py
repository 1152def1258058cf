"""`check_input` finds what is wrong with the input of a batch of the API, line by line, before any line is asked. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from serve_app.batch.records import LineError
from serve_app.batch.requests import MAX_ID_CHARS, Defaults, request_of
from serve_app.batch.rows import InputRow

MAX_ERRORS = 100
"""The most errors that are listed. Lines behind the last listed error are not checked."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check. ``lines`` is model -> number of lines. Without ``errors``, `request_of` makes a request of each line."""

    lines: Mapping[str, int]
    errors: tuple[LineError, ...]


def check_input(rows: Iterable[InputRow], *, endpoint: str, models: Collection[str], max_lines: int) -> Checked:
    """Check the whole input. The check costs the time to parse the input, and the memory of its ids."""
    errors: list[LineError] = []
    seen: dict[str, int] = {}
    lines = Counter[str]()
    num_lines = 0
    for row in rows:
        num_lines += 1
        if num_lines > max_lines:
            errors.append(LineError("too_many_lines", f"The input has more than {max_lines} lines; divide it.", row.number))
            break
        if (error := _problem(row, endpoint, models)) is not None:
            errors.append(error)
        else:
            lines[cast(Any, row.value)["body"]["model"]] += 1
        custom_id = row.value.get("custom_id") if isinstance(row.value, dict) else None
        if (
            isinstance(custom_id, str)
            and len(custom_id) <= MAX_ID_CHARS  # longer ones are refused anyway, and may take megabytes
            and (first := seen.setdefault(custom_id, row.number)) != row.number
        ):
            said = f"The custom_id {custom_id[:80]!r} is that of line {first} already."
            errors.append(LineError("duplicate_custom_id", said, row.number, "custom_id"))
        if len(errors) >= MAX_ERRORS:
            break
    if num_lines == 0:
        errors.append(LineError("empty_file", "The input has no lines."))
    return Checked(lines, tuple(errors[:MAX_ERRORS]))


def _problem(row: InputRow, endpoint: str, models: Collection[str]) -> LineError | None:
    value = row.value
    if not isinstance(value, dict):
        code = "invalid_line" if row.is_refused else "invalid_json_line"
        return LineError(code, f"The line {row.problem or 'is a text, not an object'}.", row.number)
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(value.get(name), kind) or not value[name]:
            said = f"The line needs {name!r}, {'an object' if kind is dict else 'a text'}."
            return LineError("missing_required_parameter", said, row.number, name)
    if value["url"] != endpoint:
        said = f"The url is {value['url'][:80]!r}, and the batch's endpoint is {endpoint!r}."
        return LineError("mismatched_endpoint", said, row.number, "url")
    return _body_problem(row, value, models)


def _body_problem(row: InputRow, value: dict[str, Any], models: Collection[str]) -> LineError | None:
    model = value["body"].get("model")
    if not isinstance(model, str) or model not in models:
        said = f"The model {str(model)[:80]!r} does not exist; served here: {', '.join(models) or 'none'}."
        return LineError("model_not_found", said, row.number, "body.model")
    if problem := request_of(row, Defaults("")).problem:
        return LineError("invalid_line", f"The line {problem}.", row.number)
    return None
