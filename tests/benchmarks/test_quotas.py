"""These tests check the figures of the benchmarks of quotas against counts by hand."""

import json

import pytest

from benchmarks.quota_load import exact, most_in_a_minute
from benchmarks.quotas_litellm import KEYS, LIMIT, Answer, figures, usage_of


def test_the_most_in_a_minute_leaves_out_what_is_sixty_seconds_old() -> None:
    assert most_in_a_minute([(0.0, 5), (30.0, 7), (60.0, 2), (89.9, 1)]) == 12
    assert most_in_a_minute([]) == 0


def test_the_exact_count_admits_what_fits_into_the_last_minute() -> None:
    assert exact([(0.0, 6), (1.0, 5), (2.0, 4), (60.0, 6), (61.0, 1), (62.0, 4)], limit=10) == 6 + 4 + 6 + 4


def test_tokens_of_an_answer_count_evenly_until_its_end() -> None:
    answer = Answer(0, sent_at=10.0, ended_at=12.0, status="200", prompt_tokens=30, answer_tokens=4)
    assert answer.amounts() == [(10.0, 30), (10.5, 1), (11.0, 1), (11.5, 1), (12.0, 1)]


def test_a_key_is_compared_with_the_exact_count_of_its_own_demand() -> None:
    admitted = Answer(0, 0.0, 1.0, "200", prompt_tokens=LIMIT - 100, answer_tokens=50)
    refused = Answer(1, 2.0, 2.0, "429")
    found = figures([admitted, refused], {0: LIMIT - 50, 1: 50})
    assert found["answers"] == {"200": 1, "429": 1}
    assert (found["most_in_60_s"], found["total"], found["total_of_an_exact_count"]) == (LIMIT - 50, LIMIT - 50, LIMIT)


def test_a_schedule_asks_for_its_multiple_of_the_limit_after_its_pause() -> None:
    schedules = {key.name: key.schedule(mean_tokens=100.0, seconds=120.0) for key in KEYS}
    assert len(schedules["30-whole"]) == pytest.approx(2 * 3.0 * LIMIT / 100, abs=1)
    assert schedules["after-pause"][:2] == [0.0, 40.0]


def test_the_usage_of_a_stream_is_in_its_last_event() -> None:
    events = [{"choices": [{}], "usage": None}, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    assert usage_of(text) == {"prompt_tokens": 3, "completion_tokens": 2}
    assert usage_of("data: [DONE]\n\n") is None
