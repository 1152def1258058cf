"""These tests place requests of several tenants, and look at the order in which they would start."""

import math

import pytest

from serve_app.core.fair_order import FairOrder
from serve_app.core.fair_tags import FIRST_TAG, is_ahead
from serve_app.core.order_board import Use
from serve_app.core.request import RequestState, Resume
from serve_app.core.step_costs import MeasuredCosts
from serve_app.core.tenants import Priority

COSTS = MeasuredCosts(
    step_s=0.0, output_token_s=0.01, prompt_token_s=0.001, step_error_s=1e-6, output_token_error_s=1e-6, prompt_token_error_s=1e-6
)


def request(name: str, *, prompt_tokens: int = 10, max_tokens: int = 10) -> RequestState:
    return RequestState(name, prompt_tokens, max_tokens, Resume.CONTINUE)


def placed(
    order: FairOrder, name: str, tenant: str = "", weight: float = 1.0, priority: Priority = "interactive", now: float = 0.0
) -> RequestState:
    state = request(name)
    order.place(state, tenant, weight, priority, now)
    return state


def order_of_service(*states: RequestState) -> list[str]:
    return [state.request_id for state in sorted(states, key=lambda state: (state.priority, state.number))]


def test_a_tenant_with_one_request_goes_before_the_backlog_of_another() -> None:
    order = FairOrder()
    backlog = [placed(order, f"a{number}", "a") for number in range(5)]
    assert order_of_service(*backlog, placed(order, "b0", "b")) == ["a0", "b0", "a1", "a2", "a3", "a4"]


def test_requests_of_one_tenant_and_those_without_one_go_in_order_of_arrival_whatever_they_cost() -> None:
    order = FairOrder()
    states = [request(f"r{number}", prompt_tokens=1000 - 100 * number) for number in range(9)]
    for number, state in enumerate(states):
        order.place(state, "", 1.0, "interactive", float(number))
        if number % 2:
            state.attempt, state.emitted_ids = 0, [1]
            order.begin(state, float(number))
            order.end(state, float(number))  # it cost less than expected: the account is corrected
    assert order_of_service(*states) == [state.request_id for state in states]


def test_a_tenant_that_comes_anew_starts_level_with_those_that_wait() -> None:
    order = FairOrder()
    for number in range(50):  # "a" has had much already
        state = placed(order, f"old{number}", "a")
        state.emitted_ids = [1] * 10
        order.begin(state, 0.0)
        order.end(state, 0.0)
    states = [placed(order, f"{tenant}{number}", tenant) for tenant in "ab" for number in range(3)]
    served = order_of_service(*states)
    assert {tuple(sorted(served[i : i + 2])) for i in (0, 2, 4)} == {("a0", "b0"), ("a1", "b1"), ("a2", "b2")}


def test_a_tenant_that_comes_anew_starts_level_though_some_request_of_light_tenants_always_waits() -> None:
    order = FairOrder()
    backlog = [placed(order, f"a{number}", "a") for number in range(20)]
    light = placed(order, "light-first", "light")
    for second in range(1000):
        following = placed(order, f"light{second}", f"light{second % 3}")
        for state in (backlog.pop(0), light):
            state.emitted_ids = [1] * 10
            order.begin(state, float(second))
            order.end(state, float(second))
        light = following
        backlog.append(placed(order, f"a{second + 20}", "a"))
    anew = [placed(order, f"b{number}", "b") for number in range(60)]
    served = order_of_service(*backlog, *anew)
    assert 15 <= sum(name.startswith("b") for name in served[: served.index(backlog[-1].request_id)]) <= 35


@pytest.mark.parametrize("weight", [0.01, 1.0, 1000.0])
def test_a_backlog_is_ahead_after_as_many_requests_whatever_the_scale_of_all_weights(weight: float) -> None:
    order = FairOrder()
    order.learn(COSTS)
    order.begin(placed(order, "first", "a", weight), 0.0)
    backlog = [placed(order, f"a{number}", "a", weight) for number in range(20)]
    assert [is_ahead(state.priority) for state in backlog] == [False] * 8 + [True] * 12


def test_requests_without_keys_are_never_ahead() -> None:
    order = FairOrder()
    order.begin(placed(order, "first", ""), 0.0)
    assert not any(is_ahead(placed(order, f"a{number}", "").priority) for number in range(20))


def test_a_request_that_is_not_due_yet_puts_no_other_tenant_ahead() -> None:
    order = FairOrder()
    order.learn(COSTS)
    light = placed(order, "light", "light", weight=0.02)
    states = [placed(order, "a0", "a")]
    for second in range(30):
        states.append(placed(order, f"a{second + 1}", "a"))
        state = states.pop(0)
        state.emitted_ids = [1] * 10
        order.begin(state, float(second))
        order.end(state, float(second))
        order.note_fullness(1, light, float(second))
    anew = placed(order, "b", "b")
    assert order_of_service(light, anew) == ["b", "light"]
    assert not is_ahead(anew.priority)


