"""Quotas of tenants at one ingress: a request that exceeds one is refused with 429, and shares are exchanged with the lease board.

`core/quotas.py` decides, once for each HTTP request, before its first engine request. A request waits for the board only where this
ingress has no room and others hold some that they do not use, and then for `_WAIT_S` at most. While the board is away, no request waits,
and the shares stay.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from serve_app.core.order_board import Waits
from serve_app.core.quota_shares import DAY_S, Answer, Days, Report, later
from serve_app.core.quotas import SMALLEST, Charge, Lack, Meter, Need
from serve_app.core.tenants import Quota, Tenant
from serve_app.errors import BadRequest, LeaseBoardSilent, QuotaExceeded, ServingError
from serve_app.host.steady_clock import steady_clock
from serve_app.ingress.exchange.exchange import Exchange

logger = logging.getLogger(__name__)

ExchangeShares = Callable[[Report], Awaitable[Answer | None]]
"""Sends a report to the lease board and returns its answer. Raises `LeaseBoardSilent` without one."""


class StoredDays(Protocol):
    """Keeps the tokens of the day on a disk. Any thread may call it."""

    def tenant_days(self) -> Days: ...

    def keep_tenant_days(self, days: Days) -> None: ...


class Orders(Protocol):
    """The orders in which requests start (`core/fair_order.py`), as ingresses share them."""

    def report(self) -> Waits:
        """Return what waits here, of each model, and what was charged since the last report that was answered."""
        ...

    def answered(self, report: Waits) -> None:
        """Note that the lease board has answered the report: its charges need not be reported again."""
        ...

    def learn(self, elsewhere: Waits) -> None:
        """Take in what waits at all other ingresses, and what they have charged."""
        ...


EXCHANGE_S = 1.0
"""Seconds between two exchanges of shares, if no request waits for one."""
_SOONEST_S = 0.2
"""The least time between two exchanges."""
_SETTLE_S = 0.5
_STORE_S = 10.0
_FORGET_WAITS = 3
"""After so many reports without an answer, what waited at other ingresses may be gone."""
_WAIT_S = 1.5
"""Within `EXCHANGE_S` every other ingress learns that a request lacks something, and gives up what it does not use."""
_NAMES: dict[Quota, str] = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}
"""OpenAI's names of the quotas that its clients know."""
HEADERS = tuple(f"x-ratelimit-{part}-{name}" for part in ("limit", "remaining", "reset") for name in _NAMES.values())


