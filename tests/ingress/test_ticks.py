"""Ticks let messages of replicas come in before the fleet judges their silence. Time is a number."""

import pytest

from serve_app.ingress.fleet import ticks
from tests.doubles.fleet import in_loop


@pytest.mark.parametrize(("late_s", "waits"), [(0.0, 1), (0.5, 1), (8.0, 2)])
@in_loop
async def test_after_a_standstill_the_loop_has_another_turn(late_s: float, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at, slept = 100.0, list[float]()

    async def sleep(delay_s: float) -> None:
        nonlocal at
        at += delay_s + (0.0 if slept else late_s)
        slept.append(delay_s)

    monkeypatch.setattr("serve_app.ingress.fleet.ticks.asyncio.sleep", sleep)
    monkeypatch.setattr("serve_app.ingress.fleet.ticks.time.monotonic", lambda: at)
    now = await ticks.next_tick()
    monkeypatch.undo()
    assert now == at
    assert len(slept) == waits
