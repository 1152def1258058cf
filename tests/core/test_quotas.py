import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.quota_shares import MINUTE_S, Granted, Holding
from serve_app.core.quotas import FIRST_ANSWER_TOKENS, SLOT_S, Lack, LastMinute, Meter
from serve_app.core.tenants import Quota

NOON = 20_000 * 86_400.0 + 43_200.0
"""Noon of a day, in seconds since 1970."""


def alone(**quotas: int) -> Meter:
    """Return a meter of the only ingress, which has the whole of each quota."""
    meter = Meter()
    limits: dict[Quota, int] = quotas  # type: ignore[assignment]
    meter.limit(limits)
    for name, quota in limits.items():
        meter.grant(name, Granted(quota, 0, 1, False))
    return meter


def test_an_amount_counts_for_a_minute_and_at_most_a_slot_longer() -> None:
    window = LastMinute()
    window.add(3, NOON + 0.1)
    window.add(4, NOON + 10)
    assert window.frees_in_s(3, NOON + 20) == SLOT_S + 40
    assert window.frees_in_s(4, NOON + 20) == SLOT_S + 50
    assert window.frees_in_s(8, NOON + 20) == float("inf")
    window.forget_old(NOON + 0.1 + MINUTE_S)
    assert window.total == 7
    window.forget_old(NOON + SLOT_S + MINUTE_S)
    assert window.total == 4


def test_as_many_requests_run_in_a_minute_as_the_quota_says() -> None:
    meter = alone(requests_per_minute=3)
    for second in range(3):
        assert meter.lack(1, NOON + second) is None
        meter.end(meter.admit(1, 0, 1, NOON + second), ran=True)
    lack = meter.lack(1, NOON + 10)
    assert lack == Lack("requests_per_minute", 3, 3, 1, SLOT_S + 50, elsewhere=False)
    assert meter.lack(1, NOON + MINUTE_S + SLOT_S) is None, "the first one has left the minute"


def test_tokens_are_set_aside_then_counted_and_what_is_left_is_given_back() -> None:
    meter = alone(tokens_per_minute=1000, tokens_per_day=5000)
    charge = meter.admit(100, 400, 1, NOON)
    assert [meter.in_use(name, NOON) for name in ("tokens_per_minute", "tokens_per_day")] == [500, 500]
    meter.settle(charge, 250, NOON + 1)
    assert meter.in_use("tokens_per_minute", NOON + 1) == 500, "tokens that came take the place of those set aside"
    meter.settle(charge, 620, NOON + 2)
    assert meter.in_use("tokens_per_minute", NOON + 2) == 620, "more came than were set aside"
    meter.end(charge, ran=True)
    early = meter.admit(100, 200, 1, NOON + 3)
    meter.settle(early, 110, NOON + 4)
    meter.end(early, ran=True)
    assert meter.in_use("tokens_per_minute", NOON + 4) == 730
    meter.end(early, ran=True)
    meter.settle(early, 999, NOON + 5)
    assert meter.in_use("tokens_per_minute", NOON + 5) == 730, "a request ends once"
    lack = meter.lack(300, NOON + 10)
    assert lack == Lack("tokens_per_minute", 1000, 730, 300, MINUTE_S + SLOT_S - 9, elsewhere=False)
    assert meter.in_use("tokens_per_minute", NOON + 100) == 0
    assert meter.in_use("tokens_per_day", NOON + 100) == 730


def test_tokens_of_a_day_are_free_at_midnight_of_utc() -> None:
    meter = alone(tokens_per_day=100)
    charge = meter.admit(90, 0, 1, NOON)
    meter.settle(charge, 90, NOON)
    meter.end(charge, ran=True)
    lack = meter.lack(20, NOON)
    assert lack == Lack("tokens_per_day", 100, 90, 20, 43_200.0, elsewhere=False)
    assert meter.lack(20, NOON + 43_200) is None


def test_requests_at_once_are_free_when_one_ends() -> None:
    meter = alone(max_concurrent=1)
    charge = meter.admit(1, 1, 1, NOON)
    assert meter.lack(1, NOON) == Lack("max_concurrent", 1, 1, 1, 1.0, elsewhere=False)
    meter.end(charge, ran=True)
    assert meter.lack(1, NOON) is None


def test_nine_of_ten_answers_are_no_longer_than_what_is_set_aside() -> None:
    meter = alone(tokens_per_minute=10**9)
    assert (meter.usual_answer(64), meter.usual_answer(10**6)) == (64, FIRST_ANSWER_TOKENS)
    for length in range(1, 101):
        charge = meter.admit(1, 1, 2, NOON)
        meter.end(charge, ran=True, answer_tokens=length)
    assert (meter.usual_answer(10**6), meter.usual_answer(50)) == (91, 50)


