from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from serve_app.config import parse_settings
from serve_app.config.schedule import ScheduledBounds, bounds_at
from serve_app.errors import ConfigError

BERLIN = "Europe/Berlin"
OFFICE = {"days": ["mon", "tue", "wed", "thu", "fri"], "start": "08:00", "end": "18:30", "time_zone": BERLIN, "min": 4}


def window(**values: Any) -> ScheduledBounds:
    return ScheduledBounds.model_validate(values)


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("2026-11-23T07:59:59", False),  # Monday
        ("2026-11-23T08:00", True),
        ("2026-11-23T18:29:59", True),
        ("2026-11-23T18:30", False),
        ("2026-11-22T12:00", False),  # Sunday
        ("2026-07-20T08:00", True),  # summer time
        ("2026-07-20T07:59", False),
    ],
)
def test_a_window_holds_on_its_days_by_the_clock_of_its_place(text: str, holds: bool) -> None:
    assert window(**OFFICE).holds(at(text)) is holds


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("2026-11-27T21:59", False),  # Friday
        ("2026-11-27T22:00", True),
        ("2026-11-28T05:59", True),
        ("2026-11-28T06:00", False),
        ("2026-11-28T23:00", False),
    ],
)
def test_a_window_past_midnight_belongs_to_the_day_on_which_it_starts(text: str, holds: bool) -> None:
    night = window(days=["fri"], start="22:00", end="06:00", time_zone=BERLIN, max=1)
    assert night.holds(at(text)) is holds


def test_whole_days_are_the_default() -> None:
    always = window(min=2)
    assert all(always.holds(at(f"2026-11-{day}T{clock}", "UTC")) for day in range(10, 28) for clock in ("00:00", "23:59:59"))


def test_the_largest_min_and_the_smallest_max_hold_and_a_min_goes_before_a_max() -> None:
    noon = at("2026-11-23T12:00")

    def bounds(*windows: ScheduledBounds, time: float = noon) -> tuple[int, int]:
        return bounds_at(windows, (1, 10), time=time, cold_start_s=60.0)

    assert bounds() == (1, 10)
    assert bounds(window(**OFFICE), window(min=3), window(max=8), window(max=6)) == (4, 6)
    assert bounds(window(**OFFICE), window(max=2)) == (4, 4)
    assert bounds(window(**OFFICE), time=at("2026-11-23T07:58:59")) == (1, 10)
    assert bounds(window(**OFFICE), time=at("2026-11-23T07:59")) == (4, 10), "a cold start before"
    assert bounds(window(**{**OFFICE, "min": None, "max": 5}), time=at("2026-11-23T07:59")) == (1, 10), "a max is not early"


def test_a_window_shorter_than_the_cold_start_is_prepared_for_until_it_ends() -> None:
    short = window(start="08:00", end="08:15", time_zone=BERLIN, min=4)

    def least(clock: str) -> int:
        return bounds_at([short], (1, 10), time=at(f"2026-11-23T{clock}"), cold_start_s=3000.0)[0]

    assert [least(clock) for clock in ("07:09:59", "07:10", "07:30", "07:55", "08:14:59", "08:15")] == [1, 4, 4, 4, 4, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start": 750, "min": 2}, "replicas.schedule[0].start: is 750: YAML reads 12:30 without quotes as the number 750"),
        (
            {"start": "7:30", "min": 2},
            "replicas.schedule[0].start: is '7:30', not a time of day; write for example \"07:30\", in quotes",
        ),
        ({"start": "24:30", "min": 2}, "replicas.schedule[0].start: is '24:30', not a time of day"),
        ({"start": True, "min": 2}, "replicas.schedule[0].start: is True, not a time of day"),
        ({"start": 45000, "min": 2}, "replicas.schedule[0].start: is 45000, not a time of day"),
        ({"start": "24:00", "min": 2}, "replicas.schedule[0].end: is '24:00', and so is start"),
        ({"start": "24:00", "end": "01:00", "min": 2}, "schedule[0].start: is '24:00'; write \"00:00\", and the next day"),
        ({"time_zone": "localtime", "min": 2}, "is 'localtime', not a time zone of the IANA database"),
        ({"time_zone": "Europe/Berln", "min": 2}, "not a time zone of the IANA database; did you mean Europe/Berlin?"),
        (
            {"time_zone": "Europe/Frankfurt", "min": 2},
            "IANA database; it has one or a few cities of each country, for example Europe/Berlin",
        ),
        ({"time_zone": "../../etc/passwd", "min": 2}, "not a time zone of the IANA database"),
        (
            {"start": "08:00", "end": "08:00", "min": 2},
            "schedule[0].end: is '08:00', and so is start; leave both out for whole days",
        ),
        ({"start": "08:00"}, "schedule[0].min: and max are both missing: the window would change nothing"),
        ({"min": 4, "max": 3}, "schedule[0].max: min is 4 and max is 3; set max to 4 or more"),
        ({"min": 20}, "schedule[0].min: is 20, and replicas.min is 1 and max is 10; a window narrows these bounds"),
        ({"max": 20}, "schedule[0].max: is 20, and replicas.min is 1 and max is 10"),
        ({"days": [], "min": 2}, "schedule[0].days: is [], but should have at least 1 item"),
        ({"days": ["monday"], "min": 2}, "schedule[0].days[0]: is 'monday', but should be 'mon', 'tue'"),
    ],
)
def test_windows_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    model = {"model": "/m", "replicas": {"min": 1, "max": 10, "schedule": [values]}}
    with pytest.raises(ConfigError) as refused:
        parse_settings({"models": {"m": model}})
    assert message in str(refused.value)


def test_a_schedule_of_a_model_that_does_not_scale_is_refused() -> None:
    model = {"model": "/m", "replicas": {"min": 2, "max": 2, "schedule": [{"min": 2}]}}
    with pytest.raises(ConfigError, match=r"replicas\.schedule: has no effect: min and max are 2"):
        parse_settings({"models": {"m": model}})


def test_a_window_that_needs_more_gpus_than_there_are_is_refused() -> None:
    scaled = {"replicas": {"min": 1, "max": 8, "schedule": [{"min": 3}]}, "gpus_per_replica": 2, "device": "cuda"}
    models = {name: {"model": "/m", **scaled} for name in ("a", "b")}
    with pytest.raises(ConfigError) as refused:
        parse_settings({"models": models, "autoscaling": {"max_gpus": 7}})
    assert str(refused.value) == (
        "models.a.replicas.schedule[0].min: is 3, which with the other models' minimums needs 8 GPUs of 7; lower it, or set "
        "autoscaling.max_gpus to 8 or more"
    )
    parse_settings({"models": models, "autoscaling": {"max_gpus": 8}})
