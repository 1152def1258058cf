import asyncio
from contextvars import ContextVar
from functools import partial

from serve_app.ingress.intake import MAX_BEGINS, Intake
from serve_app.ingress.loop_lag import LoopLag
from serve_app.testing.fleet import in_loop, until

_whose: ContextVar[str] = ContextVar("whose", default="nobody's")


@in_loop
async def test_a_burst_begins_in_order_and_a_few_a_turn() -> None:
    intake, begun = Intake(), list[int]()
    for number in range(2 * MAX_BEGINS + 1):
        intake.begin(partial(begun.append, number))
    by_turn = [list(begun)]
    while len(begun) < 2 * MAX_BEGINS + 1:
        await asyncio.sleep(0)
        by_turn.append(list(begun))
    order = list(range(2 * MAX_BEGINS + 1))
    assert by_turn == [order[:MAX_BEGINS], order[: 2 * MAX_BEGINS], order]


@in_loop
async def test_after_a_burst_a_request_begins_at_once_again() -> None:
    intake, begun = Intake(), list[int]()
    for number in range(MAX_BEGINS + 1):
        intake.begin(partial(begun.append, number))
    for _ in range(3):
        await asyncio.sleep(0)
    intake.begin(lambda: begun.append(-1))
    assert begun == [*range(MAX_BEGINS + 1), -1]


@in_loop
async def test_what_waits_gets_nothing_of_the_context_of_another_request() -> None:
    intake, seen = Intake(), list[str]()
    _whose.set("the first one's")
    for _ in range(MAX_BEGINS):
        intake.begin(lambda: None)
    intake.begin(lambda: seen.append(_whose.get()))
    await asyncio.sleep(0)
    assert seen == ["nobody's"]


@in_loop
async def test_the_intake_is_as_late_as_its_oldest_request() -> None:
    now = 7.0
    intake = Intake(lambda: now)
    for _ in range(MAX_BEGINS):
        intake.begin(lambda: None)
    assert intake.late_s() == 0.0
    intake.begin(lambda: None)
    now = 9.0
    intake.begin(lambda: None)
    assert intake.late_s() == 2.0
    await asyncio.sleep(0)
    assert intake.late_s() == 0.0


@in_loop
async def test_requests_that_wait_to_begin_make_an_ingress_overloaded() -> None:
    lag = LoopLag(limit_s=1.0)
    watch = asyncio.create_task(lag.watch(lambda: 1.5))
    await until(lambda: lag.is_overloaded)
    watch.cancel()
