"""Three ingresses share quotas over a network that delays and loses, while ingresses and the board end and start again."""

import random
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import pytest

from serve_app.core.quota_shares import Answer, Days, Holding, Name, QuotaShares, Report, later
from serve_app.core.quotas import Charge, Meter, Prompt
from serve_app.core.tenants import Quota

TENANT, STEP_S, SILENCE_S, TIMEOUT_S = "team", 0.05, 6.0, 1.0
BEGIN = 20_000 * 86_400.0 + 3600.0
PROMPT, ANSWER = 40, 60


@dataclass(eq=False)
class Running:
    charge: Charge
    answer: int
    """Tokens after which the answer ends by itself."""
    tokens: int = PROMPT


@dataclass(eq=False)
class Ingress:
    name: str
    rate: float
    """Requests a second that clients send here."""
    meter: Meter = field(default_factory=Meter)
    running: list[Running] = field(default_factory=list)
    number: int = 0
    answered: int = 0
    """Number of the last report whose answer came before the next report."""
    exchange_at: float = 0.0
    days: Days = field(default_factory=dict)
    reported_at: float = 0.0
    refused: int = 0

    def report(self, now: float) -> Report:
        """Report, when the last report was answered or `TIMEOUT_S` have passed, as `serve_app.ingress.fleet.quotas` does."""
        held = {(TENANT, quota): part for quota, part in self.meter.hold(now, keep=self.answered < self.number)}
        self.number, self.exchange_at = self.number + 1, now + TIMEOUT_S
        return Report(self.name, self.number, held, self.days)

    def take(self, answer: Answer) -> None:
        self.answered, self.days = self.number, later(self.days, answer.days)
        for (_, quota), granted in answer.granted.items():
            self.meter.grant(quota, granted)