def test_a_short_request_does_not_wait_for_a_long_prompt_of_another_tenant() -> None:
    order = FairOrder()
    long = request("long", prompt_tokens=100_000)
    order.place(long, "a", 1.0, "interactive", 0.0)
    assert order_of_service(long, placed(order, "short", "b")) == ["short", "long"]


def test_a_long_prompt_starts_though_a_short_request_of_yet_another_tenant_always_waits() -> None:
    order = FairOrder()
    order.learn(COSTS)
    long = request("long", prompt_tokens=1000)
    order.place(long, "long", 1.0, "interactive", 0.0)
    waiting, second = [long, placed(order, "t0", "t0")], 0
    while long in waiting:
        assert second < 100  # 11 GPU-seconds, of which a third is the long prompt's
        second += 1
        waiting.append(placed(order, f"t{second}", f"t{second}"))
        waiting.sort(key=lambda state: (state.priority, state.number))
        state = waiting.pop(0)
        state.emitted_ids = [1] * 10
        order.begin(state, float(second))
        order.end(state, float(second))


def test_priorities_come_before_shares() -> None:
    order = FairOrder()
    states = [placed(order, priority, priority, priority=priority) for priority in ("background", "batch", "interactive")]
    assert order_of_service(*states) == ["interactive", "batch", "background"]
    assert [state.priority >= first for state, first in zip(reversed(states), FIRST_TAG.values(), strict=True)] == [True] * 3


def test_who_goes_away_before_a_start_pays_nothing() -> None:
    order = FairOrder()
    first = placed(order, "first", "b")
    for state in [placed(order, f"gone{number}", "a") for number in range(100)]:
        order.end(state, 0.0)
    states = [placed(order, "a0", "a"), placed(order, "b0", "b")]
    assert order_of_service(first, *states) == ["first", "a0", "b0"]


def test_a_tenant_waits_some_seconds_at_most_for_what_it_had_when_others_asked_for_less() -> None:
    order = FairOrder()
    order.learn(COSTS)
    first = placed(order, "b-first", "b")
    for number in range(240):  # virtual time passes by 20 * 0.11 in a second
        order.note_fullness(1, first, number / 20)
        following = placed(order, f"b{number}", "b", now=number / 20)
        order.begin(first, number / 20)
        first = following
    order.learn_waits({"interactive": (0.0, {"a": Use(0.0, 1000.0)})})
    state = placed(order, "a", "a", now=12.0)
    later = [placed(order, f"later{number}", "b", now=12.0) for number in range(300)]
    assert 20 < order_of_service(state, *later).index("a") <= 5 * 20


def test_a_tenant_that_asks_for_less_than_its_share_is_never_ahead() -> None:
    order = FairOrder()
    order.learn(COSTS)
    waiting = [placed(order, f"b{number}", "b") for number in range(3)]
    for number in range(40):
        order.begin(placed(order, f"a{number}", "a"), 1.0 + number)
        order.note_fullness(1, waiting[0], 1.0 + number)
    behind_s, virtual_s = waiting[0].priority, order._lanes["interactive"].virtual_s
    assert virtual_s > 10 * 0.11, "virtual time is far beyond the first request that waits"
    assert behind_s < placed(order, "c", "c").priority
    assert not is_ahead(placed(order, "d", "d").priority)


def test_a_tenant_with_a_short_queue_at_one_engine_is_as_far_as_there() -> None:
    order = FairOrder()
    order.learn(COSTS)
    backlog = [placed(order, f"a{number}", "a") for number in range(100)]
    order.begin(backlog[80], 1.0)
    order.note_fullness(1, backlog[0], 1.0)
    lane = order._lanes["interactive"]
    order.place(state := request("b"), "b", 1.0, "interactive", 1.0)
    account = order._places["b"].account
    assert lane.ahead_from_s(account) > 80 * 0.11
    for each in backlog:
        order.end(each, 2.0)
    order.place(request("a-anew"), "a", 1.0, "interactive", 3.0)
    order.note_fullness(1, state, 3.0)
    assert lane.ahead_from_s(account) < 80 * 0.11, "its queue was empty meanwhile"


def test_lines_of_batches_in_engines_make_them_full_for_lines_alone() -> None:
    order = FairOrder()
    lines = [placed(order, f"line{number}", "a", priority="background") for number in range(5)]
    order.note_queue("engine", 5, lines)
    order.note_fullness(1, None, 0.0)
    chat = placed(order, "chat", "a")
    for number in range(30):
        state = placed(order, f"chat{number}", "a")
        order.begin(state, 0.5 * number)
    for line in lines[:-1]:
        order.begin(line, 11.0)
    assert order.expected_wait_s(chat, 12.0) is None
    assert order.expected_wait_s(lines[-1], 12.0) is not None
    order.note_queue("engine", 6, lines)
    order.note_fullness(1, None, 12.0)
    order.begin(chat, 22.0)
    assert order.expected_wait_s(placed(order, "later", "a"), 23.0) is not None