class Quotas:
    """The quotas of all tenants at this ingress.

    Args:
        ingress_id: Name of this ingress at the board.
        exchange: None for an ingress that is alone and has the whole of each quota.
        clock: Returns seconds since 1970 that never go back.
        stored: Where the tokens of the day are kept; None for nowhere but at the board and the ingresses.
        orders: The order of each model's requests, which is exchanged with the same messages.
        tenant: Returns the tenant of a name as the tenants file has it now, or None. Default: the tenant that a request came with, whose
            quotas may have changed since.
    """

    def __init__(
        self,
        ingress_id: str,
        exchange: ExchangeShares | None,
        clock: Callable[[], float] | None = None,
        stored: StoredDays | None = None,
        orders: Orders | None = None,
        tenant: Callable[[str], Tenant | None] | None = None,
    ) -> None:
        self._ingress_id, self._exchange, self._stored, self._orders = ingress_id, exchange, stored, orders
        self._clock = clock or steady_clock()
        self._tenant = tenant
        self._meters: dict[str, Meter] = {}
        self._running: dict[Exchange, tuple[Meter, Charge]] = {}
        self._deciding: dict[Exchange, asyncio.Lock] = {}
        self._days: Days = {}
        self._number = self._last_answered = 0
        self._exchanging = asyncio.Lock()
        self._lacking = asyncio.Event()
        self._exchanged = asyncio.Event()
        self._is_silent = self._has_left = False
        self._num_unanswered = 0

    def check(self, tenant: Tenant) -> None:
        """Refuse a request before it is read, if there is no room even for the smallest one.

        Raises:
            QuotaExceeded: One of the tenant's quotas is used up at all ingresses.
        """
        if not tenant.quotas:
            return
        meter = self._meter(tenant)
        if (lack := meter.lack(SMALLEST, self._clock(), note=False)) is not None and not lack.elsewhere:
            raise self._exceeded(tenant, meter, lack._replace(wanted=0))

    async def refusal(self, exchange: Exchange | None) -> ServingError | None:
        """Charge an HTTP request before one of its engine requests; return the error if it is refused.

        All `Exchange.prompts` are charged before the first engine request, and an admitted request is never refused later.
        """
        if exchange is None or exchange.caller is None or not (tenant := self._newest(exchange.caller.tenant)).quotas:
            return None
        if self._is_admitted(exchange):
            return None
        if exchange.requests.num:  # it runs, and its tenant has got its first quotas since
            return None
        if (ended := _ended(exchange)) is not None:
            return ended
        async with self._deciding.setdefault(exchange, asyncio.Lock()):  # the engine requests of a list of prompts come at once
            if (ended := _ended(exchange)) is not None:
                return ended
            return None if self._is_admitted(exchange) else await self._decide(exchange, tenant)

    async def _decide(self, exchange: Exchange, tenant: Tenant) -> ServingError | None:
        """Admit an HTTP request, or return the error."""
        meter = self._meter(tenant)
        need = meter.need(exchange.prompts)
        if (quota := meter.never_fits(need)) is not None:
            return _too_large(need, f"the tenant {tenant.name!r} has {quota[0]} {quota[1]}", quota)
        lack = await self._lack(meter, need)
        if (ended := _ended(exchange)) is not None:
            return ended
        if lack is not None:
            return self._exceeded(tenant, meter, lack, has_answer=need.answers > 0)
        self._running[exchange] = meter, meter.admit(need, self._clock())
        exchange.headers = [(name.encode(), value.encode()) for name, value in self._headers(meter).items()]
        return None

    def _is_admitted(self, exchange: Exchange) -> bool:
        """Return whether the request was admitted. Prompts that have come since, such as the next turn of a response, are charged."""
        if (running := self._running.get(exchange)) is None:
            return False
        meter, charge = running
        if more := exchange.prompts[charge.prompts :]:
            meter.admit_more(charge, meter.need(more), self._clock())
        return True

    def end(self, exchange: Exchange) -> None:
        """Settle a request that has ended, whether or not it was charged."""
        self._deciding.pop(exchange, None)
        if (running := self._running.pop(exchange, None)) is not None:
            meter, charge = running
            self._settle(exchange, meter, charge)
            requests = exchange.requests
            answer_tokens = 0 if exchange.is_beam_search or not requests.num else math.ceil(requests.output_tokens / requests.num)
            answer_s = 0.0 if requests.first is None else requests.first.trail.answer_s
            meter.end(charge, ran=requests.num > 0, answer_tokens=answer_tokens, answer_s=answer_s)

    async def run(self) -> None:
        """Settle running requests, exchange shares, and keep the tokens of the day, until cancelled."""
        async with asyncio.TaskGroup() as tg:
            tg.create_task(self._share(), name="share quotas")
            if self._stored is not None:
                tg.create_task(self._keep_days(self._stored), name="keep days")

    async def _keep_days(self, stored: StoredDays) -> None:
        kept: Days | None = None
        said = ""
        while True:
            try:
                if kept is None:
                    self._learn_days(await asyncio.to_thread(stored.tenant_days))
                if self._days != kept:
                    days = self._days
                    await asyncio.to_thread(stored.keep_tenant_days, days)
                    kept, said = days, ""
            except Exception as exc:  # whatever SQLite or the file system raises: the next try may succeed
                if repr(exc) != said:
                    logger.warning("tenants' tokens of the day cannot be stored: %r", exc)
                said = repr(exc)
            await asyncio.sleep(_STORE_S)

    async def _share(self) -> None:
        exchanged_at = -math.inf
        self._lacking.set()  # virtual times are needed before the first requests wait
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._lacking.wait()
            for exchange, (meter, charge) in self._running.items():
                self._settle(exchange, meter, charge)
            since_s = time.monotonic() - exchanged_at
            if self._lacking.is_set() and since_s < _SOONEST_S:
                await asyncio.sleep(_SOONEST_S - since_s)
            if self._lacking.is_set() or since_s >= EXCHANGE_S - _SETTLE_S / 2:
                exchanged_at = time.monotonic()
                self._lacking.clear()
                await self._exchange_shares()
                self._exchanged.set()
                self._exchanged = asyncio.Event()
                await asyncio.sleep(0)  # requests that waited look again before the next exchange

    async def leave(self) -> None:
        """Give up all shares, when the last request has ended. What was used is reported and stored."""
        await self._exchange_shares(is_last=True)
        if self._stored is not None:
            try:
                await asyncio.to_thread(self._stored.keep_tenant_days, self._days)
            except Exception as exc:  # whatever SQLite or the file system raises: the drain goes on
                logger.warning("tenants' tokens of the day cannot be stored: %r", exc)

    def _newest(self, tenant: Tenant) -> Tenant:
        """Return the tenant of this name with the quotas of now; a request may have begun before the file changed."""
        return (None if self._tenant is None else self._tenant(tenant.name)) or tenant

    def _meter(self, tenant: Tenant) -> Meter:
        meter = self._meters.setdefault(tenant.name, Meter())
        meter.limit(tenant.quotas)
        if self._exchange is None:
            for share in meter.shares.values():
                share.allotted = share.quota
        return meter

    def _settle(self, exchange: Exchange, meter: Meter, charge: Charge) -> None:
        requests = exchange.requests
        meter.settle(charge, requests.prompt_tokens + requests.output_tokens, self._clock())

    async def _lack(self, meter: Meter, need: Need) -> Lack | None:
        """Return the quota that has no room for a request, after waiting for what other ingresses do not use."""
        until = time.monotonic() + _WAIT_S
        while (lack := meter.lack(need, self._clock())) is not None and lack.elsewhere and not self._is_silent:
            if (left_s := until - time.monotonic()) <= 0:
                break
            self._lacking.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._exchanged.wait()
        return lack

    async def _exchange_shares(self, *, is_last: bool = False) -> None:
        async with self._exchanging:
            if self._exchange is not None and not self._has_left:
                self._has_left = is_last
                await self._exchange_with(self._exchange, is_last)

    async def _exchange_with(self, exchange: ExchangeShares, is_last: bool) -> None:
        now, keep = self._clock(), self._is_silent
        for name in [name for name, meter in self._meters.items() if not keep and meter.is_idle(now)]:
            del self._meters[name]
        held = {(tenant, quota): part for tenant, meter in self._meters.items() for quota, part in meter.hold(now, keep=keep)}
        self._number += 1
        waits: Waits = {} if self._orders is None else self._orders.report()
        try:
            answer = await exchange(Report(self._ingress_id, self._number, held, self._days, is_last, waits, self._last_answered))
        except LeaseBoardSilent as exc:
            if not self._is_silent:
                logger.warning("quotas of tenants stay divided as they are: %s", exc)
            self._is_silent = True
            self._num_unanswered += 1
            if self._num_unanswered == _FORGET_WAITS:
                self._learn({model: {} for model in waits})
            return
        self._is_silent, self._num_unanswered = False, 0
        if answer is None:
            return
        self._last_answered = self._number
        if self._orders is not None:
            self._orders.answered(waits)
        self._learn_days(answer.days)
        self._learn(answer.waits)
        for (tenant, quota), granted in answer.granted.items():
            if (meter := self._meters.get(tenant)) is not None and meter.grant(quota, granted):
                self._lacking.set()  # another ingress lacks what is unused here: it is given up at once

    def _learn_days(self, days: Days) -> None:
        """Take in tokens of the day. A day ahead of the next one is of a clock that was wrong, and would hide all days until then."""
        tomorrow = math.floor(self._clock() / DAY_S) + 1
        self._days = later(self._days, {tenant: known for tenant, known in days.items() if known[0] <= tomorrow})

    def _learn(self, elsewhere: Waits) -> None:
        """Take in what waits elsewhere. Whatever another ingress has reported, the exchange of shares goes on."""
        if self._orders is not None:
            try:
                self._orders.learn(elsewhere)
            except Exception:  # of a report in another form
                logger.exception("what waits at other ingresses could not be read")

    def _exceeded(self, tenant: Tenant, meter: Meter, lack: Lack, *, has_answer: bool = False) -> QuotaExceeded:
        headers = self._headers(meter)
        return QuotaExceeded(
            tenant.name, lack.quota, lack.limit, lack.used, lack.wanted, lack.retry_after_s, headers, has_answer=has_answer
        )

    def _headers(self, meter: Meter) -> dict[str, str]:
        """Return what OpenAI's clients read: the quotas of a minute, what is left of them, and when all of it is left."""
        headers, now = dict[str, str](), self._clock()
        for quota, name in _NAMES.items():
            if quota in meter.shares:
                limit, left, reset_s = meter.left(quota, now)
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(left)
                headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(reset_s)}s"
        return headers


def _ended(exchange: Exchange) -> ServingError | None:
    """Return the error for an engine request of an HTTP request that has ended: vLLM may leave a task behind for which no client waits."""
    if exchange.error is not None or exchange.is_over:
        return exchange.error or BadRequest("body", "is of a request that has ended")
    return None


def _too_large(need: Need, whose: str, quota: tuple[Quota, int]) -> BadRequest:
    """Return the error of a request that alone exceeds a quota, so that no waiting helps."""
    if quota[0] == "requests_per_minute":
        return BadRequest("prompt", f"is a list of {need.prompts} prompts, and {whose}; divide it")
    if need.prompt_tokens > quota[1]:
        of_list = f" in a list of {need.prompts}" if need.prompts > 1 else ""
        return BadRequest("prompt", f"has {need.prompt_tokens} tokens{of_list}, and {whose}; shorten it")
    problem = f"{need.answers} answers or beams need at least {need.alone} tokens with their prompts, and {whose}"
    return BadRequest("max_tokens", f"{problem}; ask for fewer or shorter answers")
