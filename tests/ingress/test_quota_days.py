"""Tokens of the day outlive a clock that was wrong: a day far ahead hides none of the days before it."""

from typing import Any, cast

from serve_app.core.quota_shares import Answer, Days, Report
from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Tenant
from tests.doubles.fleet import in_loop
from tests.ingress.test_quotas import NOW, ask, exchange_of, sharing

TODAY = int(NOW // 86_400)
TEAM = Tenant("team", quotas={"tokens_per_day": 100})


class Kept:
    """A store that has these days, and notes what it was given last."""

    def __init__(self, days: Days) -> None:
        self.days, self.given = days, dict[str, tuple[int, int]]()

    def tenant_days(self) -> Days:
        return self.days

    def keep_tenant_days(self, days: Days) -> None:
        self.given = dict(days)


@in_loop
async def test_a_stored_day_of_a_year_ahead_does_not_hide_the_tokens_of_today() -> None:
    stored = Kept({"team": (TODAY + 365, 99), "other": (TODAY + 1, 7)})
    async with sharing(1, stored=cast(Any, stored)) as (quotas,):
        exchange = exchange_of(TEAM)
        assert await ask(quotas, exchange, 15, 5) is None
        exchange.requests.add(RequestState("r", 15, 5, Resume.CONTINUE), "r")
        quotas.end(exchange)
        await quotas.leave()
    assert stored.given == {"team": (TODAY, 15), "other": (TODAY + 1, 7)}


@in_loop
async def test_a_board_whose_clock_is_a_year_ahead_is_not_believed() -> None:
    async def board(report: Report) -> Answer:
        return Answer({}, {"team": (TODAY + 365, 99)})

    stored = Kept({"team": (TODAY, 70)})
    async with sharing(1, board, stored=cast(Any, stored)) as (quotas,):
        await quotas.leave()
    assert stored.given == {"team": (TODAY, 70)}
