"""`Sleep` is one replica's part in sleeping: when its engine falls asleep, when it wakes, and what it asks of the GPU that it shares. Pure.

``replica/sleeper.py`` passes it what happens and does what it says. `Places` (``core/places.py``) decides which of the replicas that share
a GPU has it. A request never wakes an engine by itself: the replica asks for the place, and wakes its engine when it has got it.

    STARTING -> AWAKE -> DRAINING -> FALLING_ASLEEP -> ASLEEP -> WAKING -> AWAKE
                  ^---------'
"""

from dataclasses import dataclass, field
from enum import StrEnum

ASKED_S = 3.0
"""An ingress whose requests wait repeats its `Wake` each second. Its wish is forgotten after this many seconds without another."""
DEFAULT_CHANGE_S = 10.0
"""The assumed seconds of a sleep and a wake-up together, before they were measured."""
MIN_DRAIN_S = 0.1
"""The least seconds from the news that the replica takes nothing until it sleeps: attempts that are on their way arrive within them, unless
their ingress's loop lags. Those that come later are let go, and wait as long as requests that came after the drain."""


class Phase(StrEnum):
    """What the engine does. Its weights are not on the GPU in ASLEEP, and in STARTING before the replica has its place."""

    STARTING = "starting"
    AWAKE = "awake"
    DRAINING = "draining"
    """The replica takes nothing new, and waits for its last requests before it sleeps."""
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    ENDING = "ending"
    """The replica ends for good. It changes nothing any more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a replica says of itself to `Places`."""

    holds: bool
    """Whether it uses the memory of its GPUs, or is about to."""
    wants: bool = False
    """Whether it needs its GPUs and does not hold them: requests wait for it, or it starts."""
    busy: bool = False
    """Whether it has requests, starts or changes, while it holds its GPUs."""
    serves: bool = False
    """Whether it holds its GPUs with an engine that has come up: its stay has begun."""
    change_s: float = DEFAULT_CHANGE_S
    """Seconds that its latest sleep and wake-up took together."""
    number: int = field(default=0, compare=False)
    """Rises from claim to claim of a replica: one that a later one has overtaken says nothing any more."""


@dataclass(frozen=True, slots=True)
class Order:
    """The answer of `Places` to a claim."""

    may_hold: bool
    make_room: bool = False
    """Whether a holder should fall asleep, because another replica's turn has come."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An ingress has requests that wait for this replica."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The replica has so many unfinished attempts now."""

    attempts: int


@dataclass(frozen=True, slots=True)
class Ordered:
    """The answer to the latest claim has come."""

    order: Order


@dataclass(frozen=True, slots=True)
class EngineChanged:
    """The engine is up, has fallen asleep, or is awake again: whatever it was told last."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The replica ends: it drains for good, or its engine is lost."""


class Instruction(StrEnum):
    """What the replica has to do now."""

    START_DRAIN = "start_drain"
    END_DRAIN = "end_drain"
    """Take requests again."""
    LET_GO = "let_go"
    """Give the attempts back to their ingresses, which queue the requests, limit their wait, and ask for the replica."""
    PUT_TO_SLEEP = "put_to_sleep"
    WAKE_UP = "wake_up"


Event = Asked | Looked | Ordered | EngineChanged | Ended


