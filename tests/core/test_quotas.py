import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.quota_shares import MINUTE_S, Granted, Holding
from serve_app.core.quotas import FIRST_ANSWER_TOKENS, SLOT_S, SMALLEST, Charge, Lack, LastMinute, Meter, Need, Prompt
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


def tokens(amount: int) -> Need:
    """Return the need of a request of so many tokens, all of which are known."""
    return Need(requests=1, usual=amount, most=amount, prompt_tokens=amount, prompts=1)


def ask(meter: Meter, *prompts: Prompt, now: float = NOON) -> Charge | Lack:
    """Admit a request with these prompts, or return what it lacks."""
    need = meter.need(prompts)
    return meter.admit(need, now) if (lack := meter.lack(need, now)) is None else lack


def after_short_answers(meter: Meter) -> Meter:
    """Let answers of one token end, so that the next ones are expected to have one token."""
    for _ in range(60):
        meter.end(meter.admit(tokens(1), NOON), ran=False, answer_tokens=1)
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
        assert meter.lack(SMALLEST, NOON + second) is None
        meter.end(meter.admit(SMALLEST, NOON + second), ran=True)
    lack = meter.lack(SMALLEST, NOON + 10)
    assert lack == Lack("requests_per_minute", 3, 3, 1, SLOT_S + 50, elsewhere=False)
    assert meter.lack(SMALLEST, NOON + MINUTE_S + SLOT_S) is None, "the first one has left the minute"


def test_tokens_are_set_aside_then_counted_and_what_is_left_is_given_back() -> None:
    meter = alone(tokens_per_minute=1000, tokens_per_day=5000)
    charge = meter.admit(tokens(500), NOON)
    assert [meter.in_use(name, NOON) for name in ("tokens_per_minute", "tokens_per_day")] == [500, 500]
    meter.settle(charge, 250, NOON + 1)
    assert meter.in_use("tokens_per_minute", NOON + 1) == 500, "tokens that came take the place of those set aside"
    meter.settle(charge, 620, NOON + 2)
    assert meter.in_use("tokens_per_minute", NOON + 2) == 620, "more came than were set aside"
    meter.end(charge, ran=True)
    early = meter.admit(tokens(300), NOON + 3)
    meter.settle(early, 110, NOON + 4)
    meter.end(early, ran=True)
    assert meter.in_use("tokens_per_minute", NOON + 4) == 730
    meter.end(early, ran=True)
    meter.settle(early, 999, NOON + 5)
    assert meter.in_use("tokens_per_minute", NOON + 5) == 730, "a request ends once"
    lack = meter.lack(tokens(300), NOON + 10)
    assert lack == Lack("tokens_per_minute", 1000, 730, 300, MINUTE_S + SLOT_S - 9, elsewhere=False)
    assert meter.in_use("tokens_per_minute", NOON + 100) == 0
    assert meter.in_use("tokens_per_day", NOON + 100) == 730


def test_tokens_of_a_day_are_free_at_midnight_of_utc() -> None:
    meter = alone(tokens_per_day=100)
    charge = meter.admit(tokens(90), NOON)
    meter.settle(charge, 90, NOON)
    meter.end(charge, ran=True)
    lack = meter.lack(tokens(20), NOON)
    assert lack == Lack("tokens_per_day", 100, 90, 20, 43_200.0, elsewhere=False)
    assert meter.lack(tokens(20), NOON + 43_200) is None


def test_requests_at_once_are_free_when_one_ends() -> None:
    meter = alone(max_concurrent=1)
    charge = meter.admit(tokens(2), NOON)
    assert meter.lack(SMALLEST, NOON) == Lack("max_concurrent", 1, 1, 1, 1.0, elsewhere=False)
    meter.end(charge, ran=True)
    assert meter.lack(SMALLEST, NOON) is None


def test_nine_of_ten_answers_are_no_longer_than_what_is_set_aside() -> None:
    meter = alone(tokens_per_minute=10**9)
    assert [meter.need([Prompt(5, 2, most)]).usual for most in (64, 10**6)] == [5 + 2 * 64, 5 + 2 * FIRST_ANSWER_TOKENS]
    for length in range(1, 101):
        charge = meter.admit(tokens(3), NOON)
        meter.end(charge, ran=True, answer_tokens=length)
    assert [meter.need([Prompt(5, 2, most)]).usual for most in (10**6, 50)] == [5 + 2 * 91, 5 + 2 * 50]


def test_a_request_that_the_fleet_does_not_take_is_no_request() -> None:
    meter = alone(requests_per_minute=2)
    for second in range(50):
        meter.end(meter.admit(SMALLEST, NOON + second), ran=False)
    assert meter.in_use("requests_per_minute", NOON + 50) == 0
    meter.end(meter.admit(SMALLEST, NOON + 50), ran=True)
    late = meter.admit(SMALLEST, NOON + 51)
    assert meter.lack(SMALLEST, NOON + 130) is None
    meter.end(late, ran=False)
    assert meter.in_use("requests_per_minute", NOON + 130) == 0


