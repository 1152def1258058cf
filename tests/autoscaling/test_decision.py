"""These tests follow one model's decisions.

A request of the plant is 0.08 s of work; the SLO allows a batch of 87, a utilization of about 0.6.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Decision, ScalingRules
from serve_app.autoscaling.needs import MIN_KEEP_S
from serve_app.autoscaling.orders import DEFAULT_COLD_START_S
from serve_app.autoscaling.signals import ModelLoad
from tests.autoscaling.plant import RULES, WORK_S, Plant


def test_a_steady_load_gets_the_replicas_that_keep_the_slo_and_no_other() -> None:
    plant = Plant()
    plant.run(25.0, 200)
    # 25 x 0.08 s = 2 replicas' work; 3 at 0.67 would be too much, 4 at 0.5 are enough.
    wanted = plant.run(25.0, 600)
    assert sum(w == 4 for w in wanted) >= 0.8 * len(wanted)
    last = plant.decisions[-1]
    assert last.inputs["demand"] == pytest.approx(2.0, rel=0.1)
    assert last.inputs["work_per_request_s"] == pytest.approx(WORK_S, rel=0.05)
    assert last.limit == "itl"


def test_a_step_in_the_load_is_answered_within_five_seconds_and_completely_within_thirty() -> None:
    plant = Plant()
    before = plant.run(12.0, 400)[-1]
    after = plant.run(36.0, 30)
    assert next(i for i, wanted in enumerate(after, 1) if wanted > before) <= 5
    assert after[-1] >= 5


@pytest.mark.parametrize("num_replicas", [30, 300])
def test_a_doubling_of_a_large_fleets_load_is_answered_nearly_completely_within_eight_seconds(num_replicas: int) -> None:
    """The step is thousands of requests, which must not be taken for the bursts of a bursty load."""
    rate = 0.6 * num_replicas / WORK_S
    plant = Plant(running=num_replicas, maximum=10 * num_replicas)
    before = plant.run(rate, 120)[-1]
    assert plant.run(2 * rate, 8)[-1] >= 1.75 * before


def test_less_load_takes_replicas_away_one_keep_time_after_it_was_last_needed() -> None:
    plant = Plant(cold_start_s=50.0)
    high = plant.run(25.0, 400)[-1]
    low = plant.run(5.0, 900)
    first = next(i for i, wanted in enumerate(low) if wanted < high)
    assert first >= 100, "two cold starts"
    assert low[-1] == 1
    assert "low for long" in {d.wish for d in plant.decisions[-900:]}


def test_a_load_that_grows_steadily_is_met_before_it_is_there() -> None:
    """12 requests/s more each minute: replicas are wanted for the rate of one cold start later."""
    plant = Plant(cold_start_s=120.0)
    plant.run(12.0, 300)
    for second in range(600):
        plant.tick(plant.load(12.0 + second / 5))
    decision = plant.decisions[-1]
    assert decision.inputs["growth"] == pytest.approx(120 / 5 * WORK_S, rel=0.4)
    assert decision.alternatives["growth"] > decision.alternatives["demand"]


def test_growth_makes_up_for_the_age_of_a_mean() -> None:
    """The mean of the last minute or more is the rate at its middle: for a growing load it would always be too small."""
    missing = []
    for seed in range(6):
        plant = Plant(seed=seed, cold_start_s=10.0)
        for second in range(400):
            demand = (1.0 + second / 15) * WORK_S
            known = plant.tick(plant.load(demand / WORK_S)).inputs
            if second >= 200:
                missing.append(1 - (known["demand"] + known["growth"]) / demand)
    assert fmean(missing) < 0.035


def test_a_step_is_no_growth() -> None:
    plant = Plant()
    plant.run(12.0, 300)
    plant.run(24.0, 300)
    most = max(d.inputs.get("growth", 0.0) for d in plant.decisions[-300:])
    assert most <= 0.25, "a quarter of a replica"


HEADROOMS = pytest.mark.parametrize("headroom", [0.0, ScalingRules(slo=RULES.slo).headroom])
"""Without room for steps the other rules decide; with the default room, the tests run what users run."""


@HEADROOMS
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000), rate=st.floats(5, 80))
def test_noise_makes_no_flapping(headroom: float, seed: int, rate: float) -> None:
    """Half an hour of Poisson arrivals at one rate changes the number of replicas by one, and back (three times with 2 of 60 seeds)."""
    plant = Plant(replace(RULES, headroom=headroom), seed=seed)
    plant.run(rate, 300)
    wanted = plant.run(rate, 1800)
    assert sum(a != b for a, b in pairwise(wanted)) <= 4
    assert max(wanted) - min(wanted) <= 1


@settings(max_examples=50)
@given(st.integers(0, 5), st.integers(0, 20), st.lists(st.floats(0, 300), min_size=1, max_size=40))
def test_the_count_stays_within_its_bounds(minimum: int, extra: int, rates: list[float]) -> None:
    plant = Plant(minimum=minimum, maximum=minimum + extra, running=minimum)
    for rate in rates:
        assert {minimum <= wanted <= minimum + extra for wanted in plant.run(rate, 10)} == {True}


@settings(max_examples=10)
@given(st.floats(1, 100), st.floats(1, 100))
def test_more_demand_never_gets_fewer_replicas(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert Plant().run(less, 300)[-1] <= Plant().run(more, 300)[-1]


@settings(max_examples=15)
@given(st.lists(st.floats(0, 40), min_size=1, max_size=30), st.sampled_from([1 / 3, 0.5, 1.0]))
def test_the_share_of_silent_members_stays(rates: list[float], share: float) -> None:
    plant = Plant()
    before = plant.run(25.0, 300)[-1]
    for rate in rates:
        for _ in range(20):
            decision = plant.tick(
                replace(plant.load(rate), silent=("ingress-1",), silent_ingress_share=share, assumed_share=share)
            )
            assert decision.desired >= math.ceil(share * before)


def test_one_silent_member_of_many_holds_up_neither_scaling_down_nor_learning() -> None:
    plant = Plant(running=30, maximum=200)
    high = plant.run(250.0, 300)[-1]
    for _ in range(600):
        plant.tick(replace(plant.load(25.0), silent=("ingress-3",), silent_ingress_share=0.02, assumed_share=0.02))
    assert plant.decisions[-1].desired <= 0.2 * high
    fresh = Plant()
    for _ in range(300):
        fresh.tick(replace(fresh.load(25.0), silent=("ingress-3",), silent_ingress_share=0.02, assumed_share=0.02))
    assert fresh.decisions[-1].inputs["work_per_request_s"] == pytest.approx(WORK_S, rel=0.05)


def without(load: ModelLoad, share: float, silent: tuple[str, ...] = ("r1",)) -> ModelLoad:
    """Return the known part of a load when a share of the replicas is silent."""
    known = 1 - share
    return replace(load, silent=silent, silent_replica_share=share, steps=known * load.steps, busy_s=known * load.busy_s)


def test_of_a_thousand_replicas_other_five_silent_each_second_hold_up_neither_scaling_down_nor_learning() -> None:
    rng = random.Random(1)

    def tick(plant: Plant, rate: float) -> Decision:
        silent = tuple(f"r{number}" for number in rng.sample(range(1000), 5))
        return plant.tick(without(plant.load(rate), 0.005, silent))

    plant = Plant(running=1000, maximum=4000)
    high = [tick(plant, 7500.0) for _ in range(300)][-1].desired
    low = [tick(plant, 750.0) for _ in range(600)][-1]
    assert 800 <= high <= 2000
    assert low.desired <= 0.2 * high
    assert low.inputs["work_per_request_s"] == pytest.approx(WORK_S, rel=0.05)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.25])
def test_silent_replicas_leave_learning_to_the_others(share: float) -> None:
    plant = Plant(running=20)
    for _ in range(300):
        plant.tick(without(plant.load(120.0), share))
    assert plant.decisions[-1].inputs["work_per_request_s"] == pytest.approx(WORK_S, rel=0.05)


def test_from_fewer_than_three_of_four_replicas_nothing_is_learnt() -> None:
    """The silent half may serve no client: then each of the others makes twice the assumed tokens."""
    plant = Plant()
    plant.run(25.0, 300)
    before = plant.decisions[-1].inputs["work_per_request_s"]
    for _ in range(300):
        load = plant.load(25.0)
        plant.tick(replace(load, silent=("replica-1",), silent_replica_share=0.5))
    assert plant.decisions[-1].inputs["work_per_request_s"] == pytest.approx(before, rel=0.01)


def test_when_one_of_two_silent_ingresses_reports_again_only_the_share_of_the_other_stays() -> None:
    plant = Plant(running=12)
    plant.run(1.0, 40)
    for _ in range(200):
        plant.tick(replace(plant.load(1.0), silent=("i1", "i2"), silent_ingress_share=0.5, assumed_share=0.5))
    assert plant.decisions[-1].desired == 6
    for _ in range(200):
        plant.tick(replace(plant.load(1.0), silent=("i1",), silent_ingress_share=0.25, assumed_share=0.25))
    assert (plant.decisions[-1].desired, plant.decisions[-1].wish) == (3, "silent members")


def test_replicas_that_have_not_reported_yet_make_no_request_larger() -> None:
    """One replica has reported 60 requests in a full KV cache, as 39 others begin to serve."""
    plant = Plant()
    reported: dict[str, Any] = {"running": 60.0, "kv_usage": 0.9, "reporting": 1}
    before = [plant.tick(replace(plant.load(5), **reported)) for _ in range(60)][-1]
    plant.running = 40
    after = plant.tick(replace(plant.load(5), **reported))
    assert after.inputs["saturation"] == pytest.approx(before.inputs["saturation"], rel=0.02)


def test_a_silent_member_does_not_hold_up_what_is_needed() -> None:
    plant = Plant()
    before = plant.run(12.0, 300)[-1]
    for _ in range(30):
        plant.tick(replace(plant.load(36.0), silent=("ingress-1",), silent_ingress_share=1.0, assumed_share=1.0))
    assert plant.decisions[-1].desired > before


def test_after_a_restart_of_the_controller_nothing_goes_at_once() -> None:
    plant = Plant(running=6)
    wanted = plant.run(5.0, 300)
    assert wanted[: int(MIN_KEEP_S)] == [6] * int(MIN_KEEP_S)
    assert wanted[-1] == 1


def test_the_first_request_starts_the_first_replica_and_the_last_goes_when_all_is_quiet() -> None:
    plant = Plant(minimum=0, running=0)
    assert plant.run(0.0, 20) == [0] * 20
    assert plant.tick(replace(plant.load(0.0), requests=1.0, prompt_tokens=400.0, waiting=1.0)).desired == 1
    assert plant.decisions[-1].wish == "first"
    assert plant.decisions[-1].ready_at == plant.at + plant.cold_start_s
    plant.run(2.0, 120)
    quiet = plant.run(0.0, 900)
    assert quiet[0] == 1
    assert quiet.index(0) <= 30 + 2 * plant.cold_start_s + 5, "half a minute of quiet, and two cold starts"
    assert quiet[-1] == 0


@HEADROOMS
@pytest.mark.parametrize("cold_start_s", [30.0, 120.0, 300.0])
def test_a_step_from_one_replica_overshoots_by_what_waits_meanwhile_and_no_more(cold_start_s: float, headroom: float) -> None:
    """50 requests/s are the work of 4 replicas, at a utilization of 0.6 that of 7. The queue rule alone would allow 13, which of 20 seeds
    three want where starts take 300 s; the four of this test want 12 at most. Of these, one beyond the 7 may be within chance and stay.
    """
    most, last = [], []
    for seed in range(1, 5):
        plant = Plant(replace(RULES, headroom=headroom), cold_start_s=cold_start_s, seed=seed)
        plant.run(6.0, 300)
        wanted = plant.run(50.0, 900)
        most.append(max(wanted))
        last.append(wanted[-1])
    assert max(most) <= 12
    assert fmean(most) <= 1.7 * 7
    assert fmean(last) <= 8.25
    assert min(last) == (8 if headroom and cold_start_s >= 120.0 else 7)


def test_without_a_measure_nothing_that_works_is_taken_away() -> None:
    """Answers are so long that none has ended: steps are known, lengths of answers are not."""
    plant = Plant(running=6)
    for _ in range(300):
        plant.tick(replace(plant.load(40.0), finished=0.0, finished_tokens=0.0, queued=50.0))
    assert plant.decisions[-1].limit == "unmeasured"
    assert min(d.desired for d in plant.decisions) == 6
    assert plant.decisions[-1].desired > 6


def test_a_request_a_replica_that_waits_for_the_end_of_a_step_is_no_queue_without_measure() -> None:
    plant = Plant(running=6)
    for _ in range(60):
        plant.tick(replace(plant.load(40.0), finished=0.0, finished_tokens=0.0, queued=6.0))
    assert {d.desired for d in plant.decisions} == {6}


def test_first_tokens_that_no_number_of_replicas_makes_early_do_not_fill_the_cluster() -> None:
    plant = Plant(replace(RULES, slo=replace(RULES.slo, ttft_s=0.05)))
    for _ in range(3600):
        load = plant.load(12.0)
        plant.tick(replace(load, late_first_tokens=load.first_tokens))
    assert plant.decisions[-1].desired <= 5


def test_a_member_that_drains_unheard_does_not_spoil_the_measure() -> None:
    plant = Plant()
    plant.run(25.0, 300)
    before = plant.decisions[-1].inputs["work_per_request_s"]
    for _ in range(300):
        load = plant.load(25.0)
        plant.tick(replace(load, steps=load.steps / 2, busy_s=load.busy_s / 2, is_partial=True))
    assert plant.decisions[-1].inputs["work_per_request_s"] == pytest.approx(before, rel=0.01)


def test_until_costs_are_measured_a_queue_asks_for_one_replica_at_a_time() -> None:
    plant = Plant()
    idle = ModelLoad(interval_s=1.0, queued=5.0, running=2.0, requests=3.0, prompt_tokens=1200.0)
    wanted = [plant.tick(idle).desired for _ in range(80)]
    assert wanted[0] == 1
    assert max(wanted[:20]) == 2, "one more, and no further one before it serves"
    assert plant.decisions[-1].inputs["cold_start_s"] == DEFAULT_COLD_START_S


@pytest.mark.parametrize(
    ("sign", "wish"),
    [
        ({"late_first_tokens": 10.0}, "late first tokens"),
        ({"rejected": 1.0}, "rejected"),
    ],
)
def test_signs_that_the_measure_is_wrong_ask_for_one_more_once_nothing_is_on_its_way(sign: dict[str, Any], wish: str) -> None:
    plant = Plant()
    before = plant.run(12.0, 300)[-1]
    decisions = [plant.tick(replace(plant.load(12.0), **sign)) for _ in range(25)]
    assert [d.desired for d in decisions[:2]] == [before] * 2, "a sign of a moment does not count"
    assert decisions[-1].desired == before + 1, "one, until it serves"
    assert wish in {d.wish for d in decisions}


def test_what_the_measure_missed_is_not_taken_away_to_be_missed_again() -> None:
    plant = Plant()
    plant.run(12.0, 300)
    for second in range(3600):
        load = plant.load(12.0)
        plant.tick(replace(load, late_first_tokens=load.first_tokens if second % 200 < 8 else 0.0))
    wanted = [d.desired for d in plant.decisions[600:]]
    assert len(set(wanted)) == 1
    assert wanted[0] > plant.decisions[-1].alternatives["demand"]
    quiet = plant.run(12.0, 1200)
    assert quiet[-1] == plant.decisions[-1].alternatives["demand"], "a quarter of an hour later it may be right"


@pytest.mark.parametrize("itl_s", [0.0306, 0.0307, 0.0308, 0.0309, 0.031])
def test_at_the_edge_of_what_an_itl_limit_allows_noise_does_not_decide(itl_s: float) -> None:
    """Without the limit one replica is enough; with it, at one request to a batch, it takes about 20."""
    plant = Plant(replace(RULES, slo=replace(RULES.slo, itl_s=itl_s)))
    plant.run(4.0, 600)
    wanted = plant.run(4.0, 3600)
    assert sum(abs(a - b) > 5 for a, b in pairwise(wanted)) <= 2


@pytest.mark.parametrize("gap_s", [61.0, 600.0])
def test_a_controller_that_stood_still_takes_nothing_away_at_once(gap_s: float) -> None:
    plant = Plant()
    before = plant.run(25.0, 400)[-1]
    plant.at += gap_s
    assert plant.tick(ModelLoad(interval_s=gap_s, running=50.0)).desired >= before
    assert min(plant.run(25.0, 60)) >= before


def test_what_waits_already_is_part_of_what_is_wanted() -> None:
    plant = Plant()
    before = plant.run(25.0, 400)[-1]
    decisions = [plant.tick(replace(plant.load(25.0), waiting=1500.0)) for _ in range(10)]
    assert "queue" in {d.wish for d in decisions}
    assert decisions[-1].desired > before


def test_lower_utilization_means_more_replicas() -> None:
    plain, careful = Plant(), Plant(replace(RULES, utilization=0.45))
    assert plain.run(25.0, 400)[-1] < careful.run(25.0, 400)[-1]


def test_a_decision_names_the_wishes_that_lost_and_when_its_replicas_serve() -> None:
    plant = Plant(maximum=3)
    plant.run(12.0, 300)
    plant.run(80.0, 20)
    decision = next(d for d in plant.decisions if d.ready_at is not None)
    assert decision.ready_at is not None
    last = plant.decisions[-1]
    assert (last.desired, last.wish) == (3, "maximum")
    assert last.alternatives["demand"] > 3
