"""`lines_per_s` computes how fast lines have to be answered."""

import pytest

from serve_app.batch.deadlines import lines_per_s
from serve_app.batch.records import Batch, Status


def batch(
    window_s: int,
    lines: dict[str, int],
    *,
    ended: dict[str, int] | None = None,
    done: int | None = None,
    status: Status = "in_progress",
    at: int = 0,
) -> Batch:
    """``done``: as many lines as an older ingress has counted, without their models."""
    total, ended = sum(lines.values()), ended or {}
    values = ("batch_1", "", "file-1", "/v1/completions", f"{window_s}s", at, at + window_s, 3600)
    return Batch(
        *values, status=status, total=total, lines=lines, ended=ended, completed=sum(ended.values()) if done is None else done
    )


def test_what_is_left_of_a_batch_is_due_in_nine_tenths_of_its_window() -> None:
    assert lines_per_s([batch(1000, {"a": 900})], 0.0) == {"a": pytest.approx(1.0)}
    assert lines_per_s([batch(1000, {"a": 900}, ended={"a": 450})], 450.0) == {"a": pytest.approx(1.0)}


def test_each_model_has_the_pace_of_its_own_lines_that_are_left() -> None:
    pace = lines_per_s([batch(1000, {"a": 9000, "b": 1000}, ended={"a": 9000, "b": 100})], 450.0)
    assert pace == {"a": 0.0, "b": pytest.approx(900 / 450)}


def test_lines_that_an_older_ingress_answered_are_shared_out_among_what_is_left() -> None:
    pace = lines_per_s([batch(1000, {"a": 300, "b": 600}, done=450)], 450.0)
    assert pace == {"a": pytest.approx(150 / 450), "b": pytest.approx(300 / 450)}
    pace = lines_per_s([batch(1000, {"a": 300, "b": 600}, ended={"a": 200}, done=550)], 450.0)
    assert pace == {"a": pytest.approx(50 / 450), "b": pytest.approx(300 / 450)}


def test_the_tightest_deadline_sets_the_pace_and_a_later_one_adds_nothing_to_it() -> None:
    soon, late = batch(1000, {"a": 900}), batch(100_000, {"a": 900})
    assert lines_per_s([late, soon], 0.0) == {"a": pytest.approx(1.0)}
    assert lines_per_s([batch(2000, {"a": 1800}), soon], 0.0) == {"a": pytest.approx(1.5)}


def test_a_late_batch_is_to_end_within_a_minute_and_one_that_asks_nothing_counts_nothing() -> None:
    assert lines_per_s([batch(1000, {"a": 60})], 5000.0) == {"a": pytest.approx(1.0)}
    assert (
        lines_per_s([batch(1000, {"a": 60}, status=status) for status in ("validating", "finalizing", "cancelling")], 0.0) == {}
    )
