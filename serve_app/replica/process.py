"""`EngineProcess` starts one engine core process, passes messages, and ends it: the supervisor's side of ``replica/engine.py``."""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from serve_app.config import HealthSettings, ModelSettings
from serve_app.core.health import HealthLimits
from serve_app.core.step_costs import MeasuredCosts
from serve_app.engine_args import engine_core_args, engine_environment
from serve_app.errors import EngineDied, EngineHung, EngineLost, EngineOutOfMemory, EngineStartFailed
from serve_app.replica import pipe
from serve_app.replica.golden import ask_all
from serve_app.replica.health import LOOK_EVERY_S, MAX_GAP_S, EngineWatch, answers_probe
from serve_app.replica.oom_kills import OomKills
from serve_app.replica.process_group import end_group

logger = logging.getLogger(__name__)

_NOT_MEASURED = (
    "this engine could not measure what its steps cost, because they took too long or failed. Unless another replica of the model has "
    "measured them, the GPU-seconds of requests are unknown, tenants share the model by guessed costs, and the autoscaler learns the "
    "costs from the load alone. Start the replica again while the machine is less busy."
)
_STOP_GRACE_S = 7.0  # longer than an engine core gives its workers (process_group.py)


class _PipeProtocol(asyncio.Protocol):
    """Bytes from the engine core to messages; end of file to ``on_closed``."""

    def __init__(self, on_message: Callable[[pipe.FromEngine], None], on_closed: Callable[[], None]) -> None:
        self._frames = pipe.frame_decoder()
        self._on_message = on_message
        self._on_closed = on_closed

    def data_received(self, data: bytes) -> None:
        for body in self._frames.receive_data(data):
            self._on_message(pipe.from_engine_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()


def _log_failure(watching: asyncio.Task[None]) -> None:
    """Log why a watch failed. Its pings have stopped, too, so the engine core is about to end both processes."""
    if not watching.cancelled() and (exc := watching.exception()) is not None:
        logger.error("the watch over the engine failed", exc_info=exc)


class EngineProcess:
    """One engine core process. ``on_message`` gets the messages after ``EngineReady``; ``on_lost`` is called once, after its end."""

    def __init__(
        self,
        health: HealthSettings,
        *,
        on_message: Callable[[pipe.FromEngine], None],
        on_lost: Callable[[EngineLost], None],
    ) -> None:
        self._health = health
        self._on_message = on_message
        self._on_lost = on_lost
        self._ready: asyncio.Future[pipe.EngineReady] | None = None
        self._first_token: asyncio.Future[None] | None = None
        self._golden: asyncio.Future[pipe.GoldenAnswer] | None = None
        self._measured: MeasuredCosts | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure = ""
        self._oom_kills = OomKills()
        self._over = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(
        self,
        model: ModelSettings,
        model_path: Awaitable[str],
        *,
        environment: Mapping[str, str],
        timeout_s: float,
        max_frame_bytes: int,
        measures_itself: bool = False,
    ) -> pipe.EngineReady:
        """Start the process and wait until its engine has made a token and answered the golden prompts.

        Args:
            model_path: Awaited while the process imports vLLM, which takes as long as many a download. Its errors are passed on.
            timeout_s: Limit for the engine's first token, from when it has the path.
            max_frame_bytes: Limit of the frames of its outputs.
            measures_itself: Whether the engine core measures the costs of its steps, which it does in any case for the autoscaler, and
                where KV moves.

        Raises:
            EngineStartFailed: The process ended, had no token in time, or a golden prompt's answer was wrong or late. It no longer runs.
        """
        loop = asyncio.get_running_loop()
        self._ready, self._first_token = loop.create_future(), loop.create_future()
        try:
            await self._spawn(model, environment)
            self._hand_over(model, await self._unless_it_ends(model_path), max_frame_bytes, measures_itself=measures_itself)
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

    async def _spawn(self, model: ModelSettings, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serve_app.replica.engine", str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=engine_environment(model, environment),
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _PipeProtocol(self._message, self._closed), sock=ours)

    def _hand_over(self, model: ModelSettings, model_path: str, max_frame_bytes: int, *, measures_itself: bool) -> None:
        """Send the process the arguments of its engine."""
        assert self._process is not None
        assert self._process.stdin is not None
        start = {
            "engine_args": engine_core_args(model, model_path),
            "device": model.device,
            "max_frame_bytes": max_frame_bytes,
            "supervisor_silence_s": self._health.eject_after_s,
            # A simulated accelerator measures as long as the one that it simulates.
            "measures_itself": measures_itself or model.replicas.is_scaled or model.kv.is_on,
            "measured_as": "cuda" if model.simulated is not None else model.device,
        }
        self._process.stdin.write(msgspec.json.encode(start))
        self._process.stdin.close()

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
        assert self._process is not None
        limits = HealthLimits(
            probe_after_s=self._health.probe_after_s,
            eject_after_s=self._health.eject_after_s,
            max_step_s=self._health.max_step_on(model.device),
            max_gap_s=MAX_GAP_S,
        )
        self._watch = EngineWatch(limits, send=self.send, on_hung=self._hung)
        self._watching = asyncio.create_task(self._watch.run(self._process.pid), name="engine-watch")
        self._watching.add_done_callback(_log_failure)

    def send(self, message: pipe.ToEngine) -> None:
        """Queue a message for the engine; without effect once it is dead."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pipe.encode(message))

    async def stop(self) -> None:
        """Close the pipe, which ends the process and its workers; kill its process group after a grace time."""
        self._end_watch()
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            logger.warning("engine core %d did not end by itself", self._process.pid)
        end_group(self._process.pid)
        await self._process.wait()

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
        """Kill what is left of the process and report the loss, once, and not after `stop`."""
        assert self._process is not None
        if not self._over:
            self._end_watch()
            end_group(self._process.pid)
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
        assert self._ready is not None
        for awaited in (self._ready, self._first_token, self._golden):
            if awaited is not None and not awaited.done():
                awaited.set_exception(EngineStartFailed(model="", reason=self._failure))
                return
        self._lose(lost(self._failure))