@given(st.lists(st.tuples(st.sampled_from(["more", "settle", "end"]), st.integers(0, 3), st.integers(0, 300)), max_size=40))
def test_nothing_stays_set_aside_when_all_requests_have_ended(steps: list[tuple[str, int, int]]) -> None:
    meter, now = alone(tokens_per_minute=10**6, max_concurrent=10), NOON
    charges = [meter.admit(Need(1, 10 * number, 20 * number), now) for number in range(4)]
    for what, number, amount in steps:
        now += 0.1
        match what:
            case "more":
                meter.admit_more(charges[number], Need(1, amount, 2 * amount), now)
            case "settle":
                meter.settle(charges[number], amount, now)
            case "end":
                meter.end(charges[number], ran=True)
    for charge in charges:
        meter.end(charge, ran=True)
    assert meter.in_use("max_concurrent", now) == 0
    assert meter.in_use("tokens_per_minute", now + 61) == 0


def test_the_longest_wait_is_told_and_what_others_may_give_comes_last() -> None:
    meter = alone(requests_per_minute=1, tokens_per_minute=1000, tokens_per_day=100)
    spent = meter.admit(tokens(100), NOON)
    meter.settle(spent, 100, NOON)
    lack = meter.lack(tokens(10), NOON + 1)
    assert lack is not None
    assert (lack.quota, lack.retry_after_s) == ("tokens_per_day", 43_199.0)


def test_all_prompts_of_a_list_are_set_aside_with_all_their_answers() -> None:
    meter = alone(tokens_per_minute=1000, requests_per_minute=10)
    charge = ask(meter, Prompt(100, 2, 50), Prompt(300, 2, 50))
    assert isinstance(charge, Charge)
    assert [meter.in_use(name, NOON) for name in meter.shares] == [600, 2]
    lack = ask(meter, *[Prompt(1, 1, 60)] * 8)
    assert isinstance(lack, Lack)
    assert (lack.quota, lack.used, lack.wanted) == ("tokens_per_minute", 600, 488)
    meter.admit_more(charge, meter.need([Prompt(700, 1, 300)]), NOON)
    assert [meter.in_use(name, NOON) for name in meter.shares] == [1600, 3], "the next turn of a response runs whatever is left"
    meter.end(charge, ran=False)
    assert [meter.in_use(name, NOON) for name in meter.shares] == [0, 0]


def test_a_list_of_texts_without_answers_is_one_request() -> None:
    meter = alone(tokens_per_minute=1000, requests_per_minute=1)
    assert isinstance(ask(meter, *[Prompt(3, 0)] * 300), Charge)
    assert [meter.in_use(name, NOON) for name in meter.shares] == [900, 1]


def test_what_a_body_fixes_is_refused_for_good_and_what_is_only_usual_is_not() -> None:
    meter = Meter()
    meter.limit({"tokens_per_minute": 1500, "max_concurrent": 9})
    assert meter.never_fits(meter.need([Prompt(5, 2, 10**6)])) is None, "two answers, of which nobody knows the lengths"
    assert meter.never_fits(meter.need([Prompt(5, 4, 10**6)])) == ("tokens_per_minute", 1500)
    assert meter.never_fits(meter.need([Prompt(5, 2, 800, is_beam_search=True)])) == ("tokens_per_minute", 1500)
    assert meter.never_fits(meter.need([Prompt(5, 1, 10**6)])) is None
    assert meter.never_fits(meter.need([Prompt(1501, 1, 1)])) == ("tokens_per_minute", 1500)


def test_a_list_of_prompts_is_one_of_the_concurrent_requests() -> None:
    meter = Meter()
    meter.limit({"requests_per_minute": 1000, "max_concurrent": 100})
    charge = meter.admit(meter.need([Prompt(5, 1, 5)] * 30), 0.0)
    meter.admit_more(charge, meter.need([Prompt(5, 1, 5)]), 0.0)
    assert [meter.shares[name].taken for name in ("requests_per_minute", "max_concurrent")] == [31, 1]


def test_a_beam_search_sets_all_its_tokens_aside_whatever_is_usual() -> None:
    meter = after_short_answers(alone(tokens_per_minute=2000, requests_per_minute=9))
    assert isinstance(ask(meter, Prompt(10, 4, 300, is_beam_search=True)), Charge)
    assert [meter.in_use(name, NOON) for name in meter.shares] == [1210, 1]


