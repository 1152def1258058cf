"""What the two IO threads of the engine core process do: from the pipe to vLLM's queues, and back. The threads are vLLM's.

What comes over the pipe is the bytes of an ingress: what vLLM cannot decode is answered here and never reaches its queues.
"""

import queue
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.protocol.frames import FrameDecoder, encode_frame
from serve_app.protocol.messages import MAX_ERROR_CHARS, MAX_REASON_CHARS, Outputs, encode_message, readable
from serve_app.replica import pipe

_READ_BYTES = 1 << 20
_MAX_PIPE_FRAME_BYTES = (1 << 32) - 1

Send = Callable[[pipe.FromEngine], None]


class Core(Protocol):
    """What the threads need of vLLM's ``EngineCoreProc``; ``num_steps`` is ours."""

    input_queue: queue.Queue[Any]
    aborts_queue: queue.Queue[list[str]]
    output_queue: queue.Queue[Any]
    num_steps: int
    ENGINE_CORE_DEAD: bytes

    def preprocess_add_request(self, request: EngineCoreRequest) -> Any: ...
    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None: ...


class EngineInput:
    """Supervisor to engine."""

    def __init__(self, core: Core, send: Send) -> None:
        self._core = core
        self._send = send
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)

    def run(self, sock: socket.socket) -> None:
        """Read to the end of file."""
        frames = FrameDecoder(_MAX_PIPE_FRAME_BYTES)
        while data := sock.recv(_READ_BYTES):
            for body in frames.receive_data(data):
                self._take_in(pipe.to_engine_decoder.decode(body))

    def _take_in(self, message: pipe.ToEngine) -> None:
        core = self._core
        if isinstance(message, pipe.AddToEngine):
            self._take_in_request(message)
        elif isinstance(message, pipe.AbortInEngine):
            # Both queues, as in vLLM: at once during a step, and in order with the adds.
            core.aborts_queue.put_nowait(message.attempt_ids)
            core.input_queue.put_nowait((EngineCoreRequestType.ABORT, message.attempt_ids))
        else:
            self._take_in_call(message)

    def _take_in_call(self, message: pipe.CallEngine) -> None:
        try:
            args = msgspec.msgpack.decode(message.args, type=list)
        except Exception as exc:  # no MessagePack, no list, nested too deep
            error = readable(f"arguments of {message.method}: {type(exc).__name__}: {exc}", MAX_ERROR_CHARS)
            self._send(pipe.CallResult(message.slot, message.call_id, error, b""))
            return
        call_id = (message.slot, message.call_id)
        self._core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (message.slot, call_id, message.method, args)))

    def _take_in_request(self, message: pipe.AddToEngine) -> None:
        core = self._core
        try:
            request = self._add_decoder.decode(message.buffers)
            if request.request_id != message.attempt_id:
                raise ValueError(f"request id {request.request_id!r} inside attempt {message.attempt_id!r}")
        except Exception as exc:  # whatever vLLM's decoder raises for bytes that are no request
            problem = readable(f"{type(exc).__name__}: {exc}", MAX_REASON_CHARS)
            self._send(pipe.AttemptRefused(message.slot, message.attempt_id, problem))
            return
        request.client_index = message.slot
        try:
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, core.preprocess_add_request(request)))
        except Exception:  # as vLLM: an error of this request, never of the engine
            core._handle_request_preproc_error(request)


class EngineOutput:
    """Engine to supervisor, one message per step and ingress."""

    def __init__(self, core: Core, send: Send) -> None:
        self._core = core
        self._send = send
        self._encoder = MsgpackEncoder()
        self._load: tuple[int, int, float] = (0, 0, 0.0)

    def run(self) -> None:
        """Pass on what the engine puts out, until it says that it is dead."""
        while (item := self._core.output_queue.get()) != self._core.ENGINE_CORE_DEAD:
            self._put_out(*item)

    def _put_out(self, slot: int, outputs: Any) -> None:
        if outputs.utility_output is not None:
            self._send(_call_result(slot, outputs.utility_output))
            return
        if (stats := outputs.scheduler_stats) is not None:
            waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            self._load = (stats.num_running_reqs, waiting, stats.kv_cache_usage)
        finished = [o.request_id for o in outputs.outputs if o.finish_reason is not None]
        frame = encode_frame(encode_message(Outputs([bytes(b) for b in self._encoder.encode(outputs)])))
        self._send(pipe.StepOutputs(slot, self._core.num_steps, *self._load, finished, frame))


def _call_result(slot: int, output: Any) -> pipe.CallResult:
    _, call_id = output.call_id
    value = None if output.result is None else output.result.result
    try:
        encoded, error = msgspec.msgpack.encode(sorted(value) if isinstance(value, set) else value), output.failure_message or ""
    except Exception as exc:  # a value of vLLM's own types: the call's error, never the engine's
        encoded, error = b"", f"the result cannot be sent: {type(exc).__name__}: {exc}"
    return pipe.CallResult(slot, call_id, readable(error, MAX_ERROR_CHARS), encoded)
