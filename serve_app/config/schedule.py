"""`ScheduledBounds` is a window of the week in which a model has other bounds."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self, get_args
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from serve_app.config.base import Int, Section
from serve_app.config.checks import nearest, wrong

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)


def _checked_clock(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 24 * 60:
        hint = f'write "{value // 60:02}:{value % 60:02}" in quotes'
        raise wrong("", f"is {value}: YAML reads 12:30 without quotes as the number 750", hint)
    if not isinstance(value, str) or re.fullmatch("([01][0-9]|2[0-3]):[0-5][0-9]|24:00", value) is None:
        raise wrong("", f"is {value!r}, not a time of day", 'write for example "07:30", in quotes')
    return value


def _checked_zone(name: str) -> str:
    if name not in (known := available_timezones() - {"localtime"}):  # localtime differs between machines
        # All zones of a continent begin alike: with a lower cutoff the nearest of Europe/Frankfurt would be Europe/Tirane.
        hint = nearest(name, known, cutoff=0.85) or "it has one or a few cities of each country, for example Europe/Berlin"
        raise wrong("", f"is {name!r}, not a time zone of the IANA database", hint)
    return name


Clock = Annotated[str, BeforeValidator(_checked_clock)]


class ScheduledBounds(Section):
    """Other bounds on some days between two times of day. Where windows overlap, the largest min and the smallest max hold."""

    days: tuple[Day, ...] = Field(default=DAYS, min_length=1)
    """Days on which the window starts."""
    start: Clock = "00:00"
    """Time of day, HH:MM. The replicas of `min` are ready then: they are started a measured cold start earlier."""
    end: Clock = "24:00"
    """Time of day, HH:MM. An end before `start` is on the next day."""
    time_zone: Annotated[str, AfterValidator(_checked_zone)] = "UTC"
    """Name in the IANA database, for example Europe/Berlin."""
    min: Int | None = Field(default=None, ge=0)
    """Fewest replicas in the window. Default: the bound outside of it."""
    max: Int | None = Field(default=None, ge=1)
    """Most replicas in the window. Default: the bound outside of it."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.min is None and self.max is None:
            raise wrong("min", "and max are both missing: the window would change nothing", "add `min:` or `max:`")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise wrong("max", f"min is {self.min} and max is {self.max}", f"set max to {self.min} or more")
        if self.start == self.end:
            raise wrong("end", f"is {self.end!r}, and so is start", "leave both out for whole days")
        if self.start == "24:00":
            raise wrong("start", "is '24:00'", 'write "00:00", and the next day')
        return self

    def holds(self, time: float) -> bool:
        """Return whether ``time``, in seconds since the epoch, is in the window."""
        local = datetime.fromtimestamp(time, ZoneInfo(self.time_zone))
        clock, today = f"{local:%H:%M}", DAYS[local.weekday()]
        if self.start < self.end:
            return today in self.days and self.start <= clock < self.end
        yesterday = DAYS[(local - timedelta(days=1)).weekday()]
        return (today in self.days and clock >= self.start) or (yesterday in self.days and clock < self.end)


def bounds_at(
    windows: Sequence[ScheduledBounds], outside: tuple[int, int], *, time: float, cold_start_s: float
) -> tuple[int, int]:
    """Return the fewest and the most replicas at ``time``.

    Args:
        windows: The windows of one model.
        outside: The bounds outside of all windows. No window goes beyond them.
        time: Seconds since the epoch.
        cold_start_s: How long a replica takes to start. A window's ``min`` holds this much before the window begins, and wins over
            another window's ``max``.
    """
    now = [w for w in windows if w.holds(time)]
    ahead = (time, *(time + s for s in range(60, int(cold_start_s), 60)), time + cold_start_s)  # windows begin at whole minutes
    soon = [w for w in windows if any(w.holds(at) for at in ahead)]
    least = max([outside[0], *(w.min for w in soon if w.min is not None)])
    most = min([outside[1], *(w.max for w in now if w.max is not None)])
    return least, max(least, most)
