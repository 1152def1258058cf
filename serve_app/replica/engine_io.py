"""The two IO threads of the engine core process pass messages from the pipe to vLLM's queues, and back. vLLM starts the threads.

A request comes over the pipe as the bytes of an ingress. If vLLM cannot decode them, the answer is made here and vLLM's queues never see
the request.
"""

import logging
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.metrics.stats import KV_FETCH_IN_PROGRESS
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.core.hand_over import HANDED_OVER
from serve_app.core.load import EngineLoad
from serve_app.links.protocol.frames import encode_frame
from serve_app.links.protocol.messages import MAX_BUFFERS, MAX_REASON_CHARS, REFUSED, Outputs, encode_message, readable
from serve_app.replica import pipe

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_SAME_LOAD_S = 0.05
"""The least time between two frames without outputs that report the same load while all requests wait for reads of KV."""

Send = Callable[[pipe.FromEngine], None]


class AttemptRefused(ValueError):
    """A value of the request would end the engine, or slow its steps."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")


class Core(Protocol):
    """The part of vLLM's ``EngineCoreProc`` that the threads use. ``num_steps`` and ``busy_s``, the seconds in steps, are ours."""

    input_queue: queue.Queue[Any]
    aborts_queue: queue.Queue[list[str]]
    output_queue: queue.Queue[Any]
    num_steps: int
    busy_s: float
    ENGINE_CORE_DEAD: bytes

    def golden_attempt(self, ask: pipe.AskGolden) -> Any: ...
    def text_of(self, token_ids: Sequence[int]) -> str: ...
    def preprocess_attempt(self, request: EngineCoreRequest, num_emitted: int, kv: bytes = b"") -> Any: ...
    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None: ...


