"""These tests parse headers of hostile servers with `loadtest.wire.http_answer`. The client's tests have whole answers."""

import pytest

from loadtest.wire.http_answer import retry_after


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("-3", 0.0),
        ("9" * 400, 1e9),
        ("9" * 5000, None),
        ("Sat, 21 Nov 2026 12:00:30 GMT", 30.0),
        ("Mon, 01 Jan 99999 00:00:00 GMT", None),
        ("soon", None),
    ],
)
def test_retry_after_is_seconds_or_nothing(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value, "date": "Sat, 21 Nov 2026 12:00:00 GMT"}) == seconds
