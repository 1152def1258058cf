"""`Sleeper` lets one replica's engine sleep: it claims the replica's GPUs at the lease board, and does what ``core/sleep.py`` decides."""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.serve.metrics import Gauge

from serve_app.checkpoints import resolve_model
from serve_app.config import ModelSettings, default_cache_dir
from serve_app.config.settings import TimeoutSettings
from serve_app.core.places import Applicant
from serve_app.core.sleep import Asked, Claim, Ended, EngineChanged, Event, Instruction, Looked, Order, Ordered, Phase, Sleep
from serve_app.errors import ClusterFailed, LeaseBoardSilent
from serve_app.host.tasks import raise_failure
from serve_app.membership import Membership
from serve_app.replica import pipe
from serve_app.replica.process import EngineProcess
from serve_app.replica.server import ReplicaServer
from serve_app.simulated.profiles import profile_from
from serve_app.simulated.sleeping import held_bytes

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
_RETRY_S = 0.5


def shared_gpus() -> tuple[str, ...]:
    """Return an id for each GPU that Ray gave this process, the same for all processes that it gave the GPU."""
    node = ray.get_runtime_context().get_node_id()
    return tuple(f"{node}:{gpu}" for gpu in ray.get_gpu_ids())


def host_bytes(model: ModelSettings) -> int:
    """Return the host memory that the engine's weights take while it sleeps, by the profile or by the checkpoint's files.

    It reads folders, also the hub's cache. 0 if the files are nowhere here, as of a checkpoint that is streamed.
    """
    assert model.sleep is not None
    if model.simulated is not None:
        return held_bytes(profile_from(model.simulated.profile), model.sleep.level)
    if model.sleep.level == 2:
        return 0
    folder = _folder(model)
    files = [] if folder is None else list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return sum(file.stat().st_size for file in files)


def _folder(model: ModelSettings) -> Path | None:
    from huggingface_hub import snapshot_download

    if os.path.isdir(path := resolve_model(model.model, default_cache_dir())):  # `Path.is_dir` raises for some names
        return Path(path)
    given = {name: value for name in ("revision", "download_dir") if isinstance(value := model.engine_args.get(name), str)}
    try:
        return Path(
            snapshot_download(path, revision=given.get("revision"), cache_dir=given.get("download_dir"), local_files_only=True)
        )
    except (OSError, ValueError):  # not in the cache, or not a name of the hub's
        return None