class InputThread:
    """Passes messages from the supervisor to the engine."""

    def __init__(self, core: Core, send: Send, pinged: Callable[[], None]) -> None:
        self._core = core
        self._send = send
        self._pinged = pinged
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)

    def run(self, sock: socket.socket) -> None:
        """Read messages until the end of file."""
        frames = pipe.frame_decoder()
        while data := sock.recv(_READ_BYTES):
            for body in frames.receive_data(data):
                self._take_in(pipe.to_engine_decoder.decode(body))

    def _take_in(self, message: pipe.ToEngine) -> None:
        if isinstance(message, pipe.AddToEngine):
            self._take_in_request(message)
        elif isinstance(message, pipe.AbortInEngine):
            abort_in(self._core, message.attempt_ids)
        elif isinstance(message, pipe.Ping):
            self._take_in_ping(message)
        elif isinstance(message, pipe.AskGolden):
            self._take_in_golden(message)
        elif isinstance(message, pipe.HandOverInEngine):
            self._ask(pipe.HAND_OVER_SLOT, "hand_over", message.attempt_ids)
        elif isinstance(message, pipe.FreeKvInEngine):
            self._ask(pipe.HAND_OVER_SLOT, "free_kv", message.attempt_ids)
        elif isinstance(message, pipe.FallAsleep):
            self._ask(pipe.SLEEP_SLOT, "fall_asleep", message.level)
        elif isinstance(message, pipe.WakeUp):
            self._ask(pipe.SLEEP_SLOT, "wake_whole", message.level)
        else:
            self._ask(pipe.TRIALS_SLOT, "is_sleeping")  # any method does: the engine calls it after all earlier messages

    def _take_in_ping(self, ping: pipe.Ping) -> None:
        """Note the ping. A probe is asked of the engine's own loop, because only that knows whether the engine sleeps."""
        self._pinged()
        if ping.probe:
            self._ask(pipe.PROBE_SLOT, "probe")

    def _ask(self, slot: int, method: str, *args: Any) -> None:
        """Let the engine's own loop call a method of the engine core, between two steps."""
        self._core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (slot, 0, method, args)))

    def _take_in_golden(self, ask: pipe.AskGolden) -> None:
        try:
            self._core.input_queue.put_nowait((EngineCoreRequestType.ADD, self._core.golden_attempt(ask)))
        except Exception as exc:  # no tokenizer, a prompt that is too long, a model that makes no text
            self._send(pipe.GoldenAnswer("", readable(f"{type(exc).__name__}: {exc}", MAX_REASON_CHARS)))

    def _take_in_request(self, message: pipe.AddToEngine) -> None:
        core = self._core
        try:
            request = self._add_decoder.decode(message.buffers)
            if request.request_id != message.attempt_id:
                raise ValueError(f"request id {request.request_id!r} inside attempt {message.attempt_id!r}")
        except Exception as exc:  # whatever vLLM's decoder raises for bytes that are no request
            problem = readable(f"{type(exc).__name__}: {exc}", MAX_REASON_CHARS)
            logger.warning("attempt %r holds no request: %s", message.attempt_id, problem)
            # The link stays open: its end would move all its requests to another replica, this one included.
            ended = _failed_here(message.attempt_id)
            core.output_queue.put_nowait((message.slot, EngineCoreOutputs(outputs=[ended])))
            return
        request.client_index = message.slot
        try:
            made = core.preprocess_attempt(request, message.num_emitted, message.kv)
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, made))
        except AttemptRefused as refused:
            self._refuse(message, refused)
        except VLLMValidationError as exc:  # from vLLM 0.33 on, if the grammar is for another backend than this engine's
            self._refuse(message, AttemptRefused(exc.parameter or "structured_outputs", str(exc)))
        except Exception:  # as vLLM: an error of this request, never of the engine
            core._handle_request_preproc_error(request)

    def _refuse(self, message: pipe.AddToEngine, refused: AttemptRefused) -> None:
        logger.warning("attempt %r refused: %s", message.attempt_id, refused)
        reason = readable(f"{REFUSED}{refused}", MAX_REASON_CHARS)
        ended = EngineCoreOutput(message.attempt_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        self._core.output_queue.put_nowait((message.slot, EngineCoreOutputs(outputs=[ended])))


class OutputThread:
    """Passes messages from the engine to the supervisor, one per step and ingress.

    Outputs beyond the limits of a link are refused here, which costs only their requests. Refused by the ingress, they would cost the link
    and, because its requests resume elsewhere, the next link, too.
    """

    def __init__(self, core: Core, send: Send, max_frame_bytes: int) -> None:
        self._core = core
        self._send = send
        self._max_frame_bytes = max_frame_bytes
        self._encoder = MsgpackEncoder()
        self._load = self._sent_load = (0, 0, 0.0)
        self._sent_at = 0.0
        self._golden_ids: list[int] = []

    def run(self) -> None:
        """Pass on the engine's outputs until it reports that it is dead."""
        while (item := self._core.output_queue.get()) != self._core.ENGINE_CORE_DEAD:
            self._put_out(*item)

    def _put_out(self, slot: int, outputs: Any) -> None:
        if slot == pipe.CACHE_SLOT:
            self._send(outputs)
            return
        if outputs.utility_output is not None:
            if slot == pipe.HAND_OVER_SLOT:
                return  # what ended at once comes as outputs
            if slot == pipe.SLEEP_SLOT:
                self._send(pipe.SleepChanged(readable(outputs.utility_output.failure_message or "", MAX_REASON_CHARS)))
                return
            if slot != pipe.PROBE_SLOT or not _will_step(outputs.utility_output):
                self._send(pipe.Answered(slot))
            return
        if slot == pipe.GOLDEN_SLOT:
            self._put_out_golden(outputs.outputs)
            return
        if (stats := outputs.scheduler_stats) is not None:
            waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            # To vLLM, requests wait while they read KV of another engine. They have a place, so they do not show that the engine is full.
            reading = min(waiting, stats.num_kv_fetch_reqs_by_stage.get(KV_FETCH_IN_PROGRESS, 0))
            self._load = (stats.num_running_reqs + reading, waiting - reading, stats.kv_cache_usage)
            if reading and not (stats.num_running_reqs or outputs.outputs) and self._has_said_so():
                return
        self._send_step(slot, outputs, self._encoder.encode(outputs))

    def _has_said_so(self) -> bool:
        """Return whether the load was sent lately. While all requests wait for reads, vLLM steps a thousand times a second."""
        now = time.monotonic()
        if self._load == self._sent_load and now - self._sent_at < _SAME_LOAD_S:
            return True
        self._sent_load, self._sent_at = self._load, now
        return False

    def _put_out_golden(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            self._golden_ids += output.new_token_ids
            if output.finish_reason is not None:
                failed = output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
                self._send(pipe.GoldenAnswer(self._core.text_of(self._golden_ids), f"{output.finish_reason}" if failed else ""))
                self._golden_ids = []

    def _send_step(self, slot: int, outputs: EngineCoreOutputs, buffers: Sequence[Any]) -> None:
        """Send one frame, or several if one would be too large or have too many buffers (logprobs make three per request).

        An output that is too large by itself is replaced by an error of its request.
        """
        num_bytes = _wire_bytes(buffers)
        if len(buffers) > MAX_BUFFERS or num_bytes > self._max_frame_bytes:
            half = len(outputs.outputs) // 2
            if half == 0:
                size = f"{len(buffers)} buffers" if len(buffers) > MAX_BUFFERS else f"{num_bytes} bytes"
                parts = [replace(outputs, outputs=[self._ended(outputs.outputs[0], size)])]
            else:
                rest = replace(outputs, outputs=outputs.outputs[half:], scheduler_stats=None, finished_requests=None)
                parts = [replace(outputs, outputs=outputs.outputs[:half]), rest]
            for part in parts:
                self._send_step(slot, part, self._encoder.encode(part))
            return
        ended = [o for o in outputs.outputs if o.finish_reason is not None]
        kept = [o.request_id for o in ended if o.stop_reason == HANDED_OVER and o.kv_transfer_params is not None]
        frame = encode_frame(encode_message(Outputs([bytes(b) for b in buffers])))
        load = EngineLoad(self._core.num_steps, *self._load)
        finished = [o.request_id for o in ended]
        num_outputs = len(outputs.outputs)
        self._send(pipe.StepOutputs(slot, load, self._core.busy_s, finished, frame, num_outputs=num_outputs, kept=kept))

    def _ended(self, output: EngineCoreOutput, size: str) -> EngineCoreOutput:
        """Abort the request in the engine, and return its last output for the ingress."""
        logger.warning("%s ended: one step's output has %s; a frame takes %d", output.request_id, size, self._max_frame_bytes)
        abort_in(self._core, [output.request_id])
        return _failed_here(output.request_id)


def _failed_here(attempt_id: str) -> EngineCoreOutput:
    """Return the end of an attempt that failed here. vLLM's own errors have no stop reason, so the ingress can distinguish them."""
    return EngineCoreOutput(attempt_id, [], finish_reason=FinishReason.ERROR, stop_reason="replica")


def abort_in(core: Core, attempt_ids: list[str]) -> None:
    """Abort attempts through both queues, as vLLM does: at once during a step, and in order with the adds."""
    core.aborts_queue.put_nowait(attempt_ids)
    core.input_queue.put_nowait((EngineCoreRequestType.ABORT, attempt_ids))


def _wire_bytes(buffers: Sequence[Any]) -> int:
    """Return an upper bound for the bytes of the frame's body: each buffer takes up to 5 bytes more, the message up to 7."""
    return 7 + sum(memoryview(buffer).nbytes + 5 for buffer in buffers)


def _will_step(probe: Any) -> bool:
    """Return whether a step will follow that answers the probe, given vLLM's ``UtilityOutput``; an error is an answer by itself."""
    return probe.failure_message is None and bool(probe.result.result)
