"""`Sleeper` runs with a real lease board and a real listener; engines that fall asleep and wake at once stand in for engine cores."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from serve_app.config import ModelSettings, Settings
from serve_app.core import sleep
from serve_app.core.fleet import WAKE_EVERY_S
from serve_app.core.places import Applicant
from serve_app.core.sleep import Claim, Order, Phase
from serve_app.errors import ClusterFailed, LeaseBoardSilent
from serve_app.membership import LeaseBoard, Membership
from serve_app.replica import pipe, sleeper
from serve_app.replica.process import EngineProcess
from serve_app.replica.sleeper import Sleeper
from tests.doubles.fleet import MODEL, FakeReplica, fleet, in_loop, settings, start_replica, until

GIB_OF_LLAMA = 16_060_522_496


@dataclass
class Engine:
    """Stands in for the engine's process. ``works``: whether its changes succeed."""

    works: bool = True
    changes: list[str] = field(default_factory=list)
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_finish.set()

    def change(self, order: pipe.FallAsleep | pipe.WakeUp, *, timeout_s: float) -> Coroutine[None, None, bool]:
        self.changes.append(type(order).__name__)
        return self._finish()

    async def _finish(self) -> bool:
        await self.may_finish.wait()
        return self.works


def old_board() -> LeaseBoard:
    """Return a board that grants at once: it began so long ago that it knows all holders."""
    ages = itertools.chain([100.0], itertools.repeat(0.0))
    return LeaseBoard(0.2, now=lambda: time.monotonic() - next(ages))


@dataclass
class Board:
    """The lease board of a process without Ray. ``is_away``: it does not answer."""

    board: LeaseBoard = field(default_factory=old_board)
    is_away: bool = False
    is_old: bool = False
    claim_expiry_s: float = 60.0
    num_refused: int = 0

    async def claim_place(self, applicant: Applicant, claim: Claim, seen: Order) -> Order:
        if self.is_old:
            self.num_refused += 1
            raise ClusterFailed("too old", "restart")
        if self.is_away:
            raise LeaseBoardSilent(retry_after_s=1.0)
        return await self.board.claim_place(applicant, claim, seen, 0.1)


@dataclass
class Sleeping:
    sleeper: Sleeper
    engine: Engine
    replica: FakeReplica


def of_one_gpu(after_s: float) -> Settings:
    model = {"model": "/models/tiny", "simulated": {"profile": "a10g-llama-8b"}, "sleep": {"after_s": after_s}}
    return settings(models={MODEL: model})


@asynccontextmanager
async def sleeping(board: Board, name: str, *, after_s: float = 1000.0, engine: Engine | None = None) -> AsyncIterator[Sleeping]:
    values = of_one_gpu(after_s)
    engine = engine or Engine()
    model: ModelSettings = values.models[MODEL]
    one = Sleeper(model, values.timeouts, cast(Membership, board), name)
    running = asyncio.create_task(one.run())
    await one.get_place(running)
    replica = await start_replica(values, name)
    one.begin(cast(EngineProcess, engine), replica.server, sleeper.host_bytes(model))
    try:
        yield Sleeping(one, engine, replica)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await replica.close()


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeper, "shared_gpus", lambda: ("node:0",))
    monkeypatch.setattr(sleep, "ASKED_S", WAKE_EVERY_S + 0.5)  # also how long a new replica waits for its first request