def test_many_tenants_that_are_gone_are_forgotten() -> None:
    order = FairOrder()
    for number in range(5000):
        order.end(placed(order, f"r{number}", f"tenant{number}"), 0.0)
    assert sum(len(lane.accounts) for lane in order._lanes.values()) <= 1001


def test_a_large_request_that_is_gone_leaves_no_mark() -> None:
    order = FairOrder()
    placed(order, "a0", "a")
    large = request("large", prompt_tokens=1_000_000)
    order.place(large, "a", 1.0, "interactive", 0.0)
    order.end(large, 0.0)
    assert order_of_service(placed(order, "a1", "a"), *(placed(order, f"b{number}", "b") for number in range(9))).index("a1") < 3


def test_a_tenant_whose_requests_wait_at_few_replicas_has_further_ones_spread_by_load() -> None:
    order = FairOrder()
    order.learn(COSTS)
    backlog = [placed(order, f"a{number}", "a", weight=4.0) for number in range(50)]
    assert not backlog[-1].spreads
    now = 0.0
    for number in range(400):  # at another replica, "b" gets much more than "a"
        state = placed(order, f"b{number}", "b")
        now += 0.1
        order.begin(state, now)
        state.emitted_ids = [1] * 10
        order.end(state, now)
    assert placed(order, "a-later", "a", weight=4.0).spreads
    assert not placed(order, "b-later", "b").spreads


def test_virtual_time_does_not_fall_back_after_a_tenant_was_alone() -> None:
    order = FairOrder()
    order.learn(COSTS)
    first = [placed(order, f"a{number}", "a") for number in range(4)]
    for state in first[:3]:
        order.begin(state, 1.0)  # one frame
    order.begin(first[3], 1.5)
    for number in range(1000):  # alone
        state = placed(order, f"alone{number}", "a")
        state.emitted_ids = [1] * 10
        order.begin(state, 2.0 + number)
        order.end(state, 3.0 + number)
    mine = [placed(order, "a-one", "a"), placed(order, "a-two", "a")]
    order.begin(mine[0], 5000.0)
    newcomers = [placed(order, f"b{number}", "b") for number in range(50)]
    assert order_of_service(placed(order, "a-next", "a"), *newcomers).index("a-next") < 10


def test_a_long_prompt_that_waited_for_long_does_not_take_virtual_time_with_it() -> None:
    order = FairOrder()
    order.learn(COSTS)
    long = request("long", prompt_tokens=1_000_000)
    order.place(long, "slow", 1.0, "interactive", 0.0)
    for number in range(500):
        state = placed(order, f"a{number}", "a")
        order.begin(state, float(number))
        state.emitted_ids = [1] * 10
        order.end(state, float(number))
    waiting = [placed(order, f"b{number}", "b") for number in range(20)]
    order.begin(long, 600.0)
    newcomers = [placed(order, f"c{number}", "c") for number in range(50)]
    assert order_of_service(waiting[0], *newcomers).index("b0") < 5


def test_work_for_which_nobody_waited_is_no_debt() -> None:
    order = FairOrder()
    order.learn(COSTS)
    for number in range(200):  # each costs ten times what is expected of the first answers
        state = placed(order, f"a{number}", "a")
        order.begin(state, float(number))
        state.emitted_ids = [1] * 1000
        order.end(state, float(number))
    others = [placed(order, f"b{number}", "b") for number in range(50)]
    assert order_of_service(placed(order, "a-next", "a"), *others).index("a-next") < 30


def test_a_new_weight_counts_for_the_next_request_though_others_wait() -> None:
    order = FairOrder()
    flood = [placed(order, f"a{number}", "a", weight=100.0) for number in range(5)]
    late = placed(order, "late", "a", weight=0.1)
    others = [placed(order, f"b{number}", "b") for number in range(9)]
    assert order_of_service(late, *others, *flood)[-1] == "late"
    order.validate({state.request_id: state for state in (late, *others, *flood)})


@pytest.mark.parametrize(("prompt_begun", "position"), [(False, 1), (True, 9)])
def test_who_gives_up_while_the_prompt_is_computed_pays_for_it(prompt_begun: bool, position: int) -> None:
    order = FairOrder()
    order.learn(COSTS)
    others = [placed(order, f"b{number}", "b") for number in range(9)]
    for number in range(20):
        given_up = request(f"a{number}", prompt_tokens=1000)
        order.place(given_up, "a", 1.0, "interactive", 0.0)
        order.end(given_up, 0.0, prompt_begun=prompt_begun)
    assert order_of_service(placed(order, "a-next", "a"), *others).index("a-next") == position


