"""These tests check how long replicas stay, in seconds of observations and by hand."""

from serve_app.autoscaling.needs import MISSING_S, Needs


def correction(needs: Needs, wished: int, target: int, seconds: int = 1, demand: int = 2) -> int:
    """Let ``seconds`` pass with a constant wish; return the replicas that stay beyond the demand's."""
    corrected = demand
    for _ in range(seconds):
        needs.pass_time(1.0)
        corrected = needs.corrected(demand, asked=0, wished=wished, target=target)
    return corrected - demand


def test_a_replica_that_went_and_was_asked_for_again_stays_for_a_quarter_of_an_hour() -> None:
    needs = Needs()
    assert correction(needs, wished=2, target=3, seconds=100) == 0
    assert correction(needs, wished=2, target=2, seconds=100) == 0, "it was removed"
    assert correction(needs, wished=3, target=2) == 1, "and is missing"
    assert correction(needs, wished=2, target=3, seconds=int(MISSING_S) - 1) == 1
    assert correction(needs, wished=2, target=3, seconds=5) == 0


def test_each_further_wish_for_it_begins_the_time_anew() -> None:
    needs = Needs()
    correction(needs, wished=2, target=3)
    correction(needs, wished=2, target=2)
    correction(needs, wished=3, target=2)
    for _ in range(3):
        assert correction(needs, wished=2, target=3, seconds=int(MISSING_S) - 10) == 1
        assert correction(needs, wished=3, target=3) == 1
    assert correction(needs, wished=2, target=3, seconds=int(MISSING_S) + 5) == 0


def test_a_rise_after_a_long_while_or_without_a_fall_is_no_regret() -> None:
    needs = Needs()
    assert correction(needs, wished=5, target=2) == 0
    correction(needs, wished=2, target=5)
    correction(needs, wished=2, target=2, seconds=int(MISSING_S) + 5)
    assert correction(needs, wished=5, target=2) == 0


def test_of_a_fall_by_one_a_rise_by_ten_regrets_one() -> None:
    needs = Needs()
    correction(needs, wished=2, target=3)
    correction(needs, wished=2, target=2)
    assert correction(needs, wished=12, target=2) == 1