class Sleep:
    """The state of one replica. ``handle`` is its one door; times are seconds of one clock."""

    def __init__(self, after_s: float, *, drain_s: float, expiry_s: float, now: float) -> None:
        """Begin in STARTING.

        Args:
            after_s: Seconds without a request after which the engine sleeps.
            drain_s: Seconds of a drain after which the replica lets go of its attempts.
            expiry_s: Seconds after the board's latest answer for which the engine may fall asleep: without the board it could not wake.
            now: Seconds of the clock of all events.
        """
        self.phase = Phase.STARTING
        self.sleep_s: float | None = None
        """Seconds that the engine took to fall asleep, the last time."""
        self.wake_s: float | None = None
        """Seconds that it took to wake up, the last time."""
        self.num_wakes = 0
        self.order = Order(may_hold=False)
        """What the board said last of the present claim."""
        self._after_s, self._drain_s, self._expiry_s = after_s, drain_s, expiry_s
        self._since = self._busy_at = now
        self._asked_until = self._ordered_at = now
        self._attempts = 0
        self._held = False  # of GPUs, as the last claim said

    def handle(self, event: Event, *, now: float) -> list[Instruction]:
        """Take one event in and return what to do about it."""
        match event:
            case Asked():
                self._asked_until = now + ASKED_S
            case Looked(attempts):
                self._attempts = attempts
                if attempts and self.phase is Phase.AWAKE:
                    self._asked_until = now  # what waited has come: from its end on the replica is idle
                if attempts and self.phase in (Phase.FALLING_ASLEEP, Phase.ASLEEP):  # they come too late for the drain
                    self._asked_until = now + ASKED_S  # until then their ingress asks
                    self._attempts = 0
                    return [Instruction.LET_GO]
            case Ordered(order):
                self.order, self._ordered_at = order, now
            case EngineChanged():
                return self._changed(now)
            case Ended():
                self._enter(Phase.ENDING, now)
        if self._is_needed(now):
            self._busy_at = now
        return self._decide(now)

    def claim(self, now: float) -> Claim:
        """Return what `Places` has to know."""
        needed = self._is_needed(now)
        change_s = (
            DEFAULT_CHANGE_S if self.sleep_s is None else self.sleep_s + (self.sleep_s if self.wake_s is None else self.wake_s)
        )
        busy = self._held and (needed or self.phase is not Phase.AWAKE)
        serves = self._held and self.phase not in (Phase.STARTING, Phase.WAKING)
        return Claim(self._held, wants=self._wants(now), busy=busy, serves=serves, change_s=change_s)

    def validate(self) -> None:
        """Assert the invariants."""
        if self.phase in (Phase.AWAKE, Phase.DRAINING, Phase.FALLING_ASLEEP, Phase.WAKING):
            assert self._held
        assert not (self.phase is Phase.ASLEEP and self._held)

    def _is_needed(self, now: float) -> bool:
        return self._attempts > 0 or now < self._asked_until

    def _hears_board(self, now: float) -> bool:
        return now - self._ordered_at < self._expiry_s

    def _wants(self, now: float) -> bool:
        if self._held:
            return False
        return self.phase is Phase.STARTING or (self.phase is Phase.ASLEEP and self._is_needed(now))

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _decide(self, now: float) -> list[Instruction]:
        match self.phase:
            case Phase.STARTING:
                self._held = self._held or self.order.may_hold
            case Phase.AWAKE:
                if self._hears_board(now) and (self.order.make_room or now - self._busy_at >= self._after_s):
                    self._enter(Phase.DRAINING, now)
                    return [Instruction.START_DRAIN]
            case Phase.DRAINING:
                # A drain makes its holder busy: `make_room` ends, though another waits, if the stay is not over and the priority no higher.
                if not self._hears_board(now) or (self._is_needed(now) and not self.order.make_room):
                    self._enter(Phase.AWAKE, now)
                    return [Instruction.END_DRAIN]
                if self._attempts:
                    return [Instruction.LET_GO] if now - self._since >= self._drain_s else []
                if now - self._since >= MIN_DRAIN_S:
                    self._enter(Phase.FALLING_ASLEEP, now)
                    return [Instruction.PUT_TO_SLEEP]
            case Phase.ASLEEP:
                if not self._wants(now):
                    self.order = Order(may_hold=False)  # what was granted to a wish ends with it
                elif self.order.may_hold:
                    self._held = True
                    self._enter(Phase.WAKING, now)
                    return [Instruction.WAKE_UP]
        return []

    def _changed(self, now: float) -> list[Instruction]:
        lasted_s = now - self._since
        match self.phase:
            case Phase.STARTING:
                assert self._held
                self._busy_at = now
                self._asked_until = now + ASKED_S  # the requests for which it was started are on their way to it
                self._enter(Phase.AWAKE, now)
            case Phase.FALLING_ASLEEP:
                self.sleep_s, self._held, self.order = lasted_s, False, Order(may_hold=False)
                self._enter(Phase.ASLEEP, now)
            case Phase.WAKING:
                self.wake_s = lasted_s
                self.num_wakes += 1
                self._busy_at = now
                self._enter(Phase.AWAKE, now)
                return [Instruction.END_DRAIN]
            case Phase.ENDING:
                pass  # it ended while its engine changed
        return []