@pytest.mark.parametrize(
    ("prompts", "quota"),
    [
        ([Prompt(401, 1, 1)], "tokens_per_day"),
        ([Prompt(201, 0)] * 2, "tokens_per_day"),
        ([Prompt(1, 18, 50)], "tokens_per_day"),
        ([Prompt(1, 1, 100)] * 8, "tokens_per_day"),
        ([Prompt(1, 9, 50, is_beam_search=True)], "tokens_per_day"),
        ([Prompt(1, 1, 1)] * 11, "requests_per_minute"),
        ([Prompt(1, 0)] * 400, None),
        ([Prompt(1, 2, 100)], None),
        ([Prompt(1, 9, 50)], None),
        ([Prompt(400, 1, 10_000)], None),
    ],
)
def test_a_request_that_alone_exceeds_a_quota_never_fits_unless_only_one_answer_may_be_too_long(
    prompts: list[Prompt], quota: Quota | None
) -> None:
    meter = alone(tokens_per_minute=500, tokens_per_day=400, requests_per_minute=10)
    found = meter.never_fits(meter.need(prompts))
    assert (found and found[0]) == quota
    if quota is None:
        assert isinstance(ask(meter, *prompts), Charge)


@pytest.mark.parametrize("spent_before", [0, 1000, 1900])
def test_short_answers_let_no_tenant_take_more_than_its_quota_2_5_times_by_long_ones(spent_before: int) -> None:
    meter = after_short_answers(alone(tokens_per_minute=2000))
    before = meter.admit(tokens(spent_before), NOON)
    meter.settle(before, spent_before, NOON)
    meter.end(before, ran=True)
    running = dict[Charge, float]()
    for second in range(55):
        now = NOON + second
        running |= {charge: now for _ in range(150) if isinstance(charge := ask(meter, Prompt(1, 1, 200), now=now), Charge)}
        for charge, began_at in running.items():
            meter.settle(charge, min(201, 1 + int(20 * (now - began_at))), now)
    in_use = meter.in_use("tokens_per_minute", NOON + 55)
    assert 2000 < in_use <= 5000


@pytest.mark.parametrize(("length", "rates"), [(200, [50]), (50, [30]), (50, [10]), (50, [5, 10, 20]), (20, [2]), (3, [1])])
def test_answers_of_usual_length_get_the_whole_quota_however_slow_they_are(length: int, rates: list[int]) -> None:
    """Requests without a ``max_tokens`` ask for twice the quota. ``rates``: tokens per second of each answer in turn."""
    meter, running, spent, asked = alone(tokens_per_minute=60_000), dict[Charge, tuple[float, int]](), 0, 0
    for tick in range(180 * 10):
        now = NOON + tick / 10
        for charge, (began_at, rate) in list(running.items()):
            made = min(length, 1 + math.floor((now - began_at) * rate))
            meter.settle(charge, made, now)
            if made == length:
                del running[charge]
                spent += made if tick >= 600 else 0
                meter.end(charge, ran=True, answer_tokens=length, answer_s=now - began_at)
        while asked * length < 2 * tick * 100:
            asked += 1
            if isinstance(admitted := ask(meter, Prompt(0, 1, 4000), now=now), Charge):
                running[admitted] = now, rates[asked % len(rates)]
        assert meter.in_use("tokens_per_minute", now) <= 60_000
    assert spent / 120_000 > 0.93


def test_a_quota_that_the_file_changes_holds_at_once() -> None:
    meter = alone(requests_per_minute=5, max_concurrent=2)
    meter.admit(tokens(2), NOON)
    meter.limit({"requests_per_minute": 1})
    lack = meter.lack(SMALLEST, NOON)
    assert lack is not None
    assert (lack.quota, lack.limit) == ("requests_per_minute", 1)
    meter.limit({})
    assert meter.lack(SMALLEST, NOON) is None


@pytest.mark.parametrize(("used_elsewhere", "elsewhere"), [(0, True), (9, False)])
def test_what_others_do_not_use_may_come_here(used_elsewhere: int, elsewhere: bool) -> None:
    meter = alone(requests_per_minute=10)
    meter.grant("requests_per_minute", Granted(1, used_elsewhere, 3, False))
    meter.admit(SMALLEST, NOON)
    lack = meter.lack(SMALLEST, NOON)
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
        meter.admit(SMALLEST, NOON)
    ((_, held),) = meter.hold(NOON)
    assert held == Holding(60, 10, 8, 14, 0, 0, 8, 0), "twice what it took is wanted beside what is in use"
    assert meter.grant("requests_per_minute", Granted(24, 0, 3, True))
    assert not meter.grant("requests_per_minute", Granted(24, 0, 3, True)), "it was known already"
    ((_, held),) = meter.hold(NOON)
    assert held == Holding(60, 8, 8, 0, 0, 0, 8, 0), "nothing was taken since, and another ingress lacks something"
