"""Ingresses share over the lease board how much waits for each tenant."""

import asyncio
import contextlib

import pytest

from serve_app.core.events import RequestArrived, StepCostsMeasured, WaitsReported
from serve_app.core.fair_tags import FIRST_TAG
from serve_app.core.order_board import Waits
from serve_app.core.quota_shares import Answer, Report
from serve_app.core.request import Resume
from serve_app.errors import LeaseBoardSilent
from serve_app.ingress.fleet import quotas
from serve_app.ingress.fleet.quotas import Quotas
from serve_app.membership import LeaseBoard
from tests.core.helpers import fleet_of, run
from tests.core.test_fair_order import COSTS
from tests.doubles.fleet import in_loop, until


class Ingress:
    """One ingress with one model, whose fleet has no replica."""

    def __init__(self, name: str, board: LeaseBoard) -> None:
        self.fleet = fleet_of(no_replica_s=1000.0)
        run(self.fleet, StepCostsMeasured(COSTS))
        self.board, self.is_away = board, False
        self.quotas = Quotas(name, self._exchange, orders=self)
        self.learnt: list[Waits] = []

    async def _exchange(self, report: Report) -> Answer | None:
        if self.is_away:
            raise LeaseBoardSilent(retry_after_s=1.0)
        return self.board.exchange_shares(report)

    def report(self) -> Waits:
        return {"chat": self.fleet.order.report()}

    def answered(self, report: Waits) -> None:
        self.fleet.order.answered(report["chat"])

    def learn(self, elsewhere: Waits) -> None:
        self.learnt.append(elsewhere)
        run(self.fleet, WaitsReported(elsewhere["chat"]))

    def place(self, request_id: str, tenant: str) -> float:
        """Let a request come that costs 0.65 GPU-seconds, and return its tag in virtual seconds."""
        run(self.fleet, RequestArrived(request_id, 10, 1000, Resume.CONTINUE, request_id, tenant=tenant))
        return (self.fleet.requests[request_id].priority - FIRST_TAG["interactive"]) / 2e6  # two tags a microsecond


@in_loop
async def test_what_another_ingress_charged_a_tenant_moves_it_back_here_and_stays_charged_while_the_board_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "EXCHANGE_S", 0.02)
    monkeypatch.setattr(quotas, "_SETTLE_S", 0.01)
    board = LeaseBoard(10.0)
    one, other = Ingress("one", board), Ingress("other", board)
    for number in range(3):
        other.place(f"other{number}", "red")
    sharing = asyncio.gather(one.quotas.run(), other.quotas.run())
    await until(lambda: any(waits["chat"]["interactive"][1] for waits in one.learnt if waits["chat"]))
    assert one.place("red", "red") == pytest.approx(4 * 0.65)
    assert one.place("blue", "blue") == pytest.approx(0.65)
    one.is_away, before = True, len(other.learnt)
    await until(lambda: one.learnt[-1] == {"chat": {}})
    assert one.place("red-later", "red") == pytest.approx(5 * 0.65), "what was charged elsewhere stays charged"
    one.is_away = False

    def told_since() -> list[float]:
        uses = [waits["chat"]["interactive"][1] for waits in other.learnt[before:] if waits["chat"]]
        return [each["red"].charged_s for each in uses if "red" in each]

    await until(lambda: sum(told_since()) > 0.0)
    assert sum(told_since()) == pytest.approx(2 * 0.65), "the board did not answer the first reports with these charges"
    sharing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sharing


@in_loop
async def test_an_ingress_that_leaves_waits_for_its_report_that_is_under_way_and_sends_none_after_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "EXCHANGE_S", 0.02)
    monkeypatch.setattr(quotas, "_SETTLE_S", 0.01)
    board, may_answer = LeaseBoard(10.0), asyncio.Event()
    sent, under_way = list[tuple[int, int, bool, int]](), list[int]()

    async def exchange(report: Report) -> Answer | None:
        under_way.append(report.number)
        sent.append((report.number, report.last_answered, report.is_last, len(under_way)))
        await may_answer.wait()
        under_way.remove(report.number)
        return board.exchange_shares(report)

    leaving = Quotas("leaving", exchange)
    sharing = asyncio.create_task(leaving.run())
    await until(lambda: bool(sent))
    last = asyncio.create_task(leaving.leave())
    asyncio.get_running_loop().call_soon(may_answer.set)  # after the first step of the task
    await last
    turn = leaving._exchanged
    await until(lambda: leaving._exchanged is not turn)
    assert sent == [(1, 0, False, 1), (2, 1, True, 1)], "each report was alone under way"
    sharing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sharing
