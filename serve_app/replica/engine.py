"""The engine core process: vLLM's engine core with our own way in and out. The only file of the replica that imports vLLM.

vLLM's ``EngineCoreProc`` does its input and output in two threads over ZMQ. Both are methods; here they speak frames over one
socket to the supervisor instead. What that buys: the supervisor needs no vLLM (0.5 GB and 8 s of CPU less per replica), a step's
outputs are encoded once and passed on as they are, and the death of either process ends the other at once (end of file).
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from serve_app.config import ModelSettings
from serve_app.engine_args import engine_core_args
from serve_app.fingerprint import model_fingerprint, public_version
from serve_app.protocol.frames import FrameDecoder, encode_frame
from serve_app.protocol.messages import Capabilities, Outputs, encode_message
from serve_app.replica import pipe

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_MAX_PIPE_FRAME_BYTES = (1 << 32) - 1

CALLABLE_METHODS = frozenset(
    {"add_lora", "is_sleeping", "list_loras", "pin_lora", "remove_lora", "reset_encoder_cache", "reset_mm_cache"}
    | {"reset_prefix_cache", "sleep", "wake_up"}
)
"""What an ingress may call on an engine core: nothing that runs code it sends or changes weights."""


def run(model: ModelSettings, model_path: str, sock: socket.socket) -> None:
    """Build the engine core and serve the pipe until its other end closes. Returns never; ends the process."""
    engine: Any = None
    try:
        engine = _build_engine(model, model_path, sock)
        engine.run_busy_loop()
    except SystemExit:
        raise
    except BaseException as exc:
        logger.exception("engine core failed")
        with contextlib.suppress(OSError):
            sock.sendall(pipe.encode(pipe.EngineFailed(reason=f"{type(exc).__name__}: {exc}")))
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.shutdown()
        os._exit(1)


def _build_engine(model: ModelSettings, model_path: str, sock: socket.socket) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.abstract import Executor

    args = AsyncEngineArgs(**engine_core_args(model, model_path))
    vllm_config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    maybe_register_config_serialize_by_value()
    return _engine_core_class()(vllm_config, Executor.get_class(vllm_config), sock)


def _engine_core_class() -> type:
    """Return the class; defined in a function because vLLM's import takes seconds and belongs after the process is set up."""
    from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.utils import EngineZmqAddresses
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    class PipedEngineCore(EngineCoreProc):
        """vLLM's engine core process with its input and output threads replaced."""

        def __init__(self, vllm_config: Any, executor_class: Any, sock: socket.socket) -> None:
            self._sock = sock
            self._send_lock = threading.Lock()
            self._step = 0
            super().__init__(vllm_config, True, "", executor_class, log_stats=True)

        @contextlib.contextmanager
        def _perform_handshakes(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            yield EngineZmqAddresses(inputs=[], outputs=[])
            args[3].__post_init__()  # vLLM re-derives the configuration here too, after the engine has sized its cache

        def _process_engine_step(self) -> bool:
            self._step += 1
            return bool(super()._process_engine_step())

        def _send(self, message: pipe.FromEngine) -> None:
            with self._send_lock:
                self._sock.sendall(pipe.encode(message))

        def process_input_sockets(self, *args: Any) -> None:
            """vLLM's input thread: supervisor to engine."""
            self._add_decoder = MsgpackDecoder(EngineCoreRequest)
            frames = FrameDecoder(_MAX_PIPE_FRAME_BYTES)
            self._send(self._ready())
            args[-1].set()
            while data := self._sock.recv(_READ_BYTES):
                for body in frames.receive_data(data):
                    self._take_in(pipe.to_engine_decoder.decode(body))

        def _take_in(self, message: pipe.ToEngine) -> None:
            if isinstance(message, pipe.AddToEngine):
                self._take_in_request(message)
            elif isinstance(message, pipe.AbortInEngine):
                # Both queues, as in vLLM: at once during a step, and in order with the adds.
                self.aborts_queue.put_nowait(message.attempt_ids)
                self.input_queue.put_nowait((EngineCoreRequestType.ABORT, message.attempt_ids))
            else:
                call_id = (message.slot, message.call_id)
                args = msgspec.msgpack.decode(message.args)
                self.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (message.slot, call_id, message.method, args)))

        def _take_in_request(self, message: pipe.AddToEngine) -> None:
            try:
                request = self._add_decoder.decode(message.buffers)
                if request.request_id != message.attempt_id:
                    raise ValueError(f"request id {request.request_id!r} inside attempt {message.attempt_id!r}")
            except Exception as exc:  # whatever vLLM's decoder raises for bytes that are no request
                self._send(pipe.AttemptRefused(message.slot, message.attempt_id, f"{type(exc).__name__}: {exc}"))
                return
            request.client_index = message.slot
            try:
                self.input_queue.put_nowait((EngineCoreRequestType.ADD, self.preprocess_add_request(request)))
            except Exception:  # as vLLM: an error of this request, never of the engine
                self._handle_request_preproc_error(request)

        def process_output_sockets(self, *args: Any) -> None:
            """vLLM's output thread: engine to supervisor, one message per step and ingress."""
            encoder = MsgpackEncoder()
            kv: tuple[int, int, float] = (0, 0, 0.0)
            while True:
                item = self.output_queue.get()
                if item == EngineCoreProc.ENGINE_CORE_DEAD:
                    return
                slot, outputs = item
                if outputs.utility_output is not None:
                    self._send(_call_result(slot, outputs.utility_output))
                    continue
                if (stats := outputs.scheduler_stats) is not None:
                    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
                    kv = (stats.num_running_reqs, waiting, stats.kv_cache_usage)
                finished = [o.request_id for o in outputs.outputs if o.finish_reason is not None]
                frame = encode_frame(encode_message(Outputs([bytes(b) for b in encoder.encode(outputs)])))
                self._send(pipe.StepOutputs(slot, self._step, *kv, finished, frame))

        def _ready(self) -> pipe.EngineReady:
            response = self._make_ready_response()
            config = self.vllm_config
            capabilities = Capabilities(
                max_model_len=response.max_model_len,
                block_size=response.block_size or 0,
                num_kv_blocks=response.num_gpu_blocks,
                kv_cache_tokens=response.kv_cache_size_tokens or 0,
                max_num_seqs=response.max_num_seqs,
                max_num_batched_tokens=response.max_num_batched_tokens,
                tasks=tuple(self.get_supported_tasks()),
                dtype=response.dtype,
                device=config.device_config.device_type,
                tensor_parallel_size=response.tensor_parallel_size,
            )
            return pipe.EngineReady(public_version(response.vllm_version), model_fingerprint(config.model_config), capabilities)

    return PipedEngineCore


def _call_result(slot: int, output: Any) -> pipe.CallResult:
    _, call_id = output.call_id
    value = None if output.result is None else output.result.result
    encoded = msgspec.msgpack.encode(sorted(value) if isinstance(value, set) else value)
    return pipe.CallResult(slot, call_id, output.failure_message or "", encoded)


def _end_with_supervisor(sock: socket.socket) -> None:
    """End this process as soon as the other end of the pipe is closed, also while a model is still loading.

    The workers of a multi-process executor watch their parent in the same way.
    """
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP | select.POLLHUP)
    poller.poll()
    os._exit(0)


def main() -> None:
    """Entry point of the process: argument 1 is the file descriptor of the pipe; the settings come as JSON on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the supervisor decides
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_supervisor, args=(sock,), name="supervisor-watch", daemon=True).start()
    start = msgspec.json.decode(sys.stdin.buffer.read())
    run(ModelSettings.model_validate(start["model"]), start["model_path"], sock)


if __name__ == "__main__":
    main()
