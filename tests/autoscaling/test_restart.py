"""Serve's controller dies, and the policy of the next controller continues with what the lease board kept."""

import pytest

from serve_app.autoscaling.fleet import INGRESS_KEEP_S
from serve_app.autoscaling.memory import Memory
from serve_app.autoscaling.policy import KEEP_S, OBSERVE_S, DemandPolicy
from serve_app.autoscaling.signals import STALE_S
from tests.autoscaling.controller import BIG, INGRESS, MONDAY, SETTINGS, TINY, Controller


class Shelf:
    """Keeps the memory as the lease board does, and answers while ``answers`` is true."""

    def __init__(self) -> None:
        self.data = b""
        self.answers = True

    def kept(self) -> bytes | None:
        return self.data if self.answers else None

    def keep(self, data: bytes) -> None:
        self.data = data


def with_shelf(controller: Controller, shelf: Shelf) -> DemandPolicy:
    return DemandPolicy(SETTINGS, lambda: controller.at % 997, lambda: MONDAY + controller.at, controller.notes.append, shelf)


def report_load(controller: Controller, second: int) -> None:
    """Let all members report their counters under an even load of 3 requests/s. The replica of ``big`` gets no request."""
    controller.reports[TINY] = {f"t{i}": {} for i in range(controller.targets[TINY])}
    controller.reports[INGRESS] = {f"i{i}": {} for i in range(controller.targets[INGRESS])}
    for member in controller.reports[INGRESS]:
        share = second / len(controller.reports[INGRESS])
        controller.report(INGRESS, member, requests__tiny=3.0 * share, prompt_tokens__tiny=300.0 * share)
        controller.report(INGRESS, member, prefilled_tokens__tiny=300.0 * share, output_tokens__tiny=300.0 * share)
        controller.report(INGRESS, member, finished__tiny=3.0 * share, finished_tokens__tiny=300.0 * share)
        controller.report(INGRESS, member, streams=36.0 / len(controller.reports[INGRESS]))
    for member in controller.reports[TINY]:
        controller.report(TINY, member, steps=10.0 * second, busy_s=0.9 * second, running=30.0, cold_start_s=20.0)
    controller.report(BIG, "b1", running=0.0)


def loaded() -> tuple[Controller, Shelf]:
    """Return a controller in its 100th second of an even load, for which it wants four ingresses, and the store of its memory."""
    controller, shelf = Controller(), Shelf()
    controller.policy = with_shelf(controller, shelf)
    controller.targets[TINY] = 1
    for second in range(100):
        report_load(controller, second)
        controller.tick()
    assert controller.targets[INGRESS] == 4
    return controller, shelf


def memory_of(controller: Controller) -> Memory:
    (state,) = controller.state.values()
    memory = state["memory"]
    assert isinstance(memory, Memory)
    return memory


def test_a_controller_that_dies_in_mid_load_is_followed_by_one_that_decides_the_same() -> None:
    """Two controllers see the same members; one of them dies, and its successor has another monotonic clock."""
    shelf, one, other = Shelf(), Controller(), Controller()
    one.policy, other.policy = with_shelf(one, shelf), with_shelf(other, Shelf())
    one.targets[TINY] = other.targets[TINY] = 1
    for second in range(90):
        if second == 60:
            one.state, one.policy = {}, with_shelf(one, shelf)
        for controller in (one, other):
            report_load(controller, second)
            controller.tick()
        assert one.targets == other.targets
    mine, undisturbed = (memory_of(controller).decided["tiny"] for controller in (one, other))
    assert mine.inputs["taken_over_s"] <= KEEP_S + OBSERVE_S
    assert mine.inputs["demand"] == pytest.approx(undisturbed.inputs["demand"], rel=0.01)
    assert mine.wish == undisturbed.wish


def test_until_the_board_has_answered_every_deployment_keeps_its_target() -> None:
    controller, shelf = Controller(), Shelf()
    shelf.answers = False
    controller.state, controller.policy = {}, with_shelf(controller, shelf)
    assert controller.tick() == {}
    shelf.answers = True
    assert controller.tick() == {}, "there is no earlier report yet"
    assert controller.tick() == {INGRESS: 1, TINY: 0, BIG: 1}


@pytest.mark.parametrize(
    ("runs", "early_s"),
    [(True, 2), (False, 2), (False, 9)],
    ids=["members run, and have not reported", "no member is known", "for 9 s"],
)
@pytest.mark.parametrize("pause_s", [10, int(INGRESS_KEEP_S) + 10])
def test_a_new_controller_looks_when_its_members_have_reported_again(pause_s: int, runs: bool, early_s: int) -> None:
    """Serve calls the policy before members have reported: first without any running replica, then without reports."""
    controller, shelf = loaded()
    targets = dict(controller.targets)
    controller.state, controller.policy = {}, with_shelf(controller, shelf)
    controller.at += pause_s
    for second in range(100 + pause_s, 108 + pause_s + early_s):
        report_load(controller, second)
        if is_early := second < 100 + pause_s + early_s:
            controller.reports = {d: {m: {} for m in members} if runs else {} for d, members in controller.reports.items()}
        controller.tick()
        assert controller.targets == targets
        if not is_early:
            assert memory_of(controller).decided["tiny"].inputs["requests_per_s"] == pytest.approx(3.0, rel=0.03)
    memory = memory_of(controller)
    assert not memory.left_at, "all members are the same as before"
    assert not memory.scaler._models["tiny"]._orders._lasted_s, "nothing was ordered"


def test_a_member_that_died_with_the_controller_is_not_waited_for_longer_than_one_that_is_silent() -> None:
    controller, shelf = loaded()
    controller.state, controller.policy = {}, with_shelf(controller, shelf)
    decided = []
    for second in range(100, 110):
        report_load(controller, second)
        del controller.reports[INGRESS]["i3"]
        decided.append(controller.tick())
    assert [bool(targets) for targets in decided] == [False] * int(STALE_S) + [True] * (10 - int(STALE_S))
    assert "ingress" in memory_of(controller).left_at
