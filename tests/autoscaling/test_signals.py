import pytest

from serve_app.autoscaling.signals import LATE_S, STALE_S, Meter


def test_increments_are_summed_over_the_members_since_they_were_last_taken() -> None:
    meter = Meter()
    assert meter.take({"a": (1.0, {"requests": 100.0})}, now=0.0) == {}
    assert meter.take({"a": (2.0, {"requests": 103.0}), "b": (2.0, {"requests": 50.0})}, now=1.0) == {"requests": 3.0}
    assert meter.take({"a": (3.0, {"requests": 104.0}), "b": (3.0, {"requests": 60.0})}, now=2.0) == {"requests": 11.0}


def test_a_silent_member_continues_as_before_and_its_next_report_counts_the_rest() -> None:
    meter = Meter()
    for second in range(31):
        meter.take({"a": (float(second), {"requests": 10.0 * second})}, now=float(second))
    taken = [meter.take({"a": (30.0, {"requests": 300.0})}, now=30.0 + second).get("requests", 0.0) for second in range(1, 60)]
    assert taken == [0.0] * int(LATE_S) + [pytest.approx(10.0)] * (59 - int(LATE_S))
    assert meter.take({"a": (90.0, {"requests": 900.0})}, now=90.0)["requests"] == pytest.approx(600.0 - sum(taken))
    assert meter.take({"a": (91.0, {"requests": 912.0})}, now=91.0)["requests"] == pytest.approx(12.0)


def test_what_was_assumed_of_a_silent_member_and_was_not_so_comes_off_its_next_increments() -> None:
    meter = Meter()
    for second in range(31):
        meter.take({"a": (float(second), {"requests": 10.0 * second})}, now=float(second))
    assumed = sum(
        meter.take({"a": (30.0, {"requests": 300.0})}, now=30.0 + second).get("requests", 0.0) for second in range(1, 11)
    )
    assert assumed == pytest.approx(70.0)
    assert meter.take({"a": (41.0, {"requests": 325.0})}, now=41.0)["requests"] == 0.0
    assert meter.take({"a": (42.0, {"requests": 380.0})}, now=42.0)["requests"] == pytest.approx(10.0)


def test_a_member_that_did_nothing_while_it_was_silent_counts_again_soon() -> None:
    meter = Meter()
    for second in range(31):
        meter.take({"a": (float(second), {"requests": 10.0 * second})}, now=float(second))
    for second in range(31, 151):
        meter.take({"a": (30.0, {"requests": 300.0})}, now=float(second))
    back = [
        meter.take({"a": (float(second), {"requests": 300.0 + 10.0 * (second - 150)})}, now=float(second))["requests"]
        for second in range(151, 161)
    ]
    assert sum(back) >= 30.0
    assert back[-1] == pytest.approx(10.0)


def test_nothing_is_assumed_of_a_member_whose_load_has_ended() -> None:
    meter = Meter()
    for second in range(200):
        meter.take({"a": (float(second), {"requests": 10.0 * min(second, 100)})}, now=float(second))
    assert all(not meter.take({"a": (199.0, {"requests": 1000.0})}, now=float(second)) for second in range(200, 210))


@pytest.mark.parametrize("every_s", [1, 5, 7, 10, 30])
def test_reports_that_come_seldom_lose_nothing(every_s: int) -> None:
    meter = Meter()
    total = sum(
        meter.take({"a": (float(now - now % every_s), {"requests": 10.0 * (now - now % every_s)})}, now=float(now)).get(
            "requests", 0.0
        )
        for now in range(601)
    )
    assert total == pytest.approx(6000.0, rel=0.01)


def test_a_clock_that_is_set_back_does_not_silence_its_host() -> None:
    meter = Meter()
    meter.take({"a": (5000.0, {"requests": 0.0})}, now=0.0)
    for second in range(1, 30):
        assert meter.take({"a": (float(second), {"requests": 10.0 * second})}, now=float(second)) == {"requests": 10.0}
        assert meter.silent(["a"], now=float(second)) == ()


def test_a_lost_report_costs_nothing_and_a_member_that_left_is_forgotten() -> None:
    meter = Meter()
    meter.take({"a": (1.0, {"requests": 1.0}), "b": (1.0, {"requests": 1.0})}, now=0.0)
    assert meter.take({"a": (1.0, {"requests": 1.0})}, now=1.0) == {}
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


def test_a_member_that_is_assumed_for_seconds_only_adds_nothing_later_and_nothing_with_its_next_report() -> None:
    meter = Meter()

    def take(now: int) -> float:
        heard_at = now if now <= 30 or now > 60 else 30
        reports = {name: (float(at), {"steps": 10.0 * at}) for name, at in (("a", heard_at), ("b", now))}
        return meter.take(reports, now=float(now), assume_s=STALE_S).get("steps", 0.0)

    taken = [take(now) for now in range(64)]
    assert taken[1:31] == [20.0] * 30
    assert taken[31:34] == [10.0] * 3, "late"
    assert taken[34:37] == pytest.approx([20.0] * 3), "assumed"
    assert taken[37:61] == [10.0] * 24, "silent"
    assert taken[61:] == [10.0, 20.0, 20.0], "reports again"


def test_a_share_is_by_what_members_count_and_one_that_never_reported_has_its_part() -> None:
    meter = Meter()
    for second in range(3):
        meter.take(
            {"a": (second, {"tokens": 30.0 * second}), "b": (second, {"tokens": 10.0 * second, "other": second})}, now=second
        )
    assert meter.share_of(["b"], ["a", "b"], "tokens") == pytest.approx(0.25)
    assert meter.share_of(["b"], ["a", "b"], "other") == 1.0
    assert meter.share_of(["a", "b"], ["a", "b"], "nothing") == 0.0
    assert meter.share_of(["c"], ["a", "b", "c"], "tokens") == pytest.approx(1 / 3)
    assert meter.share_of([], [], "tokens") == 0.0
