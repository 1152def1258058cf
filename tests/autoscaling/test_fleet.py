from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Decision, Observation
from serve_app.autoscaling.fleet import (
    INGRESS_KEEP_S,
    INGRESSES,
    FleetObservation,
    FleetRules,
    FleetScaler,
    IngressObservation,
    Want,
    share_gpus,
)
from tests.autoscaling.plant import RULES, Plant
from tests.autoscaling.queue_plant import QueuePlant, rate_of

wants = st.lists(
    st.builds(
        Want,
        model=st.uuids().map(str),
        desired=st.integers(0, 30),
        minimum=st.integers(0, 2),
        target=st.integers(0, 30),
        gpus_per_replica=st.sampled_from([0, 1, 2, 8]),
        priority=st.integers(0, 2),
    ),
    max_size=6,
)


@given(wants, st.integers(0, 100))
def test_the_cost_cap_holds_beyond_the_minimums(asked: list[Want], extra: int) -> None:
    least = sum(min(w.desired, w.minimum) * w.gpus_per_replica for w in asked)
    granted = share_gpus(asked, least + extra)
    assert sum(granted[w.model] * w.gpus_per_replica for w in asked) <= least + extra
    for want in asked:
        assert min(want.desired, want.minimum) <= granted[want.model] <= want.desired
        assert want.gpus_per_replica or granted[want.model] == want.desired
        left = least + extra - sum(granted[w.model] * w.gpus_per_replica for w in asked)
        assert granted[want.model] == want.desired or want.gpus_per_replica > left, "a wanted GPU is idle"


def test_higher_priorities_come_first_and_equals_share() -> None:
    a = Want(model="a", desired=4, minimum=1, target=1, gpus_per_replica=1)
    b = Want(model="b", desired=8, minimum=1, target=1, gpus_per_replica=1)
    assert share_gpus([a, b], 6) == {"a": 2, "b": 4}
    assert share_gpus([replace(a, priority=1), b], 6) == {"a": 4, "b": 2}
    assert share_gpus([a, b], None) == {"a": 4, "b": 8}


def test_one_replica_more_or_less_than_its_share_stays_where_it_is() -> None:
    a = Want(model="a", desired=10, minimum=1, target=4, gpus_per_replica=2)
    b = Want(model="b", desired=11, minimum=1, target=5, gpus_per_replica=2)
    assert share_gpus([a, b], 18) == {"a": 4, "b": 5}
    assert share_gpus([replace(a, target=5), replace(b, target=4)], 18) == {"a": 5, "b": 4}
    assert share_gpus([replace(a, target=6), replace(b, target=3)], 18) == {"a": 4, "b": 5}
    assert share_gpus([replace(a, target=5, priority=-1), replace(b, target=4)], 18) == {"a": 1, "b": 8}
    assert share_gpus([replace(a, target=5), replace(b, target=3)], 18) == {"a": 4, "b": 5}, "a GPU is free"
    a, b = replace(a, desired=2, minimum=0, target=2), replace(b, desired=1, minimum=0, target=0)
    assert share_gpus([a, b], 4) == {"a": 1, "b": 1}, "no model is left without"


def test_what_a_model_only_keeps_against_chance_takes_no_gpu_from_another() -> None:
    """The first model wants one replica, and would keep a second if it had one; the other model wants two of three GPUs."""
    plants = {"a": QueuePlant(maximum=100), "b": QueuePlant(maximum=100, seed=2)}
    rules = replace(RULES, headroom=0.4, gpus_per_replica=1)
    scaler = FleetScaler(FleetRules(models={"a": replace(rules, priority=1), "b": rules}, max_gpus=3))
    for _ in range(600):
        rates = {"a": rate_of(0.85), "b": rate_of(1.5)}
        models = {name: plant.see(plant.load(rates[name])) for name, plant in plants.items()}
        decided = scaler.observe(FleetObservation(at=plants["a"].at, models=models))
        for name, plant in plants.items():
            plant.obey(decided[name])
    assert {name: decision.desired for name, decision in decided.items()} == {"a": 1, "b": 2}


def test_two_models_that_are_short_of_gpus_do_not_swap_them() -> None:
    plants = {"a": Plant(maximum=100), "b": Plant(maximum=100, seed=2)}
    rules = replace(RULES, gpus_per_replica=1)
    scaler = FleetScaler(FleetRules(models=dict.fromkeys(plants, rules), max_gpus=9))
    splits = []
    for _ in range(1800):
        models = {name: plant.see(plant.load(60.0)) for name, plant in plants.items()}
        decided = scaler.observe(FleetObservation(at=plants["a"].at, models=models))
        for name, plant in plants.items():
            plant.obey(decided[name])
        splits.append(tuple(decision.desired for decision in decided.values()))
    assert sum(splits[-1]) == 9
    assert sum(one != other for one, other in pairwise(splits)) <= 3


def observation(plant: Plant, rate: float) -> FleetObservation:
    seen = Observation(running=plant.running, target=plant.target, minimum=1, maximum=9, load=plant.load(rate))
    return FleetObservation(at=plant.at, models={"m": seen})


def decided(rules: FleetRules, seconds: int = 200) -> list[Decision]:
    plant, scaler, decisions = Plant(running=3), FleetScaler(rules), []
    for _ in range(seconds):
        plant.at += 1.0
        decisions.append(scaler.observe(observation(plant, 40.0))["m"])
    return decisions


