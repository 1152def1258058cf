"""The policy keeps within bounds: schedules, silent members, and what `serve-app models` loads, unloads and pins."""

import pytest
from ray.serve.config import AutoscalingConfig

from serve_app.autoscaling.orders import DEFAULT_COLD_START_S
from serve_app.autoscaling.policy import DemandPolicy
from tests.autoscaling.controller import BIG, INGRESS, MONDAY, TINY, Controller, reporting_controller


class RememberingStore:
    """Keeps the data that it is given."""

    def __init__(self) -> None:
        self.data = b""

    def kept(self) -> bytes | None:
        return self.data

    def keep(self, data: bytes) -> None:
        self.data = data


@pytest.fixture
def controller() -> Controller:
    return reporting_controller()


@pytest.mark.parametrize("cold_start_s", [None, 20.0, 300.0])
def test_a_schedule_raises_the_minimum_a_cold_start_ahead_and_does_not_flap(cold_start_s: float | None) -> None:
    schedule = [{"days": ["mon"], "start": "00:30", "end": "00:31", "min": 3}]
    model = {"model": "/tiny", "replicas": {"min": 0, "max": 8, "schedule": schedule}, "required": False}
    controller = Controller({"models": {"tiny": model}})
    controller.reports = {INGRESS: {"i1": {"streams": 0.0}}, TINY: {}}
    controller.targets = {INGRESS: 1, TINY: 0}
    wanted = []
    while controller.at < 1900.0:
        controller.tick()
        wanted.append((controller.at, controller.targets[TINY]))
        if cold_start_s is not None and controller.targets[TINY]:
            controller.reports[TINY] = {f"t{n}": {"running": 0.0, "cold_start_s": cold_start_s} for n in range(3)}
    began = next(at for at, replicas in wanted if replicas == 3)
    assert began == 1800.0 - DEFAULT_COLD_START_S, "no start was measured before"
    assert {replicas for at, replicas in wanted if at >= began} == {3}
    while controller.at < 4000.0:
        controller.tick()
        controller.reports[TINY] = {f"t{n}": {"running": 0.0} for n in range(controller.targets[TINY])}
    assert controller.targets[TINY] == 0


def test_a_first_deployment_has_its_initial_replicas_and_an_upgrade_moves_no_target() -> None:
    settings = {"models": {"tiny": {"model": "/tiny", "replicas": {"min": 1, "max": 8, "initial": 3}}}}
    first = Controller(settings)
    first.policy._store = store = RememberingStore()
    first.targets, first.reports = {INGRESS: 1, TINY: 1}, {INGRESS: {"i1": {"streams": 0.0}}, TINY: {}}
    for _ in range(2):  # nothing is observed at the first one
        first.tick()
    assert first.targets[TINY] == 3
    upgraded = Controller(settings | {"logs": {"format": "json"}})
    upgraded.policy._store = store
    upgraded.at = first.at
    upgraded.targets, upgraded.reports = (
        {INGRESS: 1, TINY: 1},
        {INGRESS: {"i1": {"streams": 0.0}}, TINY: {"t1": {"running": 0.0}}},
    )
    for _ in range(2):
        upgraded.tick()
    assert upgraded.targets[TINY] == 1, "an operator has set it to one meanwhile"


def test_a_controller_that_finds_no_memory_leaves_replicas_that_run_as_they_are() -> None:
    restarted = Controller({"models": {"tiny": {"model": "/tiny", "replicas": {"min": 1, "max": 8, "initial": 3}}}})
    restarted.policy._store = RememberingStore()  # as while the lease board is away
    restarted.targets = {INGRESS: 1, TINY: 1}
    restarted.reports = {INGRESS: {"i1": {"streams": 0.0}}, TINY: {"t1": {"running": 0.0}}}
    for _ in range(3):
        restarted.tick()
    assert restarted.targets[TINY] == 1


def test_of_what_a_schedule_lowers_the_share_of_silent_members_stays(controller: Controller) -> None:
    schedule = [{"start": "00:30", "end": "01:00", "max": 1}]
    model = {"model": "/tiny", "replicas": {"min": 1, "max": 8, "schedule": schedule}}
    controller.policy = DemandPolicy({"models": {"tiny": model}}, now=lambda: controller.at, wall=lambda: MONDAY + controller.at)
    controller.targets = {INGRESS: 1, TINY: 4}
    controller.reports[TINY] = {f"t{n}": {"running": 0.0} for n in range(4)}
    controller.reports[INGRESS]["i2"] = {}
    controller.at = 1795.0
    for _ in range(60):
        controller.tick()
    assert controller.targets[TINY] == 2, "one of two ingresses does not report"
    del controller.reports[INGRESS]["i2"]
    controller.tick()
    assert controller.targets[TINY] == 1