class Sleeper:
    """The sleep of one replica's engine.

    `run` is a task of the replica until its engine has ended. Before the engine starts, `get_place` waits for the GPU.
    """

    def __init__(self, model: ModelSettings, timeouts: TimeoutSettings, membership: Membership, replica_id: str) -> None:
        assert model.sleep is not None
        self._model, self._level, self._timeouts = model.name, model.sleep.level, timeouts
        self._membership = membership
        self._applicant = Applicant(replica_id, shared_gpus(), model.replicas.priority, membership.claim_expiry_s)
        self._sleep = Sleep(
            model.sleep.after_s, drain_s=timeouts.drain_s, expiry_s=self._applicant.expiry_s, now=time.monotonic()
        )
        self._engine: EngineProcess | None = None
        self._server: ReplicaServer | None = None
        self._placed = asyncio.Event()
        self._news = asyncio.Event()  # ends the wait of `run` for its next look: a change of places needs several looks in a row
        self._changing: asyncio.Task[None] | None = None
        self._claimed: tuple[Claim, asyncio.Task[Order | None]] | None = None
        self._numbers = itertools.count(1)
        self._is_unheard = False  # whether the board gave no answer last
        self._host_bytes = 0
        self._asleep = Gauge("serve_app_asleep", "1 while the engine of the model's replica sleeps.", ("model",))
        self._seconds = Gauge("serve_app_sleep_seconds", "What the engine's latest sleep and wake-up took.", ("model", "phase"))

    @property
    def phase(self) -> Phase:
        return self._sleep.phase

    def report(self) -> Mapping[str, float]:
        """Return the numbers for the autoscaler and the lease. The times are missing before the first sleep and wake-up."""
        sleep = self._sleep
        times = {"sleep_s": sleep.sleep_s, "wake_s": sleep.wake_s}
        known = {name: round(seconds, 3) for name, seconds in times.items() if seconds is not None}
        asleep = sleep.phase is Phase.ASLEEP
        return {"asleep": float(asleep), "wakes": float(sleep.num_wakes), "host_bytes": float(self._host_bytes * asleep), **known}

    async def get_place(self, running: asyncio.Task[None]) -> None:
        """Wait until this replica may put its engine on the GPU. ``running``: the task of `run`, whose error is raised."""
        placed = asyncio.ensure_future(self._placed.wait())
        try:
            await asyncio.wait((placed, running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            placed.cancel()
        raise_failure([running])

    def begin(self, engine: EngineProcess, server: ReplicaServer, host_bytes: int) -> None:
        """Take in that the engine is up and the replica listens. ``host_bytes``: what its weights take while it sleeps."""
        self._engine, self._server, self._host_bytes = engine, server, host_bytes
        server.on_wake = lambda: self._hear(Asked())
        self._take(EngineChanged())

    async def run(self) -> None:
        """Renew the claim and look at the attempts until cancelled. A board that does not answer is asked again."""
        try:
            while True:
                self._news.clear()
                self._look(0 if self._server is None else self._server.num_attempts())
                if self._changing is not None and self._changing.done():
                    self._changing.result()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._news.wait()
        finally:
            if self._claimed is not None:
                self._claimed[1].cancel()

    def end(self) -> bool:
        """Change nothing any more, and return whether the engine can finish requests. Called before the replica's last drain."""
        can_run = self.phase in (Phase.AWAKE, Phase.DRAINING)
        self._take(Ended())
        return can_run

    def _look(self, attempts: int) -> None:
        """Pass on what has happened, and renew the claim when it differs from the last, or when that was answered."""
        self._take(Looked(attempts))
        claim = self._sleep.claim(time.monotonic())
        if self._claimed is not None:
            claimed, answer = self._claimed
            if answer.done():
                self._claimed = None
                if (order := answer.result()) is not None and claim == claimed:  # an earlier claim's answer says nothing of this
                    self._take(Ordered(order))
                    claim = self._sleep.claim(time.monotonic())
            elif claim != claimed:
                answer.cancel()
                self._claimed = None
        if claim.holds:
            self._placed.set()
        if self._claimed is None:
            answer = asyncio.create_task(self._ask(claim), name="place")
            answer.add_done_callback(lambda _: self._news.set())
            self._claimed = claim, answer

    async def _ask(self, claim: Claim) -> Order | None:
        """Return the board's answer; None if it gives none. The first of several silences is logged.

        Raises:
            ClusterFailed: The board is too old to start an engine with. One that serves already serves on.
        """
        numbered = replace(claim, number=next(self._numbers))
        try:
            order = await self._membership.claim_place(self._applicant, numbered, self._sleep.order)
        except (LeaseBoardSilent, ClusterFailed) as exc:
            if isinstance(exc, ClusterFailed) and self.phase is Phase.STARTING:
                raise
            if not self._is_unheard:
                logger.warning("%s: no claim to a GPU in phase %s: %s", self._model, self.phase, exc.__cause__ or exc)
            self._is_unheard = True
            await asyncio.sleep(_RETRY_S)
            return None
        self._is_unheard = False
        return order

    def _hear(self, event: Event) -> None:
        self._take(event)
        self._news.set()

    def _take(self, event: Event) -> None:
        before = self.phase
        for instruction in self._sleep.handle(event, now=time.monotonic()):
            match instruction:
                case Instruction.START_DRAIN:
                    assert self._server is not None
                    self._server.sleep_drain(self._timeouts.drain_s)
                case Instruction.END_DRAIN:
                    assert self._server is not None
                    self._server.take_again()
                case Instruction.LET_GO:
                    assert self._server is not None
                    self._server.let_go()
                case Instruction.PUT_TO_SLEEP:
                    self._change(pipe.FallAsleep(self._level))
                case Instruction.WAKE_UP:
                    self._change(pipe.WakeUp(self._level))
        if self.phase is not before:
            logger.info("%s: %s", self._model, self.phase)
            self._show()

    def _change(self, order: pipe.FallAsleep | pipe.WakeUp) -> None:
        assert self._engine is not None
        done = self._engine.change(order, timeout_s=self._timeouts.engine_start_s)  # sent at once, before any later attempt
        self._changing = asyncio.create_task(self._note(done), name=type(order).__name__)

    async def _note(self, change: Coroutine[Any, Any, bool]) -> None:
        done = await change
        self._hear(EngineChanged() if done else Ended())

    def _show(self) -> None:
        self._asleep.set(float(self.phase is Phase.ASLEEP), {"model": self._model})
        for phase, seconds in (("sleep", self._sleep.sleep_s), ("wake", self._sleep.wake_s)):
            if seconds is not None:
                self._seconds.set(seconds, {"model": self._model, "phase": phase})
