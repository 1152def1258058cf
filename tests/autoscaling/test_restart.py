"""Serve's controller dies, and the policy of the next one goes on with what the lease board kept."""

import pytest

from serve_app.autoscaling.policy import KEEP_S, OBSERVE_S, DemandPolicy
from tests.autoscaling.controller import BIG, INGRESS, MONDAY, SETTINGS, TINY, Controller


class Shelf:
    """Keeps what is known as the lease board does, and answers when ``answers``."""

    def __init__(self) -> None:
        self.data = b""
        self.answers = True

    def kept(self) -> bytes | None:
        return self.data if self.answers else None

    def keep(self, data: bytes) -> None:
        self.data = data


def with_shelf(controller: Controller, shelf: Shelf) -> DemandPolicy:
    return DemandPolicy(SETTINGS, lambda: controller.at % 997, lambda: MONDAY + controller.at, controller.notes.append, shelf)


def test_a_controller_that_dies_in_mid_load_is_followed_by_one_that_decides_the_same() -> None:
    """Two controllers see the same members; one of them dies, and its successor has another monotonic clock."""
    shelf, one, other = Shelf(), Controller(), Controller()
    one.policy, other.policy = with_shelf(one, shelf), with_shelf(other, Shelf())
    one.targets[TINY] = other.targets[TINY] = 1
    for second in range(90):
        if second == 60:
            one.state, one.policy = {}, with_shelf(one, shelf)
        for controller in (one, other):
            controller.reports[TINY] = {f"t{i}": {} for i in range(controller.targets[TINY])}
            controller.report(INGRESS, "i1", requests__tiny=3.0 * second, prompt_tokens__tiny=300.0 * second, streams=12.0)
            controller.report(INGRESS, "i1", prefilled_tokens__tiny=300.0 * second, output_tokens__tiny=300.0 * second)
            controller.report(INGRESS, "i1", finished__tiny=3.0 * second, finished_tokens__tiny=300.0 * second)
            for member in controller.reports[TINY]:
                controller.report(TINY, member, steps=10.0 * second, busy_s=0.9 * second, running=30.0, cold_start_s=20.0)
            controller.tick()
        assert one.targets == other.targets
    (kept,), (whole,) = ([s["memory"] for s in c.state.values()] for c in (one, other))
    mine, undisturbed = kept.decided["tiny"], whole.decided["tiny"]
    assert mine.inputs["taken_over_s"] <= KEEP_S + OBSERVE_S
    assert mine.inputs["demand"] == pytest.approx(undisturbed.inputs["demand"], rel=0.01)
    assert mine.rule == undisturbed.rule


def test_until_the_board_has_answered_every_deployment_keeps_its_target() -> None:
    controller, shelf = Controller(), Shelf()
    shelf.answers = False
    controller.state, controller.policy = {}, with_shelf(controller, shelf)
    assert controller.tick() == {}
    shelf.answers = True
    assert controller.tick() == {}, "nothing to count from yet"
    assert controller.tick() == {INGRESS: 1, TINY: 0, BIG: 1}