class Fleet:
    """Ingresses that admit as much as they may, and a board. ``spent`` is what really ran: time, ingress, quota, amount.

    Requests ask for ``max_tokens``. Answers have `ANSWER` tokens; if ``max_tokens`` is more, so many in the mean, and each by chance.
    """

    def __init__(
        self,
        quotas: dict[Quota, int],
        rates: list[float],
        *,
        seed: int,
        lost: float = 0.0,
        delay_s: float = 0.02,
        max_tokens: int = ANSWER,
    ) -> None:
        self.quotas, self.random, self.lost, self.delay_s = quotas, random.Random(seed), lost, delay_s
        self.max_tokens = max_tokens
        self.now = BEGIN
        self.board = QuotaShares(SILENCE_S, self.now - 60)
        self.ingresses = [self.new(f"i{number}", rate) for number, rate in enumerate(rates)]
        self.flying: deque[tuple[float, Ingress, Report | None, Answer | None]] = deque()
        self.spent: list[tuple[float, str, Quota, int]] = []
        self.most_at_once = 0

    def new(self, name: str, rate: float) -> Ingress:
        ingress = Ingress(name, rate)
        ingress.meter.limit(self.quotas)
        return ingress

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            self._carry()
            for ingress in self.ingresses:
                self._serve(ingress)
                if self.now >= ingress.exchange_at:
                    ingress.reported_at = self.now
                    self._send(ingress, ingress.report(self.now), None)
            self.most_at_once = max(self.most_at_once, sum(len(ingress.running) for ingress in self.ingresses))

    def _send(self, ingress: Ingress, report: Report | None, answer: Answer | None) -> None:
        if self.random.random() >= self.lost:
            self.flying.append((self.now + self.random.uniform(0, 2 * self.delay_s), ingress, report, answer))

    def _carry(self) -> None:
        for flying in [each for each in self.flying if each[0] <= self.now]:
            self.flying.remove(flying)
            _, ingress, report, answer = flying
            if report is not None and (given := self.board.exchange(report, self.now)) is not None:
                self._send(ingress, None, given._replace(days={**given.days, "": (report.number, 0)}))
            if answer is not None and ingress in self.ingresses and answer.days[""][0] == ingress.number:
                ingress.take(answer._replace(days={k: v for k, v in answer.days.items() if k}))

    def _serve(self, ingress: Ingress) -> None:
        for running in [*ingress.running]:
            running.tokens += 1
            self._spend(ingress, "tokens_per_minute", 1)
            has_ended = running.tokens == PROMPT + running.answer
            if self.random.random() < 0.3 or has_ended:
                ingress.meter.settle(running.charge, running.tokens, self.now)
            if has_ended:
                ingress.meter.end(running.charge, ran=True, answer_tokens=running.answer)
                ingress.running.remove(running)
        while self.random.random() < ingress.rate * STEP_S / (1 + ingress.rate * STEP_S):
            need = ingress.meter.need([Prompt(PROMPT, 1, self.max_tokens)])
            if (lack := ingress.meter.lack(need, self.now)) is not None:
                ingress.refused += 1
                if lack.elsewhere and ingress.answered == ingress.number:
                    ingress.exchange_at = min(ingress.exchange_at, ingress.reported_at + 0.2)
                continue
            charge = ingress.meter.admit(need, self.now)
            ingress.meter.settle(charge, PROMPT, self.now)
            ingress.running.append(Running(charge, self._answer()))
            self._spend(ingress, "requests_per_minute", 1)
            self._spend(ingress, "tokens_per_minute", PROMPT)

    def _answer(self) -> int:
        return ANSWER if self.max_tokens == ANSWER else min(self.max_tokens, 1 + int(self.random.expovariate(1 / ANSWER)))

    def _spend(self, ingress: Ingress, quota: Quota, amount: int) -> None:
        self.spent.append((self.now, ingress.name, quota, amount))

    def in_minutes(self, quota: Quota) -> Iterator[int]:
        """Yield what ran in the minute before each moment."""
        window: deque[tuple[float, int]] = deque()
        total = 0
        for at, _, name, amount in self.spent:
            if name == quota:
                window.append((at, amount))
                total += amount
                while window[0][0] <= at - 60:
                    total -= window.popleft()[1]
                yield total

    def in_time(self, quota: Quota, begin: float, end: float) -> int:
        return sum(amount for at, _, name, amount in self.spent if name == quota and begin < at <= end)


def of_one(quotas: dict[Quota, int], quota: Quota, phases: list[tuple[float, float]]) -> int:
    """Return what one ingress admits of the demand of several: for each phase its rate and its seconds."""
    fleet = Fleet(quotas, [0], seed=0)
    fleet.run(3)
    for rate, seconds in phases:
        fleet.ingresses[0].rate = rate
        fleet.run(seconds)
    return fleet.in_time(quota, BEGIN, fleet.now)


REQUESTS: Name = (TENANT, "requests_per_minute")
MINUTE: dict[Quota, int] = {"requests_per_minute": 600, "tokens_per_minute": 10**6}
TOKENS: dict[Quota, int] = {"tokens_per_minute": 60_000}


@pytest.mark.parametrize(("quotas", "quota"), [(MINUTE, "requests_per_minute"), (TOKENS, "tokens_per_minute")])
@pytest.mark.parametrize("rates", [[10, 10, 10], [40, 0, 0], [30, 3, 0.3]])
def test_three_ingresses_admit_the_quota_and_no_more(quotas: dict[Quota, int], quota: Quota, rates: list[float]) -> None:
    fleet = Fleet(quotas, rates, seed=1)
    fleet.run(203)
    assert 0.98 * quotas[quota] <= max(fleet.in_minutes(quota)) <= quotas[quota]
    alone = of_one(quotas, quota, [(sum(rates), 200)])
    assert fleet.in_time(quota, BEGIN, fleet.now) >= 0.98 * alone


