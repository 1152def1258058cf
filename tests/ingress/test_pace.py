"""A pace decides when the next pass over all streams may begin."""

import pytest

from serve_app.ingress.shortcuts.pace import MAX_PAUSE_S, MAX_SHARE, Pace


def test_the_first_pass_may_begin_at_once() -> None:
    assert Pace().wait_s(0.0) == 0.0


def share_of_passes(*costs_s: float) -> float:
    """Return the share of the time of passes that come one behind the other whenever the first of them may begin."""
    pace, now, spent_s = Pace(), 100.0, 0.0
    for _ in range(1000):
        now += pace.wait_s(now)
        for cost_s in costs_s:
            now += cost_s
            spent_s += cost_s
            pace.wrote(cost_s, now)
    return spent_s / (now - 100.0)


@pytest.mark.parametrize("cost_s", [0.0003, 0.002, 0.005])
def test_passes_have_at_most_their_share_of_the_time(cost_s: float) -> None:
    assert share_of_passes(cost_s) == pytest.approx(MAX_SHARE, rel=0.01)


def test_the_passes_of_several_models_have_one_share_together() -> None:
    assert share_of_passes(0.001, 0.0003, 0.002) == pytest.approx(MAX_SHARE, rel=0.01)


def test_above_the_longest_pause_passes_have_more_than_their_share() -> None:
    assert share_of_passes(0.010) == pytest.approx(1 / 3, rel=0.01), "10 ms in each 30 ms"


def test_a_cheap_pass_is_over_before_the_engines_next_step() -> None:
    pace = Pace()
    pace.wrote(0.0003, 5.0)  # 32 streams
    assert pace.wait_s(5.0) == pytest.approx(0.0012)
    assert pace.wait_s(5.006) == 0.0


def test_no_token_waits_longer_than_the_longest_pause() -> None:
    pace = Pace()
    pace.wrote(0.5, 5.0)
    assert pace.wait_s(5.0) == pytest.approx(MAX_PAUSE_S)
