"""These tests exchange charges and waits between the orders of several ingresses and the lease board."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.fair_order import FairOrder
from serve_app.core.order_board import OrderBoard, Use, Waits
from tests.core.test_fair_order import COSTS, order_of_service, placed


class Board(OrderBoard):
    """Numbers the reports, of which each is answered."""

    def __init__(self, silence_s: float) -> None:
        super().__init__(silence_s)
        self._numbers = Counter[str]()

    def tell(self, ingress: str, waits: Waits, now: float) -> Waits:
        self._numbers[ingress] += 1
        number = self._numbers[ingress]
        return self.exchange(ingress, waits, now, number=number, last_answered=number - 1)


def reported(virtual_s: float, **uses: Use) -> Waits:
    return {"m": {"interactive": (virtual_s, uses)}}


def test_the_board_tells_each_ingress_what_waits_at_the_others_and_each_charge_once() -> None:
    board = Board(3.0)
    board.tell("c", reported(1.0), 0.0)
    board.tell("a", reported(5.0, red=Use(2.0, 3.0)), 1.0)
    board.tell("b", reported(7.0, red=Use(1.0, 4.0), blue=Use(1.0, 0.0)), 2.0)
    assert board.tell("c", reported(1.0, red=Use(9.0, 1.0)), 2.0) == reported(7.0, red=Use(3.0, 7.0), blue=Use(1.0, 0.0))
    assert board.tell("c", reported(1.0), 3.0) == reported(7.0, red=Use(3.0, 0.0), blue=Use(1.0, 0.0))
    assert board.tell("a", reported(5.0), 3.0) == reported(7.0, red=Use(1.0, 5.0), blue=Use(1.0, 0.0))


@pytest.mark.parametrize("is_taken", [True, False])
def test_each_charge_counts_once_if_a_report_or_its_answer_is_lost(is_taken: bool) -> None:
    board = OrderBoard(3.0)
    board.exchange("b", reported(0.0), 0.0, number=1, last_answered=0)
    board.exchange("a", reported(0.0, red=Use(0.0, 3.0)), 0.0, number=1, last_answered=0)
    if is_taken:
        assert board.exchange("b", reported(0.0, red=Use(0.0, 1.0)), 1.0, number=2, last_answered=1) == reported(
            0.0, red=Use(0.0, 3.0)
        )
    board.exchange("a", reported(0.0), 1.0, number=2, last_answered=1)
    again = board.exchange("b", reported(0.0, red=Use(0.0, 5.0)), 2.0, number=3, last_answered=1)
    assert again == reported(0.0, red=Use(0.0, 3.0)), "the answer that was lost told it"
    to_a = board.exchange("a", reported(0.0), 2.0, number=3, last_answered=2 if is_taken else 1)
    assert to_a == reported(0.0, red=Use(0.0, 4.0 if is_taken else 5.0))
    assert board.exchange("b", reported(0.0), 3.0, number=4, last_answered=3) == {"m": {"interactive": (0.0, {})}}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["arrive", "report is lost", "answer is lost"])), max_size=30))
def test_each_charge_reaches_each_other_ingress_once_whatever_is_lost(steps: list[tuple[int, str]]) -> None:
    board, orders = OrderBoard(1.0), [FairOrder() for _ in range(3)]
    num, last_answered, charged_s, learnt_s = [0] * 3, [0] * 3, [0.0] * 3, [0.0] * 3

    def exchange(ingress: int, messages: str = "arrive") -> None:
        num[ingress] += 1
        report = orders[ingress].report()
        if messages != "report is lost":
            numbers = {"number": num[ingress], "last_answered": last_answered[ingress]}
            answer = board.exchange(str(ingress), {"m": report}, 0.0, **numbers)["m"]
            if messages == "arrive":
                last_answered[ingress] = num[ingress]
                orders[ingress].answered(report)
                learnt_s[ingress] += sum(use.charged_s for _, uses in answer.values() for use in uses.values())

    for order in orders:
        order.learn(COSTS)
    for ingress in range(3):
        exchange(ingress)
    for number, (ingress, messages) in enumerate(steps):
        placed(orders[ingress], str(number), "a")
        charged_s[ingress] += 0.11
        exchange(ingress, messages)
    for ingress in (0, 1, 2, 0, 1, 2):
        exchange(ingress)
    assert learnt_s == pytest.approx([sum(charged_s) - own_s for own_s in charged_s])


def test_a_silent_ingress_is_forgotten_by_the_board_and_what_waited_there_is_given_back() -> None:
    board = Board(3.0)
    board.tell("b", reported(1.0), 0.0)
    board.tell("a", reported(5.0, red=Use(2.0, 3.0)), 1.0)
    assert board.tell("b", reported(1.0), 2.0) == reported(5.0, red=Use(2.0, 3.0))
    assert board.tell("b", reported(1.0), 4.5) == reported(0.0, red=Use(0.0, -2.0))
    assert board.tell("b", reported(1.0), 5.0) == {"m": {}}
    board.tell("a", reported(5.0, red=Use(2.0, 3.0)), 5.0)
    assert board.tell("b", reported(1.0), 6.0) == reported(5.0, red=Use(2.0, 3.0))


def test_a_charge_at_another_ingress_counts_by_the_weight_that_the_tenant_has_there() -> None:
    board, here, there = Board(3.0), FairOrder(), FairOrder()
    for order in (here, there):
        order.learn(COSTS)
    board.tell("here", {"m": here.report()}, 0.0)
    for number in range(20):
        placed(there, f"there{number}", "a", weight=4.0)
    board.tell("there", {"m": there.report()}, 0.0)
    here.learn_waits(board.tell("here", {"m": here.report()}, 0.0)["m"])
    state = placed(here, "a", "a", weight=4.0)  # each request of both tenants costs 0.11 GPU-seconds
    assert order_of_service(state, *(placed(here, f"b{number}", "b") for number in range(30))).index("a") == 5


def test_each_charge_is_reported_until_a_report_with_it_is_answered() -> None:
    order = FairOrder()
    order.learn(COSTS)
    state = placed(order, "a", "a", weight=4.0)
    first = order.report()
    assert first["interactive"] == (0.0, {"a": Use(0.11, 0.11 / 4.0, 4.0)})
    order.begin(state, 0.0)
    assert order.report()["interactive"] == (0.0, {"a": Use(0.0, 0.11 / 4.0, 4.0)})
    order.answered(first)
    assert order.report()["interactive"] == (0.0, {})
    state.emitted_ids = [1] * 20
    order.end(state, 0.0)
    assert order.report()["interactive"][1]["a"].charged_s == pytest.approx(0.1 / 4.0)


@pytest.mark.parametrize(("charged_s", "position"), [(0.5, 5), (-0.5, 0)])
def test_a_charge_at_another_ingress_moves_the_tenant_back_and_what_is_given_back_is_no_credit(
    charged_s: float, position: int
) -> None:
    order = FairOrder()
    order.learn(COSTS)
    order.end(placed(order, "known", "a"), 0.0)
    order.learn_waits({"interactive": (0.0, {"a": Use(0.0, charged_s)})})
    state = placed(order, "a", "a", weight=1.0)  # 0.11 GPU-seconds
    assert order_of_service(state, *(placed(order, f"b{number}", "b") for number in range(50))).index("a") == position
