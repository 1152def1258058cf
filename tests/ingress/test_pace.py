"""When the next pass over all streams may begin."""

import pytest

from serve_app.ingress.pace import MAX_PAUSE_S, MAX_SHARE, Pace


def test_the_first_pass_may_begin_at_once() -> None:
    assert Pace().wait_s(0.0) == 0.0


def test_passes_have_at_most_their_share_of_the_time() -> None:
    pace, now, spent_s = Pace(), 100.0, 0.0
    for _ in range(1000):
        now += pace.wait_s(now) + 0.002
        spent_s += 0.002
        pace.wrote(0.002, now)
    assert spent_s / (now - 100.0) == pytest.approx(MAX_SHARE, rel=0.01)


def test_a_cheap_pass_is_over_before_the_engines_next_step() -> None:
    pace = Pace()
    pace.wrote(0.0003, 5.0)  # 32 streams
    assert pace.wait_s(5.0) == pytest.approx(0.0012)
    assert pace.wait_s(5.006) == 0.0


def test_no_token_waits_longer_than_the_longest_pause() -> None:
    pace = Pace()
    pace.wrote(0.5, 5.0)
    assert pace.wait_s(5.0) == pytest.approx(MAX_PAUSE_S)
