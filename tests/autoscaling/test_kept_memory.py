"""An autoscaler's memory reaches the next controller, and only where it fits."""

import json
import logging
from collections.abc import Callable

import pytest

from serve_app.autoscaling import memory as module
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.history import HISTORY_S
from serve_app.autoscaling.memory import MAX_AGE_S, Memory, pack, unpack
from serve_app.autoscaling.model_autoscaler import UNSEEN_HALF_S, ModelAutoscaler
from tests.autoscaling.plant import RULES
from tests.autoscaling.queue_plant import QueuePlant, rate_of

NAME, DIGEST, TIME = "m", {"m": "weights"}, 1_795_392_000.0


def loaded(seconds: int = 120) -> tuple[QueuePlant, Memory]:
    """Return a plant in the middle of a step, and the memory of its autoscaler."""
    plant = QueuePlant(running=4, cold_start_s=40.0, seed=3)
    plant.run(rate_of(4), seconds)
    plant.run(1.5 * rate_of(4), 10)
    scaler = FleetScaler(FleetRules(models={NAME: RULES}), _models={NAME: plant.autoscaler})
    return plant, Memory(scaler, plant.at, models=dict(DIGEST))


def packed(memory: Memory) -> bytes:
    data = pack(memory, time=TIME)
    assert data is not None
    return data


def again(data: bytes, *, age_s: float = 1.0, models: dict[str, str] | None = None) -> Memory | None:
    return unpack(data, time=TIME + age_s, models=DIGEST if models is None else models, clock_s=7.0)


def model_of(memory: Memory | None) -> ModelAutoscaler:
    assert memory is not None
    return memory.scaler._models[NAME]


def test_a_new_controller_decides_the_same_on_the_next_tick_and_a_minute_on() -> None:
    plant, memory = loaded()
    taken = again(packed(memory))
    assert taken is not None
    assert taken.clock_s + 7.0 == plant.at + 1.0, "the memory's clock continues"
    for _ in range(60):
        seen = plant.see(plant.load(1.5 * rate_of(4)))
        decision = plant.autoscaler.observe(seen, at=plant.at)
        other = taken.scaler.observe(FleetObservation(at=plant.at, models={NAME: seen}))[NAME]
        inputs = dict(other.inputs)
        assert inputs.pop("taken_over_s") == 1.0
        assert (other.desired, other.wish, other.alternatives) == (decision.desired, decision.wish, decision.alternatives)
        assert inputs == pytest.approx(dict(decision.inputs), rel=0.02, abs=0.01)
        plant.obey(decision)


def test_a_controller_that_begins_anew_knows_nothing() -> None:
    """Without this, the test above would prove nothing."""
    plant, _ = loaded()
    seen = plant.see(plant.load(1.5 * rate_of(4)))
    anew = FleetScaler(FleetRules(models={NAME: RULES})).observe(FleetObservation(at=plant.at, models={NAME: seen}))[NAME]
    assert anew.limit == "unmeasured"


def test_older_knowledge_weighs_less_and_an_old_load_is_no_demand() -> None:
    plant, memory = loaded()
    data = packed(memory)
    young, old = model_of(again(data)), model_of(again(data, age_s=UNSEEN_HALF_S))
    assert old.step_costs.times() == young.step_costs.times() == plant.autoscaler.step_costs.times(), "nothing better is known"
    plant.autoscaler.step_costs.weigh(0.5)
    assert old.step_costs == plant.autoscaler.step_costs
    assert young._history.sums(plant.at, HISTORY_S).requests > 0
    assert old._history.sums(plant.at + UNSEEN_HALF_S, HISTORY_S).requests == 0
    assert old.cold_start_s == young.cold_start_s == 40.0


@pytest.mark.parametrize(("age_s", "counts"), [(10.0, True), (HISTORY_S + 1, False)])
def test_what_came_in_a_long_pause_is_not_counted_as_a_load_of_now(age_s: float, counts: bool) -> None:
    _, memory = loaded()
    memory.ingresses.take({"i1": (1.0, {"requests/m": 5.0})}, now=1.0)
    taken = again(packed(memory), age_s=age_s)
    assert taken is not None
    assert (taken.ingresses == memory.ingresses, taken.observed_at == memory.observed_at) == (counts, counts)


def test_knowledge_of_a_model_whose_replicas_are_others_now_is_left_out() -> None:
    _, memory = loaded()
    taken = again(packed(memory), models={NAME: "other weights"})
    assert taken is not None
    assert taken.scaler._models == {}


def broken(data: bytes) -> bytes:
    return data[: len(data) // 2]


def no_object(data: bytes) -> bytes:
    return b"[]"


def no_number(data: bytes) -> bytes:
    return json.dumps(json.loads(data) | {"time": None}).encode()


def of_another_version(data: bytes) -> bytes:
    return json.dumps(json.loads(data) | {"version": "of older code"}).encode()


@pytest.mark.parametrize(
    ("spoil", "age_s", "why"),
    [
        (broken, 1.0, "it is broken"),
        (no_object, 1.0, "it is broken"),
        (no_number, 1.0, "it is broken"),
        (of_another_version, 1.0, "it is of version 'of older code'"),
        (bytes, MAX_AGE_S + 1, "it is 86401 s old"),
        (bytes, -60.0, "it is -60 s old"),
    ],
)
def test_what_is_of_no_use_is_ignored_with_one_line(
    spoil: Callable[[bytes], bytes], age_s: float, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, memory = loaded(30)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert again(spoil(packed(memory)), age_s=age_s) is None
    (message,) = caplog.messages
    assert why in message


def test_what_is_too_large_is_neither_kept_nor_taken_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, memory = loaded(30)
    data = packed(memory)
    monkeypatch.setattr(module, "MAX_BYTES", len(data) - 1)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert pack(memory, time=TIME) is None
        assert again(data) is None
    assert [f"{len(data)} bytes" in message for message in caplog.messages] == [True, True]


def test_ten_minutes_of_one_model_are_far_below_the_limit() -> None:
    _, memory = loaded(700)
    assert len(packed(memory)) < module.MAX_BYTES / 20
