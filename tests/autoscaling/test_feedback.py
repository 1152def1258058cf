"""These tests compare the feedback on measured steps and late first tokens with the law of the stationary batch, worked out by hand."""

from dataclasses import dataclass, replace

import pytest

from serve_app.autoscaling.feedback import LEAST, MEASURED_S, MEMORY_S, MOST, Feedback
from serve_app.autoscaling.signals import ModelLoad
from tests.autoscaling.plant import RULES, TIMES
from tests.autoscaling.queue_plant import QueuePlant, rate_of

STEP_S = 0.03
LOAD = ModelLoad(interval_s=1.0, steps=20.0, busy_s=20 * 0.06, first_tokens=10.0, running=30.0)
"""At half of the utilization a step of 0.03 s should last 0.06 s, and does."""


def fed(load: ModelLoad, *, seconds: float = 2 * MEASURED_S, demand: float = 1.0, running: int = 2) -> Feedback:
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
        replace(LOAD, steps=0.0, busy_s=0.0),
    ],
)
def test_with_a_queue_or_with_reports_that_are_missing_nothing_is_compared(load: ModelLoad) -> None:
    assert fed(load) == Feedback()


def test_silent_replicas_leave_the_comparison_to_the_others() -> None:
    half = replace(LOAD, silent=("r1",), silent_replica_share=0.5, steps=LOAD.steps / 2)
    assert fed(replace(half, busy_s=LOAD.busy_s / 2 * 1.15)).factor() == pytest.approx(1 / 1.15)


def test_a_full_replica_or_none_or_a_short_time_says_nothing() -> None:
    slow = replace(LOAD, busy_s=9.0)
    assert fed(slow, demand=1.9) == fed(slow, running=0) == Feedback()
    assert fed(slow, seconds=MEASURED_S - 1).factor() == 1.0


@dataclass
class LateWithoutQueue(QueuePlant):
    """A plant whose replicas make a share of first tokens late without any queue."""

    late_share: float = 0.06

    def load(self, rate: float) -> ModelLoad:
        load = super().load(rate)
        return replace(load, late_first_tokens=self.late_share * load.first_tokens)


@dataclass
class FastSteps(QueuePlant):
    """A plant whose replicas are busy for 1.2 s in each second, as if one of six were not counted: batches are smaller than by the law."""

    def load(self, rate: float) -> ModelLoad:
        load, more_s = super().load(rate), 0.2 * self.running
        return replace(load, steps=load.steps + more_s / TIMES.step_s, busy_s=load.busy_s + more_s)


def test_a_model_whose_first_tokens_are_late_gets_more_replicas_and_no_more_than_the_bound() -> None:
    counts = []
    for kind in (QueuePlant, LateWithoutQueue):
        plant = kind(running=20, maximum=100, cold_start_s=40.0)
        counts.append(plant.run(rate_of(20), 900)[-1])
    plain, corrected = counts
    assert plain < corrected <= plain / LEAST + 1
    assert plant.decisions[-1].inputs["correction"] == pytest.approx(0.9, abs=0.02)


def test_first_tokens_that_no_replica_has_in_time_take_no_capacity() -> None:
    """A step alone takes 0.03 s and a prompt 0.04 s: all first tokens are late, however many replicas there are."""
    counts, corrections = [], []
    for late in (0.0, 1.0):
        plant = QueuePlant(replace(RULES, slo=replace(RULES.slo, ttft_s=0.05)), running=20, maximum=100, cold_start_s=40.0)
        for _ in range(900):
            load = plant.load(rate_of(20))
            plant.tick(replace(load, late_first_tokens=late * load.first_tokens))
        counts.append(plant.decisions[-1].desired)
        corrections.append(plant.decisions[-1].inputs["correction"])
        assert plant.decisions[-1].inputs["late_share"] == pytest.approx(late)
    assert corrections == [1.0, 1.0]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("unseen_s", "correction"), [(MEMORY_S - 1, LEAST), (MEMORY_S + 1, 1.0), (86_400.0, 1.0)])
def test_what_a_controller_measured_corrects_nothing_once_it_is_older_than_what_is_remembered(
    unseen_s: float, correction: float
) -> None:
    plant = LateWithoutQueue(running=20, maximum=100, late_share=0.2)
    plant.run(rate_of(20), 900)
    assert plant.decisions[-1].inputs["correction"] == pytest.approx(LEAST)
    plant.autoscaler.pass_unseen(unseen_s)
    plant.run(rate_of(20), 20)
    assert plant.decisions[-1].inputs["correction"] == pytest.approx(correction, abs=0.01)


def test_the_correction_that_is_reported_is_the_one_that_is_applied() -> None:
    """Short steps would allow a tenth more, but the utilization never exceeds the computed one that keeps the SLO: 1 / 0.95 is left."""
    plant = FastSteps(running=20, maximum=100, cold_start_s=40.0)
    plant.run(rate_of(20), 900)
    assert plant.decisions[-1].inputs["expected_itl_s"] > MOST * plant.decisions[-1].inputs["itl_s"]
    assert plant.decisions[-1].inputs["correction"] == pytest.approx(1 / 0.95)
