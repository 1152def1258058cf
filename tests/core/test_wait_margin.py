import pytest

from serve_app.core.fair_order import FairOrder
from serve_app.core.request import RequestState, Resume
from serve_app.core.wait_margin import LEAST_MARGIN, WaitMargin
from tests.core.test_fair_order import placed


def waited(margin: WaitMargin, seconds: float, *, has_begun: bool = True, expected_s: float = 4.0) -> float:
    """Let a request with a limit of 10 s wait for so long, and return the factor after it."""
    request = RequestState("r", 1, 1, Resume.CONTINUE, start_by=10.0, expected_wait_s=expected_s)
    margin.learn(request, seconds, has_begun=has_begun)
    return margin.factor


def test_a_margin_grows_with_waits_above_it_within_bounds_and_comes_back() -> None:
    margin = WaitMargin()
    assert waited(margin, 6.0) > LEAST_MARGIN
    assert max(waited(margin, 10.0, has_begun=False, expected_s=2.0) for _ in range(100)) == 3.0
    assert min(waited(margin, 4.0) for _ in range(2000)) == LEAST_MARGIN


def test_a_margin_learns_nothing_from_waits_that_were_cut_short_or_are_short_for_their_limit() -> None:
    margin = WaitMargin()
    waited(margin, 9.0)
    before = margin.factor
    assert waited(margin, 1.0, has_begun=False) == before
    assert waited(margin, 9.0, expected_s=1.0) == before
    assert waited(margin, 9.0) > before


@pytest.mark.parametrize(("num_before", "factor"), [(0, LEAST_MARGIN), (1, 2.0)])
def test_a_tenants_only_request_is_admitted_by_the_least_margin(num_before: int, factor: float) -> None:
    order = FairOrder()
    for number in range(num_before):
        placed(order, f"before{number}", "a")
    last = placed(order, "last", "a")
    order._places["last"].account.margin.factor = 2.0
    assert order.wait_margin(last) == factor
