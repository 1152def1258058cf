"""`EngineProcess` starts one engine core process, passes messages, and ends it: the supervisor's side of ``replica/engine.py``."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from msgspec.structs import replace

from serve_app.config import HealthSettings, ModelSettings
from serve_app.core.health import HealthLimits
from serve_app.core.step_costs import MeasuredCosts
from serve_app.engine_args import NodeOfEngine, engine_core_args, engine_environment
from serve_app.errors import EngineDied, EngineHung, EngineLost, EngineOutOfMemory, EngineStartFailed
from serve_app.replica import pipe
from serve_app.replica.child import EngineChild
from serve_app.replica.forks import ForkServers
from serve_app.replica.golden import ask_all
from serve_app.replica.health import LOOK_EVERY_S, MAX_GAP_S, EngineWatch, answers_probe
from serve_app.replica.members import Members
from serve_app.replica.oom_kills import OomKills

logger = logging.getLogger(__name__)

_NOT_MEASURED = (
    "this engine could not measure what its steps cost, because they took too long or failed. Unless another replica of the model has "
    "measured them, the GPU-seconds of requests are unknown, tenants share the model by guessed costs, and the autoscaler learns the "
    "costs from the load alone. Start the replica again while the machine is less busy."
)


def _log_failure(watching: asyncio.Task[None]) -> None:
    """Log why a watch failed. Its pings have stopped, too, so the engine core is about to end both processes."""
    if not watching.cancelled() and (exc := watching.exception()) is not None:
        logger.error("the watch over the engine failed", exc_info=exc)


class EngineProcess:
    """One engine core process. ``on_message`` gets the messages after ``EngineReady``; ``on_lost`` is called once, after its end.

    The engine may have ``members`` on other nodes: they end with it, and it ends with each of them.
    """

    def __init__(
        self,
        health: HealthSettings,
        *,
        on_message: Callable[[pipe.FromEngine], None],
        on_lost: Callable[[EngineLost], None],
    ) -> None:
        self._child = EngineChild(self._message, self._closed)
        self._members: Members | None = None
        self._health = health
        self._on_message = on_message
        self._on_lost = on_lost
        self._ready: asyncio.Future[pipe.EngineReady] | None = None
        self._first_token: asyncio.Future[None] | None = None
        self._golden: asyncio.Future[pipe.GoldenAnswer] | None = None
        self._changed: asyncio.Future[str] | None = None
        self._measured: MeasuredCosts | None = None
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure = ""
        self._oom_kills = OomKills()
        self._over = False

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def start(
        self,
        model: ModelSettings,
        model_path: Awaitable[str],
        *,
        environment: Mapping[str, str],
        timeout_s: float,
        max_frame_bytes: int,
        measures_itself: bool = False,
        node: NodeOfEngine | None = None,
        members: Members | None = None,
        servers: ForkServers | None = None,
    ) -> pipe.EngineReady:
        """Start the process and wait until its engine has made a token and answered the golden prompts.

        Args:
            model_path: Awaited while the process imports vLLM, which takes as long as many a download. Its errors are passed on.
            timeout_s: Limit for the engine's first token, from when it has the path.
            max_frame_bytes: Limit of the frames of its outputs.
            measures_itself: Whether the engine core measures the costs of its steps, which it does in any case for the autoscaler, and
                where KV moves.
            node: The place of this process in an engine over several nodes.
            members: The engine's other nodes, all of which have joined. They are let go with the process.
            servers: The fork servers that make the process, if they can.

        Raises:
            EngineStartFailed: The process or a member ended, had no token in time, or a golden prompt's answer was wrong or late. None
                runs any longer.
        """
        loop = asyncio.get_running_loop()
        self._ready, self._first_token = loop.create_future(), loop.create_future()
        try:
            if members is not None:
                self._members = members
                members.watch(self._member_lost)
            own = {} if node is None else node.environment()
            await self._child.spawn(engine_environment(model, {**environment, **own}), servers)
            args = engine_core_args(model, await self._unless_it_ends(model_path), node)
            self._hand_over(model, args, max_frame_bytes, measures_itself=measures_itself)
            async with asyncio.timeout(timeout_s):
                ready = await self._make_first_token(await self._ready)
            await ask_all(model.name, model.golden, self._ask_golden, lambda: self.send(pipe.Ping(probe=False)))
            self._begin_watch(model)
            return ready
        except TimeoutError:
            missing = "not ready" if self._ready.cancelled() else "ready, but without a first token"
            raise EngineStartFailed(model=model.name, reason=f"{missing} after {timeout_s:g} s") from None
        except EngineStartFailed as failed:
            raise EngineStartFailed(model=model.name, reason=failed.reason) from None
        finally:
            if self._watching is None:  # the start failed, was cancelled, or found no free file descriptor
                self._ready.cancel()
                await self.stop()

    def _hand_over(self, model: ModelSettings, args: Mapping[str, Any], max_frame_bytes: int, *, measures_itself: bool) -> None:
        """Send the process the arguments of its engine, ``args`` among them."""
        start = {
            "engine_args": args,
            "device": model.device,
            "max_frame_bytes": max_frame_bytes,
            "supervisor_silence_s": self._health.eject_after_s,
            # A simulated accelerator measures as long as the one that it simulates.
            "measures_itself": measures_itself or model.replicas.is_scaled or model.kv.is_on,
            "measured_as": "cuda" if model.simulated is not None else model.device,
        }
        self._child.hand_over(start)

    async def _make_first_token(self, ready: pipe.EngineReady) -> pipe.EngineReady:
        """Make the first token before any request: some engines fail or hang with it. Its time is added to that of the warm-up."""
        assert self._first_token is not None
        began = time.monotonic()
        self.send(pipe.Ping(probe=True))
        try:
            while not (await asyncio.wait([self._first_token], timeout=LOOK_EVERY_S))[0]:
                self.send(pipe.Ping(probe=False))  # the engine core kills a supervisor that falls silent after a ping
            self._first_token.result()
        finally:
            self._first_token.cancel()
        warm_up_s = ready.phases.warm_up_s + time.monotonic() - began
        return replace(ready, phases=replace(ready.phases, warm_up_s=warm_up_s), measured=self._measured)

    def _ask_golden(self, ask: pipe.AskGolden) -> asyncio.Future[pipe.GoldenAnswer]:
        self._golden = asyncio.get_running_loop().create_future()
        self.send(ask)
        return self._golden

    async def _unless_it_ends(self, model_path: Awaitable[str]) -> str:
        """Return the path; raise EngineStartFailed at once if the process ends before the path is known."""
        assert self._ready is not None
        path = asyncio.ensure_future(model_path)
        try:
            either: set[asyncio.Future[Any]] = {path, self._ready}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                self._ready.result()
            return await path
        finally:
            path.cancel()

    def _begin_watch(self, model: ModelSettings) -> None:
        assert self.pid is not None
        limits = HealthLimits(
            probe_after_s=self._health.probe_after_s,
            eject_after_s=self._health.eject_after_s,
            max_step_s=self._health.max_step_on(model.device),
            max_gap_s=MAX_GAP_S,
        )
        elsewhere = None if self._members is None else self._members.uses
        self._watch = EngineWatch(limits, send=self.send, on_hung=self._hung, elsewhere=elsewhere)
        self._watching = asyncio.create_task(self._watch.run(self.pid), name="engine-watch")
        self._watching.add_done_callback(_log_failure)

    def change(self, order: pipe.FallAsleep | pipe.WakeUp, *, timeout_s: float) -> Coroutine[Any, Any, bool]:
        """Tell the engine now to fall asleep or wake up. The result waits until it has: True; False if it is lost, after ``timeout_s``."""
        assert self._watch is not None
        changed = self._changed = asyncio.get_running_loop().create_future()
        self._watch.paused = True  # an engine that copies or reads its weights makes no step, and may use no CPU time
        self.send(order)
        return self._has_changed(order, changed, timeout_s)

    async def _has_changed(self, order: pipe.FallAsleep | pipe.WakeUp, changed: asyncio.Future[str], timeout_s: float) -> bool:
        assert self._watch is not None
        try:
            async with asyncio.timeout(timeout_s):
                problem = await changed
        except TimeoutError:
            problem = f"not done after {timeout_s:g} s"
        finally:
            self._watch.paused = False
        if problem:
            self._lose(EngineDied(f"{type(order).__name__}: {problem}"))
        return not problem

    def send(self, message: pipe.ToEngine) -> None:
        """Queue a message for the engine; without effect once it is dead."""
        self._child.send(message)

    async def stop(self) -> None:
        """End the process, its workers and the members on other nodes; kill what does not end by itself."""
        self._end_watch()
        self._let_members_go()
        await self._child.stop()

    def _let_members_go(self) -> None:
        if self._members is not None:
            self._members.close()

    def _message(self, message: pipe.FromEngine) -> None:
        if isinstance(message, pipe.EngineFailed):
            self._failure = message.reason
        elif isinstance(message, pipe.EngineReady):
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, pipe.StepsMeasured):
            self._measured = message.measured
            if message.measured is None:
                logger.warning(_NOT_MEASURED)
        elif isinstance(message, pipe.GoldenAnswer):
            if self._golden is not None and not self._golden.done():
                self._golden.set_result(message)
        elif isinstance(message, pipe.SleepChanged):
            if self._changed is not None and not self._changed.done():
                self._changed.set_result(message.problem)
        elif self._watch is None:
            assert self._first_token is not None
            if answers_probe(message) and not self._first_token.done():
                self._first_token.set_result(None)
        elif not self._watch.heard(message):
            self._on_message(message)

    def _hung(self, error: EngineHung) -> None:
        logger.error("engine core %s: %s: killing it", self.pid, error)
        self._lose(error)

    def _lose(self, error: EngineLost) -> None:
        """Kill what is left of the engine on all nodes and report the loss, once, and not after `stop`."""
        if not self._over:
            self._end_watch()
            self._let_members_go()
            self._child.kill()
            self._on_lost(error)

    def _end_watch(self) -> None:
        self._over = True
        if self._watching is not None:
            self._watching.cancel()

    def _closed(self) -> None:
        lost = EngineDied
        if not self._failure:
            self._failure = EngineDied.NO_MESSAGE
            if self._oom_kills.any_since():
                lost, self._failure = EngineOutOfMemory, "the kernel killed the engine core: out of memory"
        self._fail(lost)

    def _member_lost(self, lost: EngineDied) -> None:
        self._failure = self._failure or lost.reason
        self._fail(type(lost))

    def _fail(self, lost: type[EngineDied]) -> None:
        """End what waits for the engine, the start or a golden prompt; after the start, report the loss."""
        for awaited in (self._ready, self._first_token, self._golden):
            if awaited is not None and not awaited.done():
                awaited.set_exception(EngineStartFailed(model="", reason=self._failure))
                return
            if awaited is not None and not awaited.cancelled() and awaited.exception() is not None:
                return  # the start has failed before
        self._lose(lost(self._failure))
