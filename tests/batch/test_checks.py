"""`check_input` reports what is wrong with an input of the API."""

from io import BytesIO

from serve_app.batch.checks import check_input
from serve_app.batch.rows import MAX_ROW_BYTES, InputRow, rows

PATH = "/v1/completions"


def row(number: int, **changes: object) -> InputRow:
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"model": "m", "prompt": "x"}}
    return InputRow(number, {**line, **changes})


def test_a_wrong_line_with_a_duplicate_id_is_told_both() -> None:
    found = check_input([row(1), row(2, url="/v1/other")], endpoint=PATH, models=["m"], max_lines=10)
    assert [(error.code, error.line) for error in found.errors] == [("mismatched_endpoint", 2), ("duplicate_custom_id", 2)]


def test_the_id_of_a_wrong_line_is_taken() -> None:
    found = check_input([row(1, url="/v1/other"), row(2)], endpoint=PATH, models=["m"], max_lines=10)
    assert [(error.code, error.line) for error in found.errors] == [("mismatched_endpoint", 1), ("duplicate_custom_id", 2)]


def test_no_more_errors_are_listed_than_are_promised() -> None:
    found = check_input([row(n, url="/v1/other") for n in range(1, 200)], endpoint=PATH, models=["m"], max_lines=1000)
    assert len(found.errors) == 100


def test_a_line_that_is_too_long_has_the_code_of_the_limits_and_not_that_of_wrong_json() -> None:
    long = rows(BytesIO(b"x" * (MAX_ROW_BYTES + 1) + b"\n{"), "jsonl")
    found = check_input(long, endpoint=PATH, models=["m"], max_lines=10)
    assert [(error.code, error.line) for error in found.errors] == [("invalid_line", 1), ("invalid_json_line", 2)]
