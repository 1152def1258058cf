"""Middle tokens wait for a pass, which writes them together; ends and errors wait for none."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serve_app.core.instructions import FailRequest
from serve_app.errors import NoReplica
from serve_app.ingress.shortcuts import pace
from serve_app.ingress.shortcuts.pace import Pace
from serve_app.ingress.shortcuts.streaming import Stream, Streams
from tests.doubles.fleet import FakeReplica, in_loop, until
from tests.ingress.streams import COMPLETIONS, Ingress, Play, serving
from tests.shortcuts import of_shortcuts

pytestmark = [pytest.mark.engine, of_shortcuts]


def text_of_all(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


class Written(Stream):
    """A stream that adds its name to ``written`` when it is written."""

    def __init__(self, name: str, written: list[str]) -> None:
        self._name, self._written = name, written

    def write(self, *, slow_too: bool = False) -> bool:
        self._written.append(self._name)
        return True


def have_come(ingress: Ingress, num_repeated: int) -> bool:
    return ingress.num_repeated == num_repeated


async def waiting(ingress: Ingress, replica: FakeReplica, num: int) -> Play:
    """Return an answer whose last ``num`` tokens wait for a pass that does not come."""
    play = Play(ingress, COMPLETIONS)
    await until(lambda: replica.engine.running)
    for _ in range(3):
        await play.step(replica)
    events, repeated = play.num_events(), ingress.num_repeated
    ingress.streams._pace = own = Pace()  # its own, so that the streams of other tests are written
    own._next_at = time.monotonic() + 3600.0
    for number in range(1, num + 1):
        replica.engine.step()
        await until(partial(have_come, ingress, repeated + number))
    assert play.num_events() == events
    return play


@in_loop
async def test_tokens_that_come_before_the_next_pass_become_one_event(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18134) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, COMPLETIONS)
        await whole.to_end(replica)
        play = await waiting(ingress, replica, 5)
        events = play.num_events()
        ingress.streams.write_all()
        await until(lambda: play.num_events() == events + 1)
        await play.to_end(replica)
        assert (play.text(), play.ends()) == (whole.text(), whole.ends())


@in_loop
async def test_what_waits_for_a_pass_comes_before_the_error_that_ends_the_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model, monkeypatch, 18135) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, COMPLETIONS)
        await whole.to_end(replica)
        play = await waiting(ingress, replica, 5)
        (request_id,) = ingress.front.client._requests
        ingress.front.client._carry_out([FailRequest(request_id, NoReplica(model="tiny", waited_s=1.0, retry_after_s=1.0))])
        await play.task
        *events, error = play.told()
        said = text_of_all(events)
        assert (error["error"]["type"], len(events), said) == ("no_replica", 4, whole.text()[: len(said)])
        assert len(said) > len(text_of_all(events[:3]))


@in_loop
async def test_what_waits_for_a_pass_comes_before_the_error_at_the_end_of_a_drain(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model, monkeypatch, 18137) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, COMPLETIONS)
        await whole.to_end(replica)
        play = await waiting(ingress, replica, 5)
        before = text_of_all(play.told())
        ingress.app.end_all()
        await play.task
        *events, error = play.told()
        said = text_of_all(events)
        assert (error["error"]["type"], len(events), said) == ("server_stopping", 4, whole.text()[: len(said)])
        assert len(said) > len(before)


@in_loop
async def test_the_passes_of_two_models_take_the_time_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "_pace", Pace(), raising=False)
    monkeypatch.setattr(pace, "MAX_PAUSE_S", 3600.0)
    monkeypatch.setattr(pace, "MAX_SHARE", 1e-12)  # whatever a pass takes, the next one is an hour later
    written, (one, other) = list[str](), (Streams(lambda _: None, None), Streams(lambda _: None, None))
    one._unwritten["r1"] = Written("r1", written)
    one.write()
    other._unwritten["r2"] = Written("r2", written)
    other.write()
    assert written == ["r1"]
    other.write_all()
    assert written == ["r1", "r2"]


@in_loop
async def test_the_last_tokens_of_an_answer_wait_for_no_pass(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18136) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, COMPLETIONS)
        await whole.to_end(replica)
        play = await waiting(ingress, replica, 5)
        while replica.engine.running:
            replica.engine.step()
            await asyncio.sleep(0)
        await play.task
        assert (play.text(), play.ends()) == (whole.text(), whole.ends())
