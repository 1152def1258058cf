"""These tests judge canaries by what requests showed, with chance from a seed."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.canary import CanaryLimits, CanaryState, Criterion, Judge, is_looping

NUM_RUNS = 100
Times = Callable[[random.Random], float]


def judge(share: float = 0.05, requests: int = 200) -> Judge:
    return Judge(CanaryLimits(share, requests, slow_factor=2.0))


def spread(sigma: float, times: float = 1.0) -> Times:
    return lambda chance: times * chance.lognormvariate(-1.0, sigma)


USUAL = spread(0.5)


def play(seed: int, share: float, *, fails: float = 0.01, model: Times = USUAL, canary: Times = USUAL) -> Judge:
    """Judge a canary over at most two hundred requests; the model fails one of a hundred."""
    chance, judged = random.Random(seed), judge(share)
    for _ in range(int(200 / share)):
        if judged.takes_next(is_ready=True):
            judged.saw_canary(Criterion.FAILED, chance.random() < fails)
            judged.saw_canary(Criterion.TTFT, canary(chance))
        elif not judged.reason:
            judged.saw_model(Criterion.FAILED, chance.random() < 0.01)
            judged.saw_model(Criterion.TTFT, model(chance))
    return judged


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.2])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_canary_like_its_model_is_found_good(share: float, sigma: float) -> None:
    judged = [play(seed, share, model=spread(sigma), canary=spread(sigma)) for seed in range(NUM_RUNS)]
    assert [j.reason for j in judged if j.state is not CanaryState.GOOD] == []


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_canary_slower_by_less_than_the_factor_is_found_good(share: float) -> None:
    judged = [play(seed, share, canary=spread(0.5, times=1.3)) for seed in range(NUM_RUNS)]
    assert [j.reason for j in judged if j.state is not CanaryState.GOOD] == []


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.2])
def test_a_canary_three_times_as_slow_is_found_bad(share: float, sigma: float) -> None:
    for seed in range(NUM_RUNS):
        found = play(seed, share, model=spread(sigma), canary=spread(sigma, times=3.0))
        assert found.state is CanaryState.BAD
        assert "waited too long for the first token, of the model's own" in found.reason


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_canary_that_fails_a_fifth_is_found_bad(share: float) -> None:
    assert [seed for seed in range(NUM_RUNS) if play(seed, share, fails=0.2).state is not CanaryState.BAD] == []


def test_a_canary_that_fails_each_request_is_found_bad_by_the_fifth() -> None:
    found = play(1, 0.05, fails=1.0)
    assert found.num_taken <= 5
    assert found.reason.startswith(f"{found.num_taken} of {found.num_taken} requests failed, of the model's own ")


def test_what_strikes_both_sides_does_not_count_against_the_canary() -> None:
    judged = judge(0.5)
    for _ in range(200):
        for saw in (judged.saw_model, judged.saw_canary):
            saw(Criterion.FAILED, 1.0)
    assert judged.state is not CanaryState.BAD


def test_a_canary_that_stays_slow_behind_cold_caches_is_found_and_one_that_warms_up_is_not() -> None:
    for num_slow, state in ((10, CanaryState.UNDECIDED), (60, CanaryState.BAD)):
        judged = judge()
        for _ in range(100):
            judged.saw_model(Criterion.TTFT, 0.2)
        for _ in range(num_slow):
            judged.saw_canary(Criterion.TTFT, 5.0)
        assert judged.state is state


def test_before_the_model_was_timed_the_canary_is_not() -> None:
    judged = judge()
    for _ in range(100):
        judged.saw_canary(Criterion.TTFT, 60.0)
    assert judged.state is CanaryState.UNDECIDED


def test_milliseconds_are_no_reason() -> None:
    judged = judge()
    for _ in range(100):
        judged.saw_model(Criterion.TTFT, 0.005)
        judged.saw_canary(Criterion.TTFT, 0.050)
    assert judged.reason == ""


@given(share=st.floats(0.01, 0.5), num=st.integers(1, 500))
def test_a_canary_never_gets_more_than_its_share(share: float, num: int) -> None:
    judged = judge(share)
    taken = [judged.takes_next(is_ready=True) for _ in range(num)]
    for i in range(num):
        assert sum(taken[:i]) <= share * i + 1e-6
    assert sum(taken) >= int(share * num - 1e-6)


def test_what_it_was_not_ready_for_is_not_made_up_for() -> None:
    judged = judge(0.5)
    for _ in range(100):
        assert not judged.takes_next(is_ready=False)
    assert [judged.takes_next(is_ready=True) for _ in range(4)] == [False, True, False, True]


def test_a_condemned_canary_gets_nothing_and_the_first_reason_stays() -> None:
    judged = judge(0.5)
    judged.condemn("too slow")
    judged.condemn("another")
    assert (judged.state, judged.reason) == (CanaryState.BAD, "too slow")
    assert not any(judged.takes_next(is_ready=True) for _ in range(10))


def test_patience_follows_the_models_own_times() -> None:
    judged = judge()
    assert judged.patience_s() == 30.0
    for seconds in (0.1,) * 19 + (20.0,):
        judged.saw_model(Criterion.TTFT, seconds)
    assert judged.patience_s() == 40.0


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        ([0] * 48, True),
        ([7, 8, 9] * 20, True),
        ([*range(100), *[5, 6] * 24], True),
        ([0] * 47, False),
        (list(range(60)), False),
        ([*[0] * 60, 1], False),
    ],
)
def test_a_loop_is_the_repetition_of_a_short_piece(token_ids: list[int], loops: bool) -> None:
    assert is_looping(token_ids) is loops
