from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.needs import keep_s
from serve_app.autoscaling.orders import DEFAULT_COLD_START_S
from serve_app.autoscaling.signals import ModelLoad
from serve_app.autoscaling.turns import IDLE_S
from tests.autoscaling.plant import RULES

STAY_S = keep_s(DEFAULT_COLD_START_S)
START_S = 5
"""Seconds from a target of one to a replica that serves; the models here begin without a measured start."""


class Shared:
    """Models of one GPU each that share ``gpus``. ``busy`` models have a request at any time, which waits while there is no replica."""

    def __init__(self, names: str, gpus: int, pinned: str = "") -> None:
        rules = replace(RULES, gpus_per_replica=1)
        self.scaler = FleetScaler(FleetRules(models=dict.fromkeys(names, rules), max_gpus=gpus))
        self.minimum = {name: int(name in pinned) for name in names}
        self.target = dict.fromkeys(names, 0)
        self.began = dict.fromkeys(names, 0.0)
        self.wishes = dict.fromkeys(names, "")
        self.at = 0.0

    def serves(self, name: str) -> bool:
        return bool(self.target[name]) and self.at - self.began[name] >= START_S

    def second(self, busy: str) -> None:
        self.at += 1.0
        seen = {}
        for name, target in self.target.items():
            asks, serves = name in busy, self.serves(name)
            load = ModelLoad(
                interval_s=1.0, requests=float(asks), waiting=float(asks and not serves), running=float(asks and serves)
            )
            seen[name] = Observation(running=int(serves), target=target, minimum=self.minimum[name], maximum=1, load=load)
        for name, decision in self.scaler.observe(FleetObservation(at=self.at, models=seen)).items():
            if decision.desired and not self.target[name]:
                self.began[name] = self.at
            self.target[name], self.wishes[name] = decision.desired, decision.wish

    def seconds(self, number: float, busy: str) -> None:
        for _ in range(int(number)):
            self.second(busy)


@pytest.mark.parametrize(("first", "then"), ["ab", "ba"])
def test_an_idle_model_makes_room_for_one_that_is_asked_for(first: str, then: str) -> None:
    shared = Shared("ab", gpus=1)
    shared.seconds(START_S + 5, busy=first)
    assert shared.target == {first: 1, then: 0}
    shared.seconds(IDLE_S - 2, busy="")
    shared.second(busy=then)
    assert shared.target == {first: 1, then: 0}
    while shared.target[first]:
        shared.second(busy=then)
    assert shared.target == {first: 0, then: 1}
    assert shared.at <= START_S + 5 + IDLE_S + 2
    assert shared.wishes[first] == "another model's turn"


def test_without_anybody_who_asks_an_idle_model_stays_until_its_own_time() -> None:
    shared = Shared("ab", gpus=1)
    shared.seconds(START_S + 5, busy="a")
    shared.seconds(IDLE_S * 3, busy="")
    assert shared.target == {"a": 1, "b": 0}


def test_a_pinned_model_is_never_taken_away() -> None:
    shared = Shared("ab", gpus=1, pinned="a")
    for _ in range(int(5 * STAY_S)):
        shared.second(busy="b")
        assert shared.target == {"a": 1, "b": 0}


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3))
def test_busy_models_take_turns_none_shorter_than_its_stay_and_none_waits_longer_than_the_others_turns(
    num: int, gpus: int
) -> None:
    names = "abcd"[:num]
    shared = Shared(names, gpus)
    waits, turn = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for _ in range(int(6 * (STAY_S + START_S))):
        before = dict(shared.target)
        shared.second(busy=names)
        assert sum(shared.target.values()) == min(gpus, num), "a GPU is idle, or one too many is taken"
        for name in names:
            waits[name] = 0.0 if shared.target[name] else waits[name] + 1
            assert waits[name] <= (num - 1) * (STAY_S + START_S + 2)
            if before[name] and not shared.target[name]:
                assert turn[name] >= STAY_S + START_S
            turn[name] = turn[name] + 1 if shared.target[name] else 0.0


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["", "a", "b", "ab"]), min_size=200, max_size=400))
def test_under_any_load_a_model_that_was_started_serves_before_it_goes(busy: list[str]) -> None:
    shared = Shared("ab", gpus=1)
    for who in busy:
        before = {name: target for name, target in shared.target.items() if target}
        shared.second(who)
        assert sum(shared.target.values()) <= 1
        for name in before:
            assert shared.target[name] or shared.at - shared.began[name] >= START_S + IDLE_S