async def reach(one: Sleeping, phase: Phase) -> None:
    await until(lambda: one.sleeper.phase is phase)


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [({"a.safetensors": 3, "b.safetensors": 4, "a.bin": 9}, 7), ({"a.bin": 9, "config.json": 1}, 9)],
    ids=["safetensors", "bin"],
)
def test_the_host_memory_of_a_sleeping_model_of_the_hub_is_the_size_of_its_files_in_the_cache(
    files: dict[str, int], num_bytes: int, tmp_path: Path
) -> None:
    repository, commit = tmp_path / "models--org--tiny", "0" * 40
    (snapshot := repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name, size in files.items():
        (snapshot / name).write_bytes(b"x" * size)
    keys = {"device": "cuda", "gpus_per_replica": 1, "sleep": {}, "engine_args": {"download_dir": str(tmp_path)}}
    for name, expected in (("org/tiny", num_bytes), ("org/other", 0), (str(snapshot), num_bytes)):
        assert sleeper.host_bytes(settings(models={MODEL: keys | {"model": name}}).models[MODEL]) == expected


@in_loop
async def test_an_idle_engine_falls_asleep_and_wakes_for_a_request() -> None:
    async with sleeping(Board(), "a", after_s=0.01) as one, fleet(of_one_gpu(0.01)) as f:
        await reach(one, Phase.ASLEEP)
        assert one.sleeper.report()["host_bytes"] == GIB_OF_LLAMA
        f.client.set_members([one.replica.lease])
        await until(f.client.is_ready)
        request = await f.front.add("r1", [1], max_tokens=2)
        await until(lambda: one.replica.engine.running)
        assert one.engine.changes == ["FallAsleep", "WakeUp"]
        one.replica.engine.step(2)
        await until(lambda: request.finished)
        assert one.sleeper.report()["wakes"] == 1


@in_loop
async def test_a_wish_is_looked_at_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sleeping(Board(), "a", after_s=0.01) as one:
        await reach(one, Phase.ASLEEP)
        monkeypatch.setattr(sleeper, "_LOOK_EVERY_S", 3600.0)
        one.replica.server.on_wake()
        await reach(one, Phase.AWAKE)


@in_loop
async def test_a_second_replica_starts_only_when_the_first_sleeps() -> None:
    board = Board()
    async with sleeping(board, "a") as first, sleeping(board, "b") as second:
        assert first.sleeper.phase is Phase.ASLEEP
        assert second.sleeper.phase is Phase.AWAKE
        assert first.engine.changes == ["FallAsleep"]


@in_loop
async def test_while_the_board_is_away_an_awake_engine_serves_on_and_a_sleeping_one_sleeps_on() -> None:
    board = Board()
    async with sleeping(board, "a") as first, sleeping(board, "b") as second, fleet(of_one_gpu(1000.0)) as f:
        board.is_away = True
        f.client.set_members([first.replica.lease])
        await until(f.client.is_ready)
        await f.front.add("r1", [1], max_tokens=2)
        await until(lambda: first.sleeper._claimed is not None and first.sleeper._claimed[0].wants)
        assert (first.sleeper.phase, second.sleeper.phase) == (Phase.ASLEEP, Phase.AWAKE)
        board.is_away = False
        await until(lambda: first.replica.engine.running)
        assert second.sleeper.phase is Phase.ASLEEP


@in_loop
async def test_a_wake_up_that_fails_takes_no_requests() -> None:
    engine = Engine()
    async with sleeping(Board(), "a", after_s=0.01, engine=engine) as one, fleet(of_one_gpu(0.01)) as f:
        await reach(one, Phase.ASLEEP)
        engine.works = False
        f.client.set_members([one.replica.lease])
        await until(f.client.is_ready)
        await f.front.add("r1", [1], max_tokens=2)
        await reach(one, Phase.ENDING)
        assert one.replica.server.draining


@in_loop
async def test_a_replica_that_ends_asleep_cannot_finish_requests_and_one_awake_can() -> None:
    async with sleeping(Board(), "a", after_s=0.01) as one:
        await reach(one, Phase.ASLEEP)
        assert not one.sleeper.end()
    async with sleeping(Board(), "b") as other:
        assert other.sleeper.end()


@in_loop
async def test_a_replica_that_ends_while_its_engine_wakes_does_not_wait_for_it() -> None:
    engine = Engine()
    async with sleeping(Board(), "a", after_s=0.01, engine=engine) as one:
        await reach(one, Phase.ASLEEP)
        engine.may_finish.clear()
        one.replica.server.on_wake()
        await reach(one, Phase.WAKING)
        assert not one.sleeper.end()
        assert one.sleeper.phase is Phase.ENDING
        engine.may_finish.set()


@in_loop
async def test_an_engine_is_told_to_sleep_before_any_attempt_that_comes_after_the_decision() -> None:
    engine = Engine()
    engine.may_finish.clear()
    async with sleeping(Board(), "a", engine=engine) as one:
        one.sleeper._change(pipe.FallAsleep(1))
        assert engine.changes == ["FallAsleep"]
        engine.may_finish.set()


@in_loop
async def test_a_start_fails_where_the_lease_board_is_too_old_for_places() -> None:
    with pytest.raises(ClusterFailed, match="too old; restart"):
        async with sleeping(Board(is_old=True), "a"):
            pass


@in_loop
async def test_an_engine_that_serves_outlives_a_board_that_is_too_old_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    async with sleeping(board, "a") as one:
        board.is_old = True
        await until(lambda: board.num_refused >= 3)
        assert caplog.text.count("too old") == 1
        assert one.sleeper.phase is Phase.AWAKE


@in_loop
async def test_an_attempt_at_a_sleeping_engine_whose_gpu_another_has_waits_at_its_ingress() -> None:
    board = Board()
    async with sleeping(board, "a") as first, sleeping(board, "b"), fleet(of_one_gpu(1000.0)) as f:
        board.is_away = True  # so that the first cannot get its GPU
        first.replica.server.take_again()  # an ingress that has not heard of the drain
        f.client.set_members([first.replica.lease])
        await until(f.client.is_ready)
        await f.front.add("r1", [1], max_tokens=2)
        await until(lambda: first.sleeper._sleep.claim(time.monotonic()).wants)
        assert first.sleeper.phase is Phase.ASLEEP
        first.replica.server.sleep_drain(0.0)
        await until(lambda: not first.replica.server.num_attempts())
        await until(lambda: "r1" in f.client.fleet.waiting)
        board.is_away = False
        await until(lambda: first.replica.engine.running)
