"""Quotas limit what a tenant takes in a time: requests and tokens a minute, tokens a day, requests at once. Pure.

Each ingress may admit up to its *share* of a quota, and the shares of all ingresses together are at most the quota (`quota_shares.py`).
An HTTP request sets tokens aside at its admission: all its prompts, which are known, and for each answer as many tokens as nine of ten
answers of the tenant had. The tokens that come take the place of those set aside; what is left at the end is given back. Tokens beyond
those set aside count when they come. So that a tenant cannot lower the estimate by short answers and then ask for many long ones at once,
half of what running requests may still make within a minute counts (`Need.most`), beside a quarter of what is spent: a quota is exceeded
2.5 times at most, and answers of usual length get all of it.

Times are seconds since 1970 that never go back: a day is a day of UTC.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.quota_shares import DAY_S, MINUTE_S, Granted, Holding
from serve_app.core.tenants import Quota

SLOT_S = 0.25
"""Amounts within one slot leave the last minute together, when the last of them may leave: up to this much too late."""
FIRST_ANSWER_TOKENS = 1000
"""The most tokens that are set aside for an answer before `_MIN_ANSWERS` answers of the tenant have ended, and the most of an answer that
count in `Need.most`: requests without ``max_tokens`` may have whole contexts as answers."""
_MIN_ANSWERS, _MAX_ANSWERS = 20, 200
_MIN_TIMED_TOKENS = 2
"""Answers with fewer tokens do not show how fast an answer comes."""
_SOON_S = 1.0
"""Retry-After where the time is not known: when a running request ends, or when another ingress gives room away."""
_IDLE_S = 600.0
"""A tenant that used nothing for so long is forgotten. Its next request waits for an exchange of shares, some milliseconds."""


class LastMinute:
    """Amounts of the last minute, in slots."""

    def __init__(self) -> None:
        self.total = 0
        self._slots: deque[list[int]] = deque()  # [slot, amount], in order of time

    def add(self, amount: int, now: float) -> None:
        self.forget_old(now)
        slot = math.floor(now / SLOT_S)
        if self._slots and self._slots[-1][0] >= slot:
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])
        self.total += amount

    def take_back(self, amount: int, at: float) -> None:
        """Take an amount out again that was added at that time, unless it has left the last minute."""
        for each in reversed(self._slots):
            if each[0] <= math.floor(at / SLOT_S):
                each[1] -= amount
                self.total -= amount
                return

    def forget_old(self, now: float) -> None:
        while self._slots and now >= (self._slots[0][0] + 1) * SLOT_S + MINUTE_S:
            self.total -= self._slots.popleft()[1]

    def frees_in_s(self, amount: int, now: float) -> float:
        """Return the seconds until ``amount`` of the total has left the last minute; infinity if the total is less."""
        for slot, part in self._slots:
            amount -= part
            if amount <= 0:
                return max(0.0, (slot + 1) * SLOT_S + MINUTE_S - now)
        return math.inf


@dataclass(slots=True)
class Share:
    """What this ingress may take of one quota, and what it needs."""

    quota: int
    allotted: int = 0
    """The most that this ingress may have in use."""
    used_elsewhere: int = 0
    """What the other ingresses had in use when the shares were last exchanged."""
    num_ingresses: int = 1
    is_scarce: bool = False
    """Whether another ingress got less than it wanted."""
    taken: int = 0
    """What requests took since the last exchange."""
    needed: int = 0
    """What refused and waiting requests lacked since the last exchange, all together."""
    smallest: int = 0
    """The least that one of these requests lacked."""

    def lacks(self, amount: int) -> None:
        """Note that a request lacked ``amount``, >= 1, of this share."""
        self.needed += amount
        self.smallest = min(self.smallest or amount, amount)

    def exchange(self, in_use: int, spent: int, day: int, *, keep: bool) -> Holding:
        """Give up what is hardly needed before the next exchange, unless ``keep``, and return what is held and wanted.

        Where nobody lacks anything, each of n ingresses keeps an n-th of half the quota free, so that a first burst need not wait, and
        twice what it took since the last exchange. Where another lacks something, it keeps 0.9 times what it took.
        """
        spare = self.taken * 9 // 10 if self.is_scarce else max(2 * self.taken, self.quota // (2 * self.num_ingresses))
        if self.num_ingresses == 1:
            spare = self.quota
        before = self.allotted
        if not keep and (self.is_scarce or not self.needed):  # else it is kept until there is enough for the request that waits
            self.allotted = min(self.allotted, in_use + spare)
        given_up = before - self.allotted
        needed, smallest = (self.needed + given_up, self.smallest + given_up) if self.needed else (0, 0)
        wanted = max(needed, in_use + spare - self.allotted)
        wanted = max(0, min(wanted, self.quota - self.allotted))
        held = Holding(self.quota, self.allotted, in_use, wanted, needed, smallest, spent, day)
        self.taken = self.needed = self.smallest = 0
        return held


class Prompt(NamedTuple):
    """One prompt of an HTTP request, and the answers that the request asks for."""

    tokens: int
    answers: int = 1
    """0 for a text to embed, classify or rank."""
    max_tokens: int = 0
    """The most tokens of each answer."""
    is_beam_search: bool = False
    """Whether ``answers`` is the width of a beam search, which uses all ``max_tokens`` unless it ends early."""


class Need(NamedTuple):
    """What an HTTP request needs of its tenant's quotas."""

    requests: int = 0
    """Its prompts with answers; 1 for a list of texts to embed, classify or rank."""
    usual: int = 0
    """Tokens of its prompts, and of answers of usual length."""
    most: int = 0
    """Tokens of its prompts, and of answers as long as they may be within a minute. Of an answer, at most `FIRST_ANSWER_TOKENS` count; of a
    beam, all."""
    sure: int = 0
    """Tokens of its prompts and of beam searches."""
    prompt_tokens: int = 0
    prompts: int = 0
    answers: int = 0

    @property
    def alone(self) -> int:
        """Tokens that the request needs whatever answers are usual. A single answer is left out: it may be short."""
        return self.prompt_tokens if self.answers <= 1 else max(self.sure, _half(self.most))


