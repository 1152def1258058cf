from dataclasses import replace

from serve_app.autoscaling.asleep import GIB, Sleepers
from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.signals import Asleep, ModelLoad
from serve_app.autoscaling.turns import IDLE_S
from tests.autoscaling.plant import RULES

SLEEPS = replace(RULES, gpus_per_replica=0.5, sleeps=True)
START_S = 60.0


def idle(*, target: int = 1, host_gib: float = 16.0, wake_s: float = 1.0, requests: float = 0.0) -> Observation:
    load = ModelLoad(interval_s=1.0, requests=requests, cold_start_s=(START_S,) * target)
    asleep = Asleep(wake_s=wake_s, host_bytes=host_gib * GIB)
    return Observation(running=target, target=target, minimum=0, maximum=1, load=load, asleep=asleep)


def staying(
    models: dict[str, Observation], max_gib: float | None = None, *, asked_at: dict[str, float] | None = None
) -> dict[str, str]:
    """Return which models stay at second 1000, each having had its last request at ``asked_at``."""
    sleepers = Sleepers()
    starts = dict.fromkeys(models, START_S)
    for name, at in sorted((asked_at or {}).items(), key=lambda pair: pair[1]):
        seen = {each: idle(requests=float(each == name)) for each in models}
        sleepers.staying(seen, starts, max_asleep_gib=None, at=at)
    return sleepers.staying(models, starts, max_asleep_gib=max_gib, at=1000.0)


def test_an_idle_engine_stays_asleep_while_host_memory_suffices() -> None:
    assert staying({"a": idle(), "b": idle()}) == {"a": "asleep", "b": "asleep"}


def test_an_engine_that_is_still_awake_is_left_to_fall_asleep() -> None:
    assert staying({"a": replace(idle(), asleep=None)}) == {"a": "awake"}


def test_an_engine_ends_whose_wake_up_takes_no_less_than_a_start() -> None:
    assert staying({"a": idle(wake_s=START_S), "b": idle(wake_s=START_S - 1)}) == {"b": "asleep"}


def test_where_host_memory_is_short_the_model_that_was_asked_last_stays() -> None:
    models = {"a": idle(), "b": idle()}
    assert staying(models, 16.0, asked_at={"b": 100.0, "a": 900.0}) == {"a": "asleep"}
    assert staying(models, 16.0, asked_at={"a": 100.0, "b": 900.0}) == {"b": "asleep"}


def test_where_host_memory_is_short_the_engine_stays_that_saves_more_for_each_byte() -> None:
    assert staying({"a": idle(host_gib=16.0), "b": idle(host_gib=4.0)}, 16.0) == {"b": "asleep"}
    assert staying({"a": idle(wake_s=1.0), "b": idle(wake_s=50.0)}, 16.0) == {"a": "asleep"}


def test_an_engine_that_holds_no_host_memory_stays_however_little_there_is() -> None:
    assert staying({"a": idle(host_gib=0.0)}, 0.0) == {"a": "asleep"}


def test_a_model_that_an_operator_unloads_does_not_stay() -> None:
    assert staying({"a": idle(target=0)}) == {}


def test_the_scaler_keeps_an_idle_engine_that_sleeps_and_says_so_and_ends_one_that_does_not_sleep() -> None:
    scaler = FleetScaler(FleetRules(models={"sleeps": SLEEPS, "ends": replace(SLEEPS, sleeps=False)}))
    decided = {}
    for second in range(900):
        models = {"sleeps": idle(), "ends": replace(idle(), asleep=None)}
        decided = scaler.observe(FleetObservation(at=float(second), models=models))
    assert (decided["sleeps"].desired, decided["sleeps"].wish) == (1, "asleep")
    assert (decided["ends"].desired, decided["ends"].wish) == (0, "low for long")


def test_a_sleeping_engine_gives_its_place_to_a_model_that_asks_for_a_first_replica() -> None:
    scaler = FleetScaler(FleetRules(models=dict.fromkeys("abc", SLEEPS), max_gpus=1.0))
    target = {"a": 1, "b": 1, "c": 0}
    wishes: dict[str, str] = {}
    for second in range(int(IDLE_S) + 300):
        asks = ModelLoad(interval_s=1.0, requests=1.0, waiting=1.0) if second > 200 else ModelLoad(interval_s=1.0)
        models = {name: idle(target=target[name]) for name in "ab"}
        models["c"] = Observation(running=0, target=target["c"], minimum=0, maximum=1, load=asks)
        decided = scaler.observe(FleetObservation(at=float(second), models=models))
        wishes |= {name: decision.wish for name, decision in decided.items() if target[name] and not decision.desired}
        target = {name: decision.desired for name, decision in decided.items()}
    assert target["c"] == 1
    assert sum(target.values()) == 2
    assert list(wishes.values()) == ["another model's turn"]