def test_a_silent_ingress_stays_and_the_others_go(controller: Controller) -> None:
    controller.report(INGRESS, "i1", streams=35.0)
    assert controller.tick()[INGRESS] == 4
    for member in ("i2", "i3"):
        controller.report(INGRESS, member, streams=1.0)
    controller.report(INGRESS, "i1", streams=1.0)
    controller.reports[INGRESS] |= {"i4": {}}  # runs, and has never reported
    controller.tick()
    controller.silent_since["i3"] = controller.at
    wanted = [controller.tick()[INGRESS] for _ in range(300)]
    assert (wanted[0], wanted[-1]) == (4, 2)
    del controller.silent_since["i3"], controller.reports[INGRESS]["i4"]
    assert controller.tick()[INGRESS] == 1


def test_the_streams_of_a_silent_ingress_count_as_last_reported(controller: Controller) -> None:
    for member in ("i1", "i2"):
        controller.report(INGRESS, member, streams=15.0)
    assert controller.tick()[INGRESS] == 3
    controller.silent_since["i2"] = controller.at
    controller.report(INGRESS, "i1", streams=1.0)
    wanted = [controller.tick()[INGRESS] for _ in range(300)]
    assert (wanted[0], wanted[-1]) == (3, 2), "15 and 1, at 10 an ingress"


def two_idle_models() -> Controller:
    """Return a controller of two models with four replicas each and no requests."""
    model = {"replicas": {"min": 0, "max": 8}, "required": False}
    controller = Controller({"models": {"tiny": model | {"model": "/tiny"}, "big": model | {"model": "/big"}}})
    controller.targets = {INGRESS: 1, TINY: 4, BIG: 4}
    idle = {"running": 0.0, "waiting": 0.0}
    controller.reports = {INGRESS: {"i1": {"streams": 0.0}}}
    controller.reports |= {of: {f"{of.name}-{n}": dict(idle) for n in range(4)} for of in (TINY, BIG)}
    controller.tick()
    return controller


def test_a_silent_replica_stays_and_those_of_other_models_go() -> None:
    controller = two_idle_models()
    controller.silent_since["replica-big-3"] = controller.at
    for _ in range(400):
        controller.tick()
    assert controller.targets == {INGRESS: 1, TINY: 0, BIG: 1}
    del controller.silent_since["replica-big-3"]
    controller.tick()
    assert controller.targets[BIG] == 0


def test_an_unloaded_model_stays_unloaded_while_an_ingress_is_silent() -> None:
    controller = two_idle_models()
    controller.reports[INGRESS]["i2"] = {}
    controller.tick()
    controller.targets[TINY], controller.reports[TINY] = 0, {}  # `unload`
    for _ in range(300):
        controller.tick()
    assert controller.targets == {INGRESS: 1, TINY: 0, BIG: 2}


def operated(minimum: int) -> AutoscalingConfig:
    """Return the bounds of tiny in Serve's config after `serve-app models` has changed them."""
    return AutoscalingConfig(min_replicas=minimum, max_replicas=8)


def test_a_pinned_model_keeps_a_replica_and_an_unloaded_one_none_until_a_request_waits(controller: Controller) -> None:
    controller.configs[TINY] = operated(1)
    assert controller.tick()[TINY] == 1
    controller.report(TINY, "t1", steps=0.0)
    for _ in range(400):
        assert controller.tick()[TINY] == 1  # idle for long, and pinned
    controller.configs[TINY] = operated(0)
    controller.targets[TINY] = 0  # `unload`: Serve sets the target to the entry's initial_replicas
    del controller.reports[TINY]["t1"]
    controller.report(INGRESS, "i1", requests__tiny=3.0)  # its requests were on the replica that drains
    assert controller.tick(0.1).get(TINY, 0) == 0  # between two observations the older decision must not come back
    assert controller.tick()[TINY] == 0
    controller.report(INGRESS, "i1", waiting__tiny=1.0)
    assert controller.tick()[TINY] == 1


def test_the_minimum_of_the_configuration_does_not_load_an_unloaded_model(controller: Controller) -> None:
    controller.configs[BIG] = operated(0)
    controller.targets[BIG] = 0
    del controller.reports[BIG]["b1"]
    for _ in range(100):
        assert controller.tick()[BIG] == 0
    controller.configs[BIG] = operated(1)  # `load`
    assert controller.tick()[BIG] == 1
