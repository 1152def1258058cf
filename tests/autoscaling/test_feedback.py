"""Measured ITL and late first tokens, against the law of the stationary batch by hand."""

from dataclasses import replace

import pytest

from serve_app.autoscaling.feedback import LEAST, MEASURED_S, MOST, Feedback
from serve_app.autoscaling.signals import Load
from tests.autoscaling.queue_plant import QueuePlant, rate_of

STEP_S = 0.03
LOAD = Load(interval_s=1.0, steps=20.0, busy_s=20 * 0.06, first_tokens=10.0, running=30.0)
"""At half of the utilization a step of 0.03 s should last 0.06 s, and does."""


def fed(load: Load, *, seconds: float = 2 * MEASURED_S, demand: float = 1.0, running: int = 2) -> Feedback:
    feedback = Feedback()
    for _ in range(int(seconds)):
        feedback.observe(load, step_s=STEP_S, demand=demand, running=running)
    return feedback


def test_steps_as_the_law_says_change_nothing() -> None:
    feedback = fed(LOAD)
    assert (feedback.factor(), feedback.late_share) == (1.0, 0.0)
    assert [feedback.itl_s, feedback.expected_itl_s] == pytest.approx([0.06, 0.06])


@pytest.mark.parametrize(("slower", "factor"), [(1.05, 1.0), (1.15, 1 / 1.15), (3.0, LEAST), (1 / 1.05, 1.0), (0.5, MOST)])
def test_slower_or_faster_steps_correct_the_capacity_within_its_bounds(slower: float, factor: float) -> None:
    assert fed(replace(LOAD, busy_s=LOAD.busy_s * slower)).factor() == pytest.approx(factor)


@pytest.mark.parametrize(("late", "factor"), [(0.1, 1.0), (0.6, 0.9), (5.0, LEAST)])
def test_late_first_tokens_beyond_one_of_a_hundred_take_capacity_twice_over(late: float, factor: float) -> None:
    assert fed(replace(LOAD, late_first_tokens=late)).factor() == pytest.approx(factor)


def test_late_first_tokens_count_although_steps_are_fast() -> None:
    assert fed(replace(LOAD, busy_s=LOAD.busy_s / 2, late_first_tokens=0.6)).factor() == pytest.approx(0.9)


@pytest.mark.parametrize(
    "load",
    [
        replace(LOAD, queued=3.0, busy_s=9.0),
        replace(LOAD, is_partial=True, busy_s=9.0),
        replace(LOAD, silent=("r1",), busy_s=9.0),
        replace(LOAD, steps=0.0, busy_s=0.0),
    ],
)
def test_with_a_queue_or_with_reports_that_are_missing_nothing_is_compared(load: Load) -> None:
    assert fed(load) == Feedback()


def test_a_full_replica_or_none_or_a_short_time_says_nothing() -> None:
    slow = replace(LOAD, busy_s=9.0)
    assert fed(slow, demand=1.9) == fed(slow, running=0) == Feedback()
    assert fed(slow, seconds=MEASURED_S - 1).factor() == 1.0


class LateWithoutQueue(QueuePlant):
    """Replicas that make 6 % of first tokens late, for a reason that no queue shows."""

    def load(self, rate: float) -> Load:
        load = super().load(rate)
        return replace(load, late_first_tokens=0.06 * load.first_tokens)


def test_a_model_whose_first_tokens_are_late_gets_more_replicas_and_no_more_than_the_bound() -> None:
    counts = []
    for kind in (QueuePlant, LateWithoutQueue):
        plant = kind(running=20, maximum=100, cold_start_s=40.0)
        counts.append(plant.run(rate_of(20), 900)[-1])
    plain, corrected = counts
    assert plain < corrected <= plain / LEAST + 1
    assert plant.decisions[-1].inputs["correction"] == pytest.approx(0.9, abs=0.02)
