"""Three ingresses share quotas over a network that delays and loses, while ingresses and the board end and start again."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    tokens: int = PROMPT


@dataclass(eq=False)
class Ingress:
    name: str
    rate: float
    """Requests a second that clients send here."""
    meter: Meter = field(default_factory=Meter)
    running: list[Running] = field(default_factory=list)
    number: int = 0
    exchange_at: float = 0.0
    days: Days = field(default_factory=dict)
    reported_at: float = 0.0
    refused: int = 0

    def report(self, now: float) -> Report:
        self.number, self.exchange_at = self.number + 1, now + TIMEOUT_S
        held = {(TENANT, quota): part for quota, part in self.meter.hold(now)}
        return Report(self.name, self.number, held, self.days)

    def take(self, answer: Answer) -> None:
        self.days = later(self.days, answer.days)
        for (_, quota), granted in answer.granted.items():
            self.meter.grant(quota, granted)


class Fleet:
    """Ingresses that admit as much as they may, and a board. ``spent`` is what really ran: time, ingress, quota, amount."""

    def __init__(
        self, quotas: dict[Quota, int], rates: list[float], *, seed: int, lost: float = 0.0, delay_s: float = 0.02
    ) -> None:
        self.quotas, self.random, self.lost, self.delay_s = quotas, random.Random(seed), lost, delay_s
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
            if self.random.random() < 0.3 or running.tokens == PROMPT + ANSWER:
                ingress.meter.settle(running.charge, running.tokens, self.now)
            if running.tokens == PROMPT + ANSWER:
                ingress.meter.end(running.charge, ran=True, answer_tokens=ANSWER)
                ingress.running.remove(running)
        while self.random.random() < ingress.rate * STEP_S / (1 + ingress.rate * STEP_S):
            need = ingress.meter.need([Prompt(PROMPT, 1, ANSWER)])
            if (lack := ingress.meter.lack(need, self.now)) is not None:
                ingress.refused += 1
                if lack.elsewhere:
                    ingress.exchange_at = min(ingress.exchange_at, ingress.reported_at + 0.2)
                continue
            charge = ingress.meter.admit(need, self.now)
            ingress.meter.settle(charge, PROMPT, self.now)
            ingress.running.append(Running(charge))
            self._spend(ingress, "requests_per_minute", 1)
            self._spend(ingress, "tokens_per_minute", PROMPT)

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


@pytest.mark.parametrize("seed", range(10))
def test_the_quota_holds_over_a_network_that_delays_and_loses(seed: int) -> None:
    quotas: dict[Quota, int] = {"requests_per_minute": 300, "tokens_per_minute": 24_000, "max_concurrent": 20}
    fleet = Fleet(quotas, [8, 4, 2], seed=seed, lost=0.3, delay_s=0.7)
    for _ in range(12):
        fleet.run(fleet.random.uniform(5, 25))
        match fleet.random.randrange(3):
            case 0:
                fleet.board = QuotaShares(SILENCE_S, fleet.now)
            case 1:
                fleet.random.shuffle(fleet.ingresses)
                fleet.ingresses[0].rate, fleet.ingresses[1].rate = 0.1, 12
    for quota in ("requests_per_minute", "tokens_per_minute"):
        assert max(fleet.in_minutes(quota)) <= quotas[quota]
    assert fleet.most_at_once <= 20


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
    assert 0.97 * 50_000 <= total <= 50_000 * 1.03, "what killed ingresses spent after their last report is not known"


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