def test_who_aborts_an_answer_pays_for_its_tokens_so_far() -> None:
    order = FairOrder()
    order.learn(COSTS)
    others = [placed(order, f"b{number}", "b") for number in range(9)]
    aborted = request("a0", max_tokens=1000)
    order.place(aborted, "a", 1.0, "interactive", 0.0)
    order.begin(aborted, 0.0)
    aborted.emitted_ids, aborted.trail.end = [1] * 500, "aborted"  # 5 s, and the requests of "b" cost 1 s
    order.end(aborted, 0.0)
    assert order_of_service(placed(order, "a1", "a"), *others)[-1] == "a1"


def test_a_prompt_is_expected_to_cost_at_least_a_quarter_however_much_of_earlier_ones_was_cached() -> None:
    order = FairOrder()
    order.learn(COSTS)

    def large(name: str, tenant: str) -> RequestState:
        state = request(name, prompt_tokens=1000, max_tokens=1)
        order.place(state, tenant, 1.0, "interactive", 0.0)
        return state

    for number in range(50):
        cached = large(f"cached{number}", "a")
        cached.emitted_ids, cached.trail.cached_tokens = [1], 1000
        order.begin(cached, 0.0)
        order.end(cached, 0.0)
    burst = [large(f"a{number}", "a") for number in range(8)]
    # Seconds: 0.26, 0.52, 0.78 for the first three of "a", and 1.01 for the first of "b".
    assert order_of_service(*burst, large("b0", "b")).index("b0") == 3


def test_nonsense_from_other_ingresses_changes_nothing() -> None:
    order = FairOrder()
    state = placed(order, "a0", "a")
    uses = {"a": Use(math.inf, math.nan), "b": Use(math.nan, math.inf), "c": Use(-1.0, -math.inf)}
    order.learn_waits({"interactive": (math.nan, uses)})
    order.learn_waits({"interactive": (math.inf, {})})
    assert order_of_service(state, placed(order, "a1", "a"), placed(order, "b0", "b")) == ["a0", "b0", "a1"]


@pytest.mark.parametrize(("max_tokens", "charged_s"), [(1000, 12.81), (16, 6.57)])
def test_an_answer_that_runs_on_is_charged_for_twice_its_length_and_at_its_end_corrected(
    max_tokens: int, charged_s: float
) -> None:
    order = FairOrder()
    order.learn(COSTS)
    others = [placed(order, f"b{number}", "b") for number in range(9)]
    long = request("long", max_tokens=max_tokens)
    order.place(long, "a", 1.0, "interactive", 0.0)
    order.begin(long, 0.0)
    long.emitted_ids = [1] * 640
    assert long.charge_at == 16
    order.charge(long)
    waiting_s = {tenant: use.waiting_s for tenant, use in order.report()["interactive"][1].items()}
    assert (long.charge_at, waiting_s) == (1280, {"a": 0.0, "b": pytest.approx(9 * 0.11)})
    account = order._places["long"].account
    assert account.finish_s == pytest.approx(charged_s)
    order.end(long, 0.0)
    assert account.finish_s == pytest.approx(6.41)
    order.validate({state.request_id: state for state in others})


def test_while_no_rate_is_known_a_wait_is_what_waits_in_gpu_seconds_over_the_replicas() -> None:
    order = FairOrder()
    order.learn(COSTS)
    order.note_queue("engine", 9)
    order.note_fullness(2, None, 0.0)
    first = placed(order, "first", "a")  # expected, and computed: 10 ms for the prompt, 100 ms for the answer
    assert order.expected_wait_s(first, 0.0) is None  # no answer has ended: its costs are a guess
    order.begin(first, 0.0)
    first.emitted_ids = [1] * 10
    order.end(first, 0.0)
    mine = [placed(order, f"a{number}", "a") for number in range(10)]
    assert order.expected_wait_s(mine[-1], 0.0) == pytest.approx(10 * 0.11 / 2)
    placed(order, "b", "b", weight=4.0)  # asks for less than its share
    assert order.expected_wait_s(mine[-1], 0.0) == pytest.approx(11 * 0.11 / 2)
    for number in range(200):
        placed(order, f"b{number}", "b", weight=4.0)
    assert order.expected_wait_s(mine[-1], 0.0) == pytest.approx(10 * 0.11 * 5 / 2)
    order.learn_waits({"interactive": (0.0, {"a": Use(1.1, 0.0)})})
    assert order.expected_wait_s(mine[-1], 0.0) == pytest.approx(20 * 0.11 * 5 / 2)
    order.note_queue("engine", 0)
    order.note_fullness(2, None, 0.0)
    assert order.expected_wait_s(mine[-1], 0.0) is None
