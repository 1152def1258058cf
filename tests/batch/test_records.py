"""A batch moves from status to status, and its request's window, metadata and expiry are checked."""

import msgspec
import pytest

from serve_app.batch.records import OPEN, STATUSES, Batch, LineError, Status, kept_for_s, seconds_of
from serve_app.errors import BadRequest

BATCH = Batch("batch_1", "owner", "file-1", "/v1/completions", "24h", 1000, 87400, 3600, {"a": "b"})

MOVES = {
    ("validating", "in_progress"),
    ("validating", "failed"),
    ("validating", "cancelling"),
    ("in_progress", "finalizing"),
    ("in_progress", "expired"),
    ("in_progress", "failed"),
    ("in_progress", "cancelling"),
    ("finalizing", "completed"),
    ("finalizing", "failed"),
    ("finalizing", "cancelling"),
    ("cancelling", "cancelled"),
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("following", STATUSES)
def test_a_batch_moves_only_where_the_api_says(status: Status, following: Status) -> None:
    batch = _in(status)
    if (status, following) in MOVES:
        moved = batch.moved(following, now=1234.9)
        assert (moved.status, moved.times[f"{following}_at"]) == (following, 1234)
    else:
        with pytest.raises(ValueError, match=f"that is {status} does not become {following}"):
            batch.moved(following, now=1234.9)
    assert batch.is_open == (status in OPEN) == any(move[0] == status for move in MOVES)


def _in(status: Status) -> Batch:
    ways: dict[Status, list[Status]] = {
        "validating": [],
        "in_progress": ["in_progress"],
        "finalizing": ["in_progress", "finalizing"],
        "completed": ["in_progress", "finalizing", "completed"],
        "failed": ["failed"],
        "expired": ["in_progress", "expired"],
        "cancelling": ["cancelling"],
        "cancelled": ["cancelling", "cancelled"],
    }
    batch = BATCH
    for step in ways[status]:
        batch = batch.moved(step, now=0.0)
    return batch


def test_a_batch_is_the_same_after_it_was_stored_and_has_the_fields_of_the_api() -> None:
    batch = BATCH.moved("failed", now=2000, errors=(LineError("c", "m", 3, "p"),))
    assert msgspec.json.decode(msgspec.json.encode(batch), type=Batch) == batch
    assert batch.as_object() == {
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/completions",
        "errors": {"object": "list", "data": [{"code": "c", "line": 3, "message": "m", "param": "p"}]},
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": "failed",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1000,
        "expires_at": 87400,
        "in_progress_at": None,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": 2000,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": {"a": "b"},
    }


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86400), ("90m", 5400), ("7d", 604800), ("600s", 600), ("1s", 1)])
def test_windows(window: str, seconds: int) -> None:
    assert seconds_of(window, limit_s=604800) == seconds


@pytest.mark.parametrize(
    "window", ["", "0h", "1", "h", "-1h", "1.5h", "24H", " 24h", "24h\n", "8d", "99999999s", None, 24, ["24h"]]
)
def test_what_is_no_window_is_refused(window: object) -> None:
    with pytest.raises(BadRequest, match="completion_window: is "):
        seconds_of(window, limit_s=604800)


def test_an_expiry_is_within_an_hour_and_the_limit() -> None:
    assert kept_for_s(None, param="x", limit_s=7200) == 7200
    assert kept_for_s({"anchor": "created_at", "seconds": 3600}, param="x", limit_s=7200) == 3600
    for wrong in ({}, {"anchor": "now", "seconds": 3600}, {"anchor": "created_at", "seconds": True}, "1h"):
        with pytest.raises(BadRequest, match="x: give"):
            kept_for_s(wrong, param="x", limit_s=7200)
    for seconds in (3599, 7201):
        with pytest.raises(BadRequest, match=f"x: seconds is {seconds}, not between 3600 and 7200"):
            kept_for_s({"anchor": "created_at", "seconds": seconds}, param="x", limit_s=7200)
