import pytest

from serve_app.core.cold_starts import ColdStarts


def starts(*start_s: float) -> ColdStarts:
    measured = ColdStarts()
    for i, value in enumerate(start_s):
        measured.add(f"r{i}", value)
    return measured


@pytest.mark.parametrize(
    ("start_s", "p90_s"),
    [
        ([], None),
        ([42.0], 42.0),
        ([10.0, 90.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 20.0, 100.0], 90.0),
        ([float(n) for n in range(1, 12)], 10.0),
    ],
)
def test_nine_of_ten_starts_are_no_longer(start_s: list[float], p90_s: float | None) -> None:
    assert starts(*start_s).p90_s() == p90_s


def test_the_start_of_a_replica_counts_once_however_often_it_is_reported() -> None:
    measured = starts(10.0, 20.0)
    for _ in range(50):
        measured.add("r0", 10.0)
    assert measured.p90_s() == 20.0


def test_the_last_32_starts_count() -> None:
    assert starts(*[500.0] * 4, *[10.0] * 28).p90_s() == 500.0
    assert starts(*[500.0] * 4, *[10.0] * 29).p90_s() == 10.0


@pytest.mark.parametrize(("start_s", "retry_after_s"), [(0.2, 1.0), (33.3, 33.3), (3600.0, 600.0)])
def test_no_client_is_asked_back_at_once_or_after_more_than_ten_minutes(start_s: float, retry_after_s: float) -> None:
    assert starts(start_s).retry_after_s() == retry_after_s
    assert starts().retry_after_s() is None