def test_a_minute_that_begins_with_a_burst_at_one_ingress_is_not_refused() -> None:
    fleet = Fleet(MINUTE, [0, 0, 0], seed=2)
    fleet.run(5)
    fleet.ingresses[1].rate = 1000
    fleet.run(3)
    assert fleet.in_time("requests_per_minute", BEGIN, fleet.now) >= 0.98 * 600
    assert max(fleet.in_minutes("requests_per_minute")) <= 600


def test_where_the_demand_moves_the_shares_follow() -> None:
    fleet = Fleet(MINUTE, [30, 0, 0], seed=3)
    fleet.run(90)
    fleet.ingresses[0].rate, fleet.ingresses[2].rate = 0, 30
    fleet.run(150)
    assert max(fleet.in_minutes("requests_per_minute")) <= 600
    alone = of_one(MINUTE, "requests_per_minute", [(30, 237)])
    assert fleet.in_time("requests_per_minute", BEGIN, fleet.now) >= 0.98 * alone


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_ingress_leaves_its_share_to_the_others(seed: int) -> None:
    fleet = Fleet(MINUTE, [10, 10, 10], seed=seed)
    fleet.run(83)
    fleet.ingresses.pop()
    fleet.run(100)
    fleet.ingresses.append(fleet.new("another", 10))
    fleet.run(100)
    most = max(fleet.in_minutes("requests_per_minute"))
    assert most <= 600 * 1.02, "what it admitted after its last report is not known"
    alone = of_one(MINUTE, "requests_per_minute", [(30, 80), (20, 100), (30, 100)])
    assert fleet.in_time("requests_per_minute", BEGIN, fleet.now) >= 0.98 * alone


LOSSY: dict[Quota, int] = {"requests_per_minute": 300, "tokens_per_minute": 24_000, "max_concurrent": 20}


Event = Literal["restart", "move", "kill"]


def disturbed(seed: int, delay_s: float, events: Collection[Event], max_tokens: int) -> Fleet:
    """Run three ingresses over a network that loses 30 % of the messages, and return the fleet. Meanwhile the board starts anew, the demand
    moves, or an ingress is killed and another one starts. The demand is always more than three times the quota of tokens."""
    fleet = Fleet(LOSSY, [8, 4, 2], seed=seed, lost=0.3, delay_s=delay_s, max_tokens=max_tokens)
    for number in range(12):
        fleet.run(fleet.random.uniform(5, 25))
        match fleet.random.randrange(3):
            case 0 if "restart" in events:
                fleet.board = QuotaShares(SILENCE_S, fleet.now)
            case 1 if "move" in events:
                fleet.random.shuffle(fleet.ingresses)
                fleet.ingresses[0].rate, fleet.ingresses[1].rate = 0.1, 12
            case 2 if "kill" in events:
                killed = fleet.ingresses.pop(fleet.random.randrange(3))
                fleet.ingresses.append(fleet.new(f"another{number}", killed.rate))
    return fleet


CASES: list[tuple[float, Collection[Event], float, float]] = [
    (0.1, [], 0.9, 1.0),
    (0.1, ["restart", "move"], 0.8, 1.0),
    (0.1, ["move", "kill"], 0.8, 1.02),
    (0.1, ["restart", "move", "kill"], 0.65, 1.25),
    (0.7, ["restart", "move", "kill"], 0.35, 1.25),
]
"""Mean delay of a message in seconds, what happens, the least part of the quota of tokens that is used, and the most in a minute: a board
that starts anew does not know what a killed ingress used in its last minute. Delays of 0.7 s leave few answers within `TIMEOUT_S`."""


