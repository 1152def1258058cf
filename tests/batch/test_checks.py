"""`check_input` reports what is wrong with an input of the API."""

import tracemalloc
from io import BytesIO

import pytest

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


@pytest.mark.parametrize("changes", [{"method": "\x7f" * 10_000}, {"url": "x" * 10_000}, {"body": {"model": "x" * 10_000}}])
def test_an_error_quotes_little_of_a_long_value(changes: dict[str, object]) -> None:
    """An input of 200 MB whose lines have a `method` of 10 MB each would become an error list of a gigabyte, in memory and database."""
    found = check_input([row(1, **changes)], endpoint=PATH, models=["m"], max_lines=10)
    assert len(found.errors) == 1
    assert len(found.errors[0].message) < 1000


@pytest.mark.parametrize("wrong", [{}, {"url": "/v1/other"}])
def test_an_id_that_no_request_may_have_is_not_kept_for_the_search_of_duplicates(wrong: dict[str, object]) -> None:
    """Twenty ids of 10 MB with one wide character each would hold 800 MB until the check has ended."""
    ids = (row(number, custom_id=f"{number}{'x' * 1_000_000}", **wrong) for number in range(1, 51))
    tracemalloc.start()
    try:
        found = check_input(ids, endpoint=PATH, models=["m"], max_lines=100)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {error.code for error in found.errors} <= {"invalid_line", "mismatched_endpoint"}
    assert peak_bytes < 20_000_000
