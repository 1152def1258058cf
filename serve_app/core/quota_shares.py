"""`QuotaShares` divides tenants' quotas among the ingresses: the lease board's part of `quotas.py`. Pure.

Only an ingress lowers its own share, and only the board raises one. So the shares of all ingresses are never more than the quota,
however late a message comes or whichever is lost: the board may believe that an ingress holds more than it does, never less.

What the board cannot know are the last seconds of an ingress that it does not hear any more. After ``silence_s`` it counts of this
ingress only what it was seen to spend. If the ingress was killed, that lacks what it spent after its last report. If it lives without a
way to the board, it keeps its last share, and the quota can be exceeded by this share until it is heard again.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.order_board import NO_WAITS, Waits
from serve_app.core.tenants import Quota

MINUTE_S, DAY_S = 60.0, 86_400.0
Name = tuple[str, Quota]
"""A tenant's quota."""


class Holding(NamedTuple):
    """What an ingress reports of one quota."""

    quota: int
    allotted: int
    in_use: int
    """At most ``allotted``, but for tokens that came beyond those set aside."""
    wanted: int
    """What it wants in addition to ``allotted``."""
    needed: int
    """What requests lacked since its last report."""
    smallest: int
    """The least that one of them lacked."""
    spent: int
    """What it has taken in all, so that a lost report does no harm: of quotas of a minute since it began to count, of others on ``day``."""
    day: int = 0
    """The day of the report, counted from 1970."""


Days = Mapping[str, tuple[int, int]]
"""For a tenant with `tokens_per_day`: the day, counted from 1970, and its tokens at all ingresses."""


def later(one: Days, other: Days) -> Days:
    """Return for each tenant the later state: a board that was started again has to hear first what there was."""
    return {tenant: max(one.get(tenant, (0, 0)), other.get(tenant, (0, 0))) for tenant in one.keys() | other.keys()}


class Granted(NamedTuple):
    """The board's answer for one quota."""

    allotted: int
    used_elsewhere: int
    """What the other ingresses had in use."""
    num_ingresses: int
    is_scarce: bool
    """Whether another ingress got less than it wanted."""


class Report(NamedTuple):
    """What an ingress sends to the board. ``number`` grows by each report: an older one that comes late is ignored."""

    ingress: str
    number: int
    held: Mapping[Name, Holding]
    days: Days
    """The latest days that the board has sent. A board that was started again learns from them what earlier ingresses used."""
    is_last: bool = False
    """Whether the ingress has stopped."""
    waits: Waits = NO_WAITS
    """What waits at the ingress and what it has charged since the report ``last_answered``, for `OrderBoard`."""
    last_answered: int = 0
    """The number of the latest report whose answer the ingress has received."""


class Answer(NamedTuple):
    """The board's answer to a report."""

    granted: dict[Name, Granted]
    days: Days
    waits: Waits = NO_WAITS
    """What waits at all other ingresses, and what they have charged."""


@dataclass(slots=True)
class _Member:
    """One ingress at one quota."""

    last: Holding
    lacking: int = 0
    """What its requests lacked at its last report and it was not granted."""
    spends: deque[tuple[float, int]] = field(default_factory=deque)
    """When it reported to have taken how much, in the last minute."""
    spent: int = 0
    spent_of_day: int = 0

    def count(self, spent: int, now: float) -> None:
        """Take in what it has taken so far; less than before if it has begun to count again."""
        if new := spent - self.spent if spent >= self.spent else spent:
            self.spends.append((now, new))
        self.spent = spent

    def seen_spent(self, now: float) -> int:
        """Return what it reported to have taken and has not given back by the time alone."""
        while self.spends and now - self.spends[0][0] >= MINUTE_S:
            self.spends.popleft()
        return sum(amount for _, amount in self.spends) + self.spent_of_day


@dataclass(slots=True, eq=False)
class _Account:
    """One quota of one tenant."""

    members: dict[str, _Member] = field(default_factory=dict)
    before: int = 0
    """Tokens of the day of ingresses that are gone."""
    restored: int = 0
    """Tokens of the day from before a restart of the board that no member has reported since."""

    @property
    def gone(self) -> int:
        return self.before + self.restored