def test_a_model_that_gets_fewer_gpus_than_it_wants_says_so() -> None:
    rules = FleetRules(models={"m": replace(RULES, gpus_per_replica=2)}, max_gpus=9)
    decision = decided(rules)[-1]
    assert (decision.desired, decision.wish) == (4, "GPUs are short")
    assert decision.alternatives["demand"] > 4


def test_an_unloaded_model_keeps_no_gpu_from_another_one() -> None:
    rules = replace(RULES, gpus_per_replica=1)
    scaler = FleetScaler(FleetRules(models={"a": rules, "b": rules}, max_gpus=2))
    plants = {"a": Plant(minimum=0), "b": Plant(minimum=0, seed=2)}

    def tick() -> dict[str, int]:
        models = {name: plant.see(plant.load(60.0 if plant.running else 0.0)) for name, plant in plants.items()}
        decisions = scaler.observe(FleetObservation(at=plants["b"].at, models=models))
        return {name: decision.desired for name, decision in decisions.items()}

    assert [tick() for _ in range(60)][-1] == {"a": 1, "b": 1}, "both would like more"
    plants["a"].running = 0  # `serve-app models unload a`
    assert tick() == {"a": 0, "b": 2}


def test_the_same_observations_give_the_same_decisions() -> None:
    rules = FleetRules(models={"m": RULES}, max_gpus=3)
    assert decided(rules) == decided(rules)


def test_short_gpus_do_not_go_to_and_fro_and_none_is_taken_while_the_only_ingress_is_silent() -> None:
    """Two models of one steady load each want more than half of the GPUs."""
    rules = replace(RULES, gpus_per_replica=1)
    scaler = FleetScaler(FleetRules(models={"a": rules, "b": rules, "vip": replace(rules, priority=1)}, max_gpus=8))
    plants = {"a": Plant(seed=1, running=4), "b": Plant(seed=2, running=4), "vip": Plant(seed=3, running=0)}
    rates = {"a": 60.0, "b": 60.0, "vip": 0.0}
    granted = []

    def tick(at: float, silent: tuple[str, ...] = ()) -> dict[str, int]:
        seen = {}
        for name, plant in plants.items():
            load = replace(plant.load(rates[name]), silent=silent, silent_ingress_share=float(len(silent)))
            load = load if plant.running else replace(load, waiting=load.requests)
            seen[name] = Observation(running=plant.running, target=plant.running, minimum=0, maximum=9, load=load)
        decisions = scaler.observe(FleetObservation(at=at, models=seen))
        for name, decision in decisions.items():
            plants[name].running = decision.desired
        return {name: decision.desired for name, decision in decisions.items()}

    for second in range(900):
        granted.append(tick(float(second)))
    assert sum(a != b for a, b in pairwise(granted[120:])) <= 6
    before = granted[-1]
    rates["vip"] = 80.0
    for second in range(900, 930):
        assert tick(float(second), silent=("ingress-1",))["a"] >= before["a"]
    for second in range(930, 1030):
        last = tick(float(second))
    assert last["vip"] > last["a"]


def ingress(streams: float, cores: float, *, target: int = 1, silent: tuple[str, ...] = ()) -> FleetObservation:
    seen = IngressObservation(
        running=target, target=target, minimum=1, maximum=5, streams=streams, cpu_s=cores, interval_s=1.0, silent=silent
    )
    return FleetObservation(at=0.0, models={}, ingress=seen)


@pytest.mark.parametrize(
    ("streams", "cores", "desired", "wish"),
    [(0, 0.0, 1, "keep"), (400, 0.5, 1, "keep"), (401, 0.5, 2, "streams"), (10, 1.5, 3, "cpu"), (9000, 0.1, 5, "streams")],
)
def test_ingresses_follow_streams_and_cpu(streams: float, cores: float, desired: int, wish: str) -> None:
    decision = FleetScaler(FleetRules(models={}, target_streams=400)).observe(ingress(streams, cores))[INGRESSES]
    assert (decision.desired, decision.wish) == (desired, wish)


def test_an_ingress_goes_when_it_was_not_needed_for_long_but_as_many_as_are_silent_stay() -> None:
    scaler = FleetScaler(FleetRules(models={}))

    def decide(target: int, silent: tuple[str, ...] = ()) -> tuple[int, str]:
        decision = scaler.observe(ingress(10, 0.1, target=target, silent=silent))[INGRESSES]
        return decision.desired, decision.wish

    two = "ingress-2", "ingress-3"
    for _ in range(int(INGRESS_KEEP_S)):
        assert decide(5) == (5, "keep")
    assert decide(5, two) == (5, "keep")
    assert decide(5, two) == (2, "silent members")
    assert decide(2, two) == (2, "silent members")
    assert decide(2, two[:1]) == (1, "low for long"), "one of the two reports again"


def test_a_pause_without_a_controller_is_no_time_without_need_of_ingresses() -> None:
    scaler = FleetScaler(FleetRules(models={}, target_streams=400))
    seen = ingress(1600, 0.1, target=4)
    assert scaler.observe(seen)[INGRESSES].desired == 4
    assert seen.ingress is not None
    late = replace(seen.ingress, streams=1200, interval_s=INGRESS_KEEP_S + 10)
    decision = scaler.observe(replace(seen, at=INGRESS_KEEP_S + 10, ingress=late))[INGRESSES]
    assert (decision.desired, decision.wish) == (4, "keep")
