"""`FleetWatch` decides when the fleet of a machine's pipelines is restarted, ended or given up. Pure: only `fleet_keeper.py` uses it."""

from dataclasses import dataclass, field
from typing import Literal

STEADY_S = 60.0
"""A fleet that was ready for so long has proved that it can start: earlier failures no longer count."""

Action = Literal["wait", "restart", "end", "give up"]


@dataclass(frozen=True)
class Keep:
    """The limits of a fleet that the worker processes of a machine share."""

    stuck_s: float = 60.0
    """A fleet that was ready and whose URL then answers nothing for so long is killed and started again."""
    start_s: float = 1800.0
    """A fleet that is not ready for so long is killed and started again, too. The time counts from its start, or from when it was last
    ready."""
    starts: int = 3
    """Starts in a row that may fail; then the fleet is given up, and the elements that wait for the fleet fail with the reason."""
    linger_s: float = 10.0
    """The fleet ends when no worker process has used it for so long."""

    def __post_init__(self) -> None:
        for name in ("stuck_s", "start_s", "starts"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"Keep.{name} is {value!r}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one look at the fleet."""

    ended: str = ""
    """Why the fleet's process has ended; empty while it runs."""
    answers: bool = True
    """Whether the fleet's URL answers at all."""
    ready: bool = True
    has_users: bool = True


@dataclass(slots=True)
class FleetWatch:
    """The memory of one fleet, and the decisions about it. Times are those of the caller's monotonic clock."""

    keep: Keep
    started_at: float
    """When the running fleet, or the start in progress, began."""
    used_at: float = field(init=False)
    answered_at: float = field(init=False)
    ready_at: float = field(init=False)
    """When the fleet was last ready; its start if it never was."""
    ready_since: float | None = None
    failures: int = 0
    why: str = ""
    """Why the fleet was last started again, or given up."""

    def __post_init__(self) -> None:
        self.used_at = self.started_at
        self.started(self.started_at)

    def started(self, at: float) -> None:
        """Note that the fleet has been started again."""
        self.started_at = self.answered_at = self.ready_at = at
        self.ready_since = None

    def handle(self, look: Look, *, now: float) -> Action:
        """Note a look; return what to do. After ``restart`` the caller starts the fleet and then calls `started`."""
        self._note(look, now)
        if now - self.used_at > self.keep.linger_s:
            return "end"
        if not (why := self._trouble(look, now)):
            return "wait"
        self.why, self.failures = why, self.failures + 1
        return "give up" if self.failures >= self.keep.starts else "restart"

    def _note(self, look: Look, now: float) -> None:
        if look.has_users:
            self.used_at = now
        if look.answers:
            self.answered_at = now
        if look.ready:
            self.ready_at = now
            self.ready_since = now if self.ready_since is None else self.ready_since
            if now - self.ready_since >= STEADY_S:
                self.failures = 0

    def _trouble(self, look: Look, now: float) -> str:
        if look.ended:
            return look.ended
        if self.ready_since is not None and now - self.answered_at > self.keep.stuck_s:
            return f"the fleet was stuck: its URL has not answered for {now - self.answered_at:.0f} s"
        if now - self.ready_at > self.keep.start_s:
            return f"the fleet was not ready for {now - self.ready_at:.0f} s"
        return ""