SMALLEST = Need(requests=1, usual=1, most=1)
_NOTHING = Need()


def _half(amount: int) -> int:
    return (amount + 1) // 2


class Lack(NamedTuple):
    """The quota that a request exceeds."""

    quota: Quota
    limit: int
    used: int
    """What all ingresses together have in use."""
    wanted: int
    retry_after_s: float
    """Seconds after which there may be room."""
    elsewhere: bool
    """Whether other ingresses hold enough that is not in use, so that the next exchange may bring it here."""


@dataclass(slots=True, eq=False)
class Charge:
    """What one running HTTP request has taken of its tenant's quotas."""

    admitted_at: float
    requests: int = 0
    prompts: int = 0
    """How many of its prompts are charged."""
    usual: int = 0
    most: int = 0
    """Both as in `Need`."""
    spent: int = 0
    """Tokens of its prompts and answers so far."""


@dataclass(slots=True)
class Meter:
    """The quotas of one tenant at one ingress."""

    shares: dict[Quota, Share] = field(default_factory=dict)
    charges: set[Charge] = field(default_factory=set)
    """Of the requests that run."""
    _requests: LastMinute = field(default_factory=LastMinute)
    _tokens: LastMinute = field(default_factory=LastMinute)
    _day: int = 0
    _tokens_of_day: int = 0
    _set_aside: int = 0
    """Tokens that running requests have not spent yet of their ``usual``."""
    _may_come: int = 0
    """The same of their ``most``."""
    _spent: dict[Quota, int] = field(default_factory=dict)
    """Of quotas of a minute: all that was taken so far."""
    _answers: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_ANSWERS))
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_ANSWERS))
    """Tokens per second of the last answers."""
    _usual: int | None = None
    _longest: int | None = None
    _used_at: float = -math.inf

    def limit(self, quotas: Mapping[Quota, int]) -> None:
        """Follow the quotas of the tenants file. A share begins empty; where a quota shrinks, so does the share."""
        for name in [name for name in self.shares if name not in quotas]:
            del self.shares[name]
        for name, quota in quotas.items():
            share = self.shares.setdefault(name, Share(quota))
            share.quota, share.allotted = quota, min(share.allotted, quota)

    def in_use(self, quota: Quota, now: float) -> int:
        return self._with(_NOTHING, quota, now)

    def _with(self, need: Need, quota: Quota, now: float) -> int:
        """Return what would be in use of a quota if a request with this need ran, too."""
        match quota:
            case "requests_per_minute":
                self._requests.forget_old(now)
                return self._requests.total + need.requests
            case "tokens_per_minute":
                self._tokens.forget_old(now)
                return self._tokens_with(need, self._tokens.total)
            case "tokens_per_day":
                self._begin_day(now)
                return self._tokens_with(need, self._tokens_of_day)
            case "max_concurrent":
                return len(self.charges) + min(1, need.requests)

    def _tokens_with(self, need: Need, spent: int) -> int:
        return max(spent + self._set_aside + need.usual, spent // 4 + _half(self._may_come + need.most))

    def need(self, prompts: Sequence[Prompt]) -> Need:
        """Return what a request with these prompts needs, by the lengths and rates of the tenant's last answers."""
        if self._usual is None or self._longest is None:
            self._usual = self._longest = FIRST_ANSWER_TOKENS
            if len(self._answers) >= _MIN_ANSWERS:
                self._usual = sorted(self._answers)[len(self._answers) * 9 // 10]
            if len(self._rates) >= _MIN_ANSWERS:
                self._longest = min(FIRST_ANSWER_TOKENS, math.ceil(statistics.median(self._rates) * MINUTE_S))
        usual = most = sure = prompt_tokens = sum(each.tokens for each in prompts)
        for each in prompts:
            usual += each.answers * (each.max_tokens if each.is_beam_search else min(each.max_tokens, self._usual))
            most += each.answers * (each.max_tokens if each.is_beam_search else min(each.max_tokens, self._longest))
            sure += each.answers * each.max_tokens if each.is_beam_search else 0
        requests = max(1, sum(each.answers > 0 for each in prompts))
        return Need(requests, usual, most, sure, prompt_tokens, len(prompts), sum(each.answers for each in prompts))

    def lack(self, need: Need, now: float, *, note: bool = True) -> Lack | None:
        """Return the quota that a request exceeds, of several the one with the longest wait; None if it may run.

        ``note``: whether the shares note what it lacks, so that the next exchange asks for that.
        """
        found = list[Lack]()
        for name, share in self.shares.items():
            used = self.in_use(name, now)
            wanted = min(self._with(need, name, now) - used, share.quota)  # a single long answer may take the whole quota
            if (short := used + wanted - share.allotted) <= 0:
                continue
            if note:
                share.lacks(short)
            everywhere = used + share.used_elsewhere
            elsewhere = everywhere + wanted <= share.quota
            wait_s = _SOON_S if elsewhere else self._wait_s(name, min(short, everywhere + wanted - share.quota), now)
            found.append(Lack(name, share.quota, everywhere, wanted, wait_s, elsewhere))
        return max(found, key=lambda lack: (not lack.elsewhere, lack.retry_after_s), default=None)

    def admit(self, need: Need, now: float) -> Charge:
        """Begin a request: it counts from now on, and its tokens are set aside."""
        charge = Charge(now)
        self.charges.add(charge)
        if (share := self.shares.get("max_concurrent")) is not None:
            share.taken += 1
        self.admit_more(charge, need, now)
        return charge

    def admit_more(self, charge: Charge, need: Need, now: float) -> None:
        """Charge what a running request needs beside what it was admitted for. It is never refused: it counts against later requests."""
        if charge not in self.charges:
            return
        self._used_at = now
        charge.requests += need.requests
        charge.prompts += need.prompts
        self._change(charge, usual=need.usual, most=need.most)
        self._requests.add(need.requests, now)
        self._note("requests_per_minute", need.requests)
        for name, share in self.shares.items():
            if name != "max_concurrent":
                share.taken += need.requests if name == "requests_per_minute" else need.usual

    def settle(self, charge: Charge, tokens: int, now: float) -> None:
        """Count the tokens of an admitted request's prompts and answers so far; fewer than last time count as none."""
        if charge not in self.charges or (new := tokens - charge.spent) <= 0:
            return
        self._change(charge, spent=new)
        self._begin_day(now)
        self._tokens.add(new, now)
        self._tokens_of_day += new
        self._note("tokens_per_minute", new)

    def _change(self, charge: Charge, *, usual: int = 0, most: int = 0, spent: int = 0) -> None:
        """Add to a charge, and keep the sums over all charges right."""
        self._set_aside -= max(0, charge.usual - charge.spent)
        self._may_come -= max(0, charge.most - charge.spent)
        charge.usual, charge.most, charge.spent = charge.usual + usual, charge.most + most, charge.spent + spent
        self._set_aside += max(0, charge.usual - charge.spent)
        self._may_come += max(0, charge.most - charge.spent)

    def end(self, charge: Charge, *, ran: bool, answer_tokens: int = 0, answer_s: float = 0.0) -> None:
        """Give back what an ended request, settled before, did not need.

        Args:
            ran: Whether the fleet took it. Else it does not count as a request.
            answer_tokens: Tokens of one answer, from which later requests are estimated; 0 for a request that shows nothing.
            answer_s: Seconds from the first to the last of these tokens; 0 where they are not known.
        """
        if charge not in self.charges:
            return
        self.charges.remove(charge)
        self._change(charge, usual=-charge.usual, most=-charge.most)
        if not ran:
            self._requests.take_back(charge.requests, charge.admitted_at)
        if answer_tokens:
            self._answers.append(answer_tokens)
            self._usual = None
        if answer_tokens >= _MIN_TIMED_TOKENS and answer_s > 0:
            self._rates.append((answer_tokens - 1) / answer_s)

    def hold(self, now: float, *, keep: bool = False) -> Iterator[tuple[Quota, Holding]]:
        """Begin an exchange of shares: give up what is hardly needed, and yield what this ingress holds of each quota and wants.

        ``keep``: give up nothing, because the board did not answer last time, and nobody would give it back.
        """
        for name, share in self.shares.items():
            in_use, spent = self.in_use(name, now), self._spent.get(name, 0)
            spent = self._tokens_of_day if name == "tokens_per_day" else spent
            yield name, share.exchange(in_use, spent, self._day, keep=keep)

    def grant(self, quota: Quota, granted: Granted) -> bool:
        """Take in the board's answer to the last `hold`. Return whether the quota has become scarce: then `hold` should follow at once."""
        if (share := self.shares.get(quota)) is None:
            return False
        was_scarce = share.is_scarce
        share.allotted = min(granted.allotted, share.quota)
        share.used_elsewhere, share.num_ingresses = granted.used_elsewhere, granted.num_ingresses
        share.is_scarce = granted.is_scarce
        return share.is_scarce and not was_scarce

    def left(self, quota: Quota, now: float) -> tuple[int, int, float]:
        """Return a quota of this meter, what is left of it, and the seconds until all of it is."""
        share, in_use = self.shares[quota], self.in_use(quota, now)
        left = max(0, share.quota - in_use - share.used_elsewhere)
        return share.quota, left, self._wait_s(quota, in_use, now) if in_use else 0.0

    def is_idle(self, now: float) -> bool:
        """Return whether nothing was in use for a time: the meter can be forgotten."""
        is_free = not any(self.in_use(name, now) or share.needed for name, share in self.shares.items())
        return is_free and not self.charges and now - self._used_at > _IDLE_S

    def never_fits(self, need: Need) -> tuple[Quota, int] | None:
        """Return the quota that a request alone exceeds, and its size; None if it fits in all."""
        needed: Mapping[Quota, int] = {"requests_per_minute": need.requests, "max_concurrent": 1}
        for name, share in self.shares.items():
            if needed.get(name, need.alone) > share.quota:
                return name, share.quota
        return None

    def _wait_s(self, quota: Quota, amount: int, now: float) -> float:
        """Return the seconds until ``amount`` that is in use is free, as far as it is known."""
        match quota:
            case "requests_per_minute":
                wait_s = self._requests.frees_in_s(amount, now)
            case "tokens_per_minute":
                wait_s = self._tokens.frees_in_s(amount, now)
            case "tokens_per_day":
                return (math.floor(now / DAY_S) + 1) * DAY_S - now
            case "max_concurrent":
                return _SOON_S
        return wait_s if wait_s < math.inf else MINUTE_S

    def _begin_day(self, now: float) -> None:
        if (day := math.floor(now / DAY_S)) != self._day:
            self._day, self._tokens_of_day = day, 0

    def _note(self, quota: Quota, amount: int) -> None:
        if quota in self.shares:
            self._spent[quota] = self._spent.get(quota, 0) + amount