@pytest.mark.parametrize("max_tokens", [ANSWER, 4 * ANSWER])
@pytest.mark.parametrize(("delay_s", "events", "least", "most"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_the_quota_is_used_and_held_over_a_network_that_delays_and_loses(
    seed: int, delay_s: float, events: Collection[Event], least: float, most: float, max_tokens: int
) -> None:
    fleet = disturbed(seed, delay_s, events, max_tokens)
    used = fleet.in_time("tokens_per_minute", BEGIN, fleet.now) / ((fleet.now - BEGIN) / 60)
    assert used >= least * LOSSY["tokens_per_minute"]
    if max_tokens > ANSWER:
        most = max(most, 1.02)  # an answer may be longer than what was set aside for it
    for quota in ("requests_per_minute", "tokens_per_minute"):
        assert max(fleet.in_minutes(quota)) <= most * LOSSY[quota]
    # Others are granted what an ingress holds whose reports are lost for `SILENCE_S`.
    assert fleet.most_at_once <= 1.1 * LOSSY["max_concurrent"]


def test_shares_stay_while_the_board_is_away() -> None:
    fleet = Fleet(MINUTE, [10, 10, 10], seed=4)
    fleet.run(70)
    fleet.lost = 1.0
    fleet.run(100)
    assert max(fleet.in_minutes("requests_per_minute")) <= 600
    assert fleet.in_time("requests_per_minute", fleet.now - 60, fleet.now) >= 0.85 * 600


def test_tokens_of_the_day_survive_all_but_the_last_ingress_and_a_new_board() -> None:
    quotas: dict[Quota, int] = {"tokens_per_day": 50_000}
    fleet = Fleet(quotas, [2, 2, 2], seed=5)
    fleet.run(20)
    fleet.ingresses = fleet.ingresses[:1]
    fleet.run(10)
    fleet.board = QuotaShares(SILENCE_S, fleet.now)
    fleet.run(20)
    fleet.ingresses.append(fleet.new("late", 20))
    fleet.run(200)
    total = fleet.in_time("tokens_per_minute", BEGIN, fleet.now)
    assert 0.97 * 50_000 <= total <= 50_000 * 1.04, "what killed ingresses spent after their last report is not known"


def asked_by(meter: Meter, name: str, number: int, now: float, days: Days | None = None) -> Report:
    return Report(name, number, {(TENANT, quota): held for quota, held in meter.hold(now)}, days or {})


def take(meter: Meter, answer: Answer | None) -> None:
    assert answer is not None
    for (_, quota), granted in answer.granted.items():
        meter.grant(quota, granted)


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("quota", ["tokens_per_minute", "tokens_per_day"])
@pytest.mark.parametrize("tokens", [10, 150, 240, 260, 500, 501, 750, 999, 1000])
def test_a_request_that_fits_in_what_is_free_is_admitted_however_it_is_shared(num: int, quota: Quota, tokens: int) -> None:
    board, meters = QuotaShares(SILENCE_S, BEGIN - 60), [Meter() for _ in range(num)]
    for meter in meters:
        meter.limit({quota: 1000})
    for step in range(1, 12):
        now = BEGIN + step
        if step > 4 and meters[0].lack(meters[0].need([Prompt(tokens)]), now) is None:
            return
        for number, meter in enumerate(meters):
            take(meter, board.exchange(asked_by(meter, f"i{number}", step, now), now))
    raise AssertionError(f"{tokens} of 1000 never fit: {[meter.shares[quota].allotted for meter in meters]}")


def spend(meter: Meter, tokens: int, now: float) -> None:
    charge = meter.admit(meter.need([Prompt(tokens)]), now)
    meter.settle(charge, tokens, now)
    meter.end(charge, ran=True)


def test_tokens_of_yesterday_do_not_count_today() -> None:
    midnight = 20_001 * 86_400.0
    board, meter = QuotaShares(SILENCE_S, midnight - 60), Meter()
    meter.limit({"tokens_per_day": 1000})
    take(meter, board.exchange(asked_by(meter, "a", 1, midnight - 2), midnight - 2))
    spend(meter, 800, midnight - 1)
    late = board.exchange(asked_by(meter, "a", 2, midnight - 0.001), midnight + 0.001)
    assert late is not None
    assert late.days == {TENANT: (20_001, 0)}
    answer = board.exchange(asked_by(meter, "a", 3, midnight + 1, late.days), midnight + 1)
    assert answer is not None
    assert answer.days == {TENANT: (20_001, 0)}


def test_a_quota_of_a_day_that_is_taken_away_and_given_again_counts_once() -> None:
    board, meter = QuotaShares(SILENCE_S, BEGIN - 60), Meter()
    for step in range(1, 7):
        meter.limit({"tokens_per_day": 1000, "max_concurrent": 5} if step % 2 else {"max_concurrent": 5})
        spend(meter, 10, BEGIN + step)
        answer = board.exchange(asked_by(meter, "a", step, BEGIN + step), BEGIN + step)
        take(meter, answer)
    assert board.days()[TENANT][1] in (50, 60)
    again = Meter()
    again.limit({"tokens_per_day": 1000})
    board.exchange(asked_by(again, "a", 7, BEGIN + 7), BEGIN + 7)
    assert board.days()[TENANT][1] in (50, 60), "the ingress has forgotten what it used, and the board has not"


def test_what_a_silent_ingress_used_counts_once_when_a_new_board_hears_it_again() -> None:
    board, one, two = QuotaShares(SILENCE_S, BEGIN - 60), Meter(), Meter()
    for meter in (one, two):
        meter.limit({"tokens_per_day": 10_000})
        spend(meter, 1000, BEGIN)
    board.exchange(asked_by(one, "one", 1, BEGIN + 1), BEGIN + 1)
    answer = board.exchange(asked_by(two, "two", 1, BEGIN + 1), BEGIN + 1)
    assert answer is not None
    days = answer.days
    assert days[TENANT][1] == 2000
    board = QuotaShares(SILENCE_S, BEGIN + 10)
    for second in range(2, 12):
        answer = board.exchange(asked_by(two, "two", second, BEGIN + 10 + second, days), BEGIN + 10 + second)
        assert answer is not None
        days = later(days, answer.days)
    assert board.days()[TENANT][1] == 2000, "what the silent one used is known by the other"
    board.exchange(asked_by(one, "one", 2, BEGIN + 23), BEGIN + 23)
    assert board.days()[TENANT][1] == 2000
    spend(one, 5, BEGIN + 24)
    board.exchange(asked_by(one, "one", 3, BEGIN + 24), BEGIN + 24)
    assert board.days()[TENANT][1] == 2005


def holding(quota: int, allotted: int, in_use: int, wanted: int, spent: int = 0, needed: int = 0) -> Holding:
    return Holding(quota, allotted, in_use, wanted, needed, needed, spent)


def test_a_report_that_comes_late_changes_nothing() -> None:
    board, name = QuotaShares(SILENCE_S, 0.0), REQUESTS
    first = Report("a", 1, {name: holding(10, 0, 0, 5)}, {})
    second = Report("a", 2, {name: holding(10, 0, 0, 7)}, {})
    answer = board.exchange(second, 10.0)
    assert answer is not None
    assert answer.granted[name].allotted == 7
    assert board.exchange(first, 10.1) is None
    other = board.exchange(Report("b", 1, {name: holding(10, 0, 0, 10)}, {}), 10.2)
    assert other is not None
    assert other.granted[name] == (3, 0, 2, False)


def test_an_ingress_that_stops_gives_back_at_once_what_it_does_not_use() -> None:
    board, name = QuotaShares(SILENCE_S, 0.0), REQUESTS
    board.exchange(Report("a", 1, {name: holding(10, 0, 0, 10)}, {}), 10.0)
    board.exchange(Report("a", 2, {name: holding(10, 4, 4, 0, spent=4)}, {}, is_last=True), 11.0)
    answer = board.exchange(Report("b", 1, {name: holding(10, 0, 0, 10)}, {}), 11.1)
    assert answer is not None
    assert answer.granted[name] == (6, 4, 1, False)
    answer = board.exchange(Report("b", 2, {name: holding(10, 6, 0, 4)}, {}), 72.0)
    assert answer is not None
    assert answer.granted[name] == (10, 0, 1, False)
    assert board._heard.keys() == {"b"}