class QuotaShares:
    """The shares of all ingresses.

    Args:
        silence_s: After this time without a report an ingress counts as gone. For this long after its own start, the board grants nothing:
            it has to hear first what the ingresses hold.
        now: The time of the start. All times are seconds since 1970 that never go back.
    """

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s, self._began_at = silence_s, now
        self._heard: dict[str, tuple[int, float]] = {}
        self._accounts: dict[Name, _Account] = {}
        self._day = 0

    def exchange(self, report: Report, now: float) -> Answer | None:
        """Take in what an ingress holds and return its new shares; None for a report that is older than the last one."""
        known = self._heard.get(report.ingress)
        if known is not None and report.number <= known[0]:
            return None
        self._heard[report.ingress] = report.number, now
        self._begin_day(math.floor(now / DAY_S))
        self._forget_gone(now)
        for name, account in self._accounts.items():
            if name not in report.held and (member := account.members.get(report.ingress)) is not None:
                member.last, member.lacking = Holding(0, member.spent_of_day, member.spent_of_day, 0, 0, 0, 0), 0
                if not member.spent_of_day:
                    del account.members[report.ingress]
        granted = {name: self._grant(name, report, held, now) for name, held in report.held.items()}
        for name in [name for name, account in self._accounts.items() if not account.members and not account.gone]:
            del self._accounts[name]
        if report.is_last:
            self._heard[report.ingress] = report.number, -math.inf  # as if it had been silent for long
        return Answer(granted, self.days())

    def days(self) -> dict[str, tuple[int, int]]:
        return {
            tenant: (self._day, account.gone + sum(member.spent_of_day for member in account.members.values()))
            for (tenant, quota), account in self._accounts.items()
            if quota == "tokens_per_day"
        }

    def _grant(self, name: Name, report: Report, held: Holding, now: float) -> Granted:
        account = self._accounts.setdefault(name, _Account())
        is_new = report.ingress not in account.members
        member = account.members.setdefault(report.ingress, _Member(held))
        member.last = held
        if name[1].endswith("_per_minute"):
            if is_new:  # what it has spent and does not use any more was in an earlier minute
                member.spent = held.spent - min(held.spent, held.in_use)
            member.count(held.spent, now)
        if name[1] == "tokens_per_day":
            self._count_day(account, member, report.days.get(name[0]), held, now, is_new=is_new)
        others = [(i, other) for i, other in account.members.items() if i != report.ingress]
        held_elsewhere = account.gone + sum(self._held_by(i, other, now) for i, other in others)
        used_elsewhere = account.gone + sum(min(self._held_by(i, other, now), other.last.in_use) for i, other in others)
        free = held.quota - held.allotted - held_elsewhere
        lacking = sum(0 if self._is_silent(i, now) else other.lacking for i, other in others)
        granted = 0
        if free > 0 and held.wanted and now - self._began_at >= self._silence_s:
            part = free * held.wanted // (held.wanted + lacking)
            granted = min(held.wanted, max(part, min(held.smallest, free)))
        member.lacking = max(0, held.needed - granted)
        member.last = held._replace(allotted=held.allotted + granted)
        allotted = held.allotted + granted if free >= 0 else max(held.in_use, held.allotted + free)
        num_ingresses = sum(not self._is_silent(i, now) for i in self._heard)
        return Granted(allotted, used_elsewhere, num_ingresses, lacking > 0)

    def _count_day(
        self, account: _Account, member: _Member, known: tuple[int, int] | None, held: Holding, now: float, *, is_new: bool
    ) -> None:
        spent = held.spent if held.day == self._day else 0  # the clock of the ingress is on another day
        if is_new:  # what a board before this one knew of it was restored
            account.restored -= min(account.restored, spent)
        elif spent < member.spent_of_day:  # it has begun to count again
            account.before += member.spent_of_day
        member.spent_of_day = spent
        if known is not None and known[0] == self._day and now - self._began_at >= self._silence_s:
            account.restored += max(0, known[1] - account.gone - sum(each.spent_of_day for each in account.members.values()))

    def _begin_day(self, day: int) -> None:
        if day == self._day:
            return
        self._day = day
        for account in self._accounts.values():
            account.before = account.restored = 0
            for member in account.members.values():
                member.spent_of_day = 0

    def _held_by(self, ingress: str, member: _Member, now: float) -> int:
        """Return what another ingress may have in use at most, as far as the board knows."""
        return member.seen_spent(now) if self._is_silent(ingress, now) else member.last.allotted

    def _is_silent(self, ingress: str, now: float) -> bool:
        return now - self._heard[ingress][1] > self._silence_s

    def _forget_gone(self, now: float) -> None:
        """Forget silent ingresses of which nothing counts any more."""
        for ingress in [i for i in self._heard if self._is_silent(i, now)]:
            accounts = [account for account in self._accounts.values() if ingress in account.members]
            for account in accounts:
                if not account.members[ingress].seen_spent(now):
                    del account.members[ingress]
            if not any(ingress in account.members for account in accounts):
                del self._heard[ingress]