def test_a_request_that_the_fleet_does_not_take_is_no_request() -> None:
    meter = alone(requests_per_minute=2)
    for second in range(50):
        meter.end(meter.admit(1, 0, 1, NOON + second), ran=False)
    assert meter.in_use("requests_per_minute", NOON + 50) == 0
    meter.end(meter.admit(1, 0, 1, NOON + 50), ran=True)
    late = meter.admit(1, 0, 1, NOON + 51)
    assert meter.lack(1, NOON + 130) is None
    meter.end(late, ran=False)
    assert meter.in_use("requests_per_minute", NOON + 130) == 0


@given(st.lists(st.tuples(st.sampled_from(["more", "settle", "end"]), st.integers(0, 3), st.integers(0, 300)), max_size=40))
def test_nothing_stays_set_aside_when_all_requests_have_ended(steps: list[tuple[str, int, int]]) -> None:
    meter, now = alone(tokens_per_minute=10**6, max_concurrent=10), NOON
    charges = [meter.admit(10 * number, 5, number + 1, now) for number in range(4)]
    for what, number, tokens in steps:
        now += 0.1
        match what:
            case "more":
                meter.admit_more(charges[number], tokens, tokens // 2)
            case "settle":
                meter.settle(charges[number], tokens, now)
            case "end":
                meter.end(charges[number], ran=True)
    for charge in charges:
        meter.end(charge, ran=True)
    assert meter.in_use("max_concurrent", now) == 0
    assert meter.in_use("tokens_per_minute", now + 61) == 0


def test_the_longest_wait_is_told_and_what_others_may_give_comes_last() -> None:
    meter = alone(requests_per_minute=1, tokens_per_minute=1000, tokens_per_day=100)
    spent = meter.admit(100, 0, 1, NOON)
    meter.settle(spent, 100, NOON)
    lack = meter.lack(10, NOON + 1)
    assert lack is not None
    assert (lack.quota, lack.retry_after_s) == ("tokens_per_day", 43_199.0)


def test_choices_are_set_aside_once_and_more_prompts_as_they_come() -> None:
    meter = alone(tokens_per_minute=1000)
    charge = meter.admit(100, 50, 2, NOON)
    assert meter.in_use("tokens_per_minute", NOON) == 200
    meter.admit_more(charge, 0, 50)
    assert meter.in_use("tokens_per_minute", NOON) == 200, "the second choice of the same prompt"
    meter.admit_more(charge, 700, 300)
    assert meter.in_use("tokens_per_minute", NOON) == 1200, "a prompt of the same request runs whatever is left"
    assert meter.lack(1, NOON) is not None


def test_a_long_answer_may_take_the_whole_quota_and_a_prompt_above_it_never_fits() -> None:
    meter = alone(tokens_per_minute=500, tokens_per_day=400)
    assert meter.lack(10_000, NOON) is None
    assert meter.never_fits(400) is None
    assert meter.never_fits(401) == ("tokens_per_day", 400)
    assert meter.never_fits(501) == ("tokens_per_minute", 500)


def test_a_quota_that_the_file_changes_holds_at_once() -> None:
    meter = alone(requests_per_minute=5, max_concurrent=2)
    meter.admit(1, 1, 1, NOON)
    meter.limit({"requests_per_minute": 1})
    lack = meter.lack(1, NOON)
    assert lack is not None
    assert (lack.quota, lack.limit) == ("requests_per_minute", 1)
    meter.limit({})
    assert meter.lack(1, NOON) is None


@pytest.mark.parametrize(("used_elsewhere", "elsewhere"), [(0, True), (9, False)])
def test_what_others_do_not_use_may_come_here(used_elsewhere: int, elsewhere: bool) -> None:
    meter = alone(requests_per_minute=10)
    meter.grant("requests_per_minute", Granted(1, used_elsewhere, 3, False))
    meter.admit(1, 0, 1, NOON)
    lack = meter.lack(1, NOON)
    assert lack is not None
    assert lack.elsewhere is elsewhere
    assert meter.left("requests_per_minute", NOON) == (10, 9 - used_elsewhere, MINUTE_S + SLOT_S)


def test_an_ingress_keeps_some_of_what_it_does_not_use_unless_another_lacks_it() -> None:
    meter = alone(requests_per_minute=60)
    meter.grant("requests_per_minute", Granted(60, 0, 3, False))
    ((_, held),) = meter.hold(NOON, keep=True)
    assert held.allotted == 60, "the board does not answer: nobody would give it back"
    ((_, held),) = meter.hold(NOON)
    assert held == Holding(60, 10, 0, 0, 0, 0, 0, 0), "a third of half the quota"
    for _ in range(8):
        meter.admit(1, 0, 1, NOON)
    ((_, held),) = meter.hold(NOON)
    assert held == Holding(60, 10, 8, 14, 0, 0, 8, 0), "twice what it took is wanted beside what is in use"
    assert meter.grant("requests_per_minute", Granted(24, 0, 3, True))
    assert not meter.grant("requests_per_minute", Granted(24, 0, 3, True)), "it was known already"
    ((_, held),) = meter.hold(NOON)
    assert held == Holding(60, 8, 8, 0, 0, 0, 8, 0), "nothing was taken since, and another ingress lacks something"
