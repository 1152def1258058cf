from serve_app.core.signals import STALE_S, Meter


def test_increments_are_summed_over_the_members_since_they_were_last_taken() -> None:
    meter = Meter()
    assert meter.take({"a": (1.0, {"requests": 100.0})}, now=0.0) == {}
    assert meter.take({"a": (2.0, {"requests": 103.0}), "b": (2.0, {"requests": 50.0})}, now=1.0) == {"requests": 3.0}
    assert meter.take({"a": (3.0, {"requests": 104.0}), "b": (3.0, {"requests": 60.0})}, now=2.0) == {"requests": 11.0}


def test_what_came_while_a_member_was_silent_is_not_taken_for_one_seconds_load() -> None:
    meter = Meter()
    meter.take({"a": (1.0, {"requests": 100.0})}, now=0.0)
    for second in range(1, 20):
        assert meter.take({"a": (1.0, {"requests": 100.0})}, now=float(second)) == {"requests": 0.0}
    assert meter.take({"a": (20.0, {"requests": 600.0})}, now=20.0) == {}
    assert meter.take({"a": (21.0, {"requests": 625.0})}, now=21.0) == {"requests": 25.0}


def test_a_lost_report_costs_nothing_and_a_member_that_left_is_forgotten() -> None:
    meter = Meter()
    meter.take({"a": (1.0, {"requests": 1.0}), "b": (1.0, {"requests": 1.0})}, now=0.0)
    assert meter.take({"a": (1.0, {"requests": 1.0})}, now=1.0) == {"requests": 0.0}
    assert meter.take({"a": (3.0, {"requests": 9.0}), "b": (3.0, {"requests": 500.0})}, now=2.0) == {"requests": 8.0}


def test_a_counter_that_falls_adds_nothing() -> None:
    meter = Meter()
    meter.take({"a": (1.0, {"requests": 90.0})}, now=0.0)
    assert meter.take({"a": (2.0, {"requests": 2.0})}, now=1.0) == {"requests": 0.0}
    assert meter.take({"a": (3.0, {"requests": 5.0})}, now=2.0) == {"requests": 3.0}


def test_a_member_is_silent_until_its_first_report_and_when_nothing_new_comes_from_it() -> None:
    meter = Meter()
    assert meter.silent(["b", "a"], now=0.0) == ("a", "b")
    meter.take({"a": (1000.0, {})}, now=0.0)  # by a clock of its own
    assert meter.silent(["a"], now=STALE_S) == ()
    meter.take({"a": (1000.0, {})}, now=STALE_S)
    assert meter.silent(["a"], now=STALE_S + 0.1) == ("a",)
    meter.take({"a": (1001.0, {})}, now=STALE_S + 0.1)
    assert meter.silent(["a"], now=STALE_S + 0.1) == ()
