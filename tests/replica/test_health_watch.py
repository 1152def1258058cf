"""The supervisor continues when it cannot look at its engine's processes, as no file descriptor is left."""

import asyncio
import errno
import os

import pytest

from serve_app.core.health import HealthLimits, ProcessUse
from serve_app.errors import EngineHung
from serve_app.replica import health, pipe, process_group
from serve_app.replica.health import EngineWatch
from tests.doubles.fleet import in_loop, until


def no_descriptor(_: object) -> dict[int, ProcessUse]:
    raise OSError(errno.EMFILE, "Too many open files")


@in_loop
async def test_a_supervisor_that_cannot_look_keeps_pinging_and_looks_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[pipe.ToEngine] = []
    hung: list[EngineHung] = []
    limits = HealthLimits(probe_after_s=60.0, eject_after_s=60.0, max_step_s=60.0, max_gap_s=1.0)
    watch = EngineWatch(limits, send=sent.append, on_hung=hung.append)
    monkeypatch.setattr(health, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(health, "group_use", no_descriptor)
    running = asyncio.create_task(watch.run(os.getpid()))
    await until(lambda: len(sent) > 3 or running.done())
    monkeypatch.setattr(health, "group_use", lambda leader: {leader: ProcessUse(0.0, stopped=False)})
    num_blind = len(sent)
    await until(lambda: len(sent) > num_blind + 3 or running.done())
    running.cancel()
    assert (set(sent), hung) == ({pipe.Ping(probe=False)}, [])
    assert [r.getMessage() for r in caplog.records] == [
        "no look at the engine's processes: [Errno 24] Too many open files; the engine is not judged while this lasts"
    ]


def test_a_process_that_cannot_be_read_is_not_taken_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_use_of", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        process_group.group_use(os.getpgid(0))
