"""The phases of a start follow one another and add up, whatever clocks and controllers did."""

from dataclasses import replace

import pytest

from serve_app.replica.cold_start import ColdStart, EnginePhases

ENGINE = EnginePhases(download_s=3.0, load_s=4.0, warm_up_s=5.0)
START = ColdStart.measured(1000.0, 1002.5, began=70.0, engine_ready=90.0, listening=90.25, engine=ENGINE)
BEGAN_AT = 1002.5


def test_a_start_is_cut_into_phases_that_add_up() -> None:
    assert START.asked(990.0, began_at=BEGAN_AT).phases() == {
        "scheduled": 10.0,
        "process": 2.5,
        "import": 8.0,
        "download": 3.0,
        "load": 4.0,
        "warm_up": 5.0,
        "listen": 0.25,
    }
    assert START.asked(990.0, began_at=BEGAN_AT).start_s == 90.25 - 70.0 + BEGAN_AT - 990.0


@pytest.mark.parametrize(
    ("asked_at", "scheduled_s", "process_s"),
    [
        (999.0, 1.0, 2.5),
        (1001.0, 0.0, 1.5),  # a process that Ray had kept ready
        (1003.0, None, 2.5),  # a controller that restarted in between
        (None, None, 2.5),
    ],
)
def test_only_a_wish_before_our_code_ran_counts(asked_at: float | None, scheduled_s: float | None, process_s: float) -> None:
    start = START.asked(asked_at, began_at=BEGAN_AT)
    assert (start.scheduled_s, start.process_s) == (scheduled_s, process_s)
    assert ("scheduled" in start.phases()) == (scheduled_s is not None)


def test_a_clock_that_was_set_back_makes_no_negative_phase() -> None:
    assert ColdStart.measured(1002.0, 1000.0, began=70.0, engine_ready=81.0, listening=81.0, engine=ENGINE).phases() == {
        "process": 0.0,
        "import": 0.0,
        "download": 3.0,
        "load": 4.0,
        "warm_up": 5.0,
        "listen": 0.0,
    }


def test_the_first_token_is_reported_and_is_no_part_of_the_start() -> None:
    served = replace(START, first_token_s=60.0)
    assert (served.start_s, served.phases()["first_token"]) == (22.75, 60.0)
    assert START.record(replica="a") == {"replica": "a", "start_s": 22.75, "until": "ready", "phases": START.phases()}
    assert served.record(replica="a") == {"replica": "a", "start_s": 22.75, "until": "first_token", "phases": served.phases()}
