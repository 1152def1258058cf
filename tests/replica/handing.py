"""A process runs an engine core whose steps a test orders; its messages go through the real pipe and its two threads.

`Engine` is the test's end. vLLM's NIXL connector takes its address from the environment, so each engine needs a process of its own.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.config import ModelSettings
from serve_app.engine_args import engine_core_args, engine_environment
from serve_app.links.protocol.frames import FrameDecoder
from serve_app.links.protocol.messages import Outputs, decode_message
from serve_app.replica import pipe
from serve_app.replica.process_group import end_group, end_own_group
from serve_app.replica.side_channel import reserve

MAX_FRAME_BYTES = 1 << 24
_START_S = 400.0


@dataclass
class Answer:
    """What has come of one attempt."""

    token_ids: list[int] = field(default_factory=list)
    num_read: int = 0
    """Tokens whose KV came from another engine."""
    last: EngineCoreOutput | None = None

    def kv(self) -> bytes:
        """Return the `Add.kv` with which another engine goes on."""
        assert self.last is not None
        params = self.last.kv_transfer_params
        return b"" if params is None else msgspec.msgpack.encode(params)


class Engine:
    """An engine core in a process of its own."""

    def __init__(self, checkpoint: str) -> None:
        model = ModelSettings(
            name="tiny", model=checkpoint, kv_cache_gib=0.1, engine_args={"max_model_len": 2048}, kv={"transfer": "nixl"}
        )
        self._channel = reserve("127.0.0.1", model.kv.side_ports(), "kv.port")
        environment = engine_environment(model, {**os.environ, **self._channel.environment()})
        self._sock, theirs = socket.socketpair()
        self._orders, their_orders = multiprocessing.Pipe()
        engine_args = engine_core_args(model, checkpoint)
        # A busy machine: the first read connects the engines, and vLLM looks for the end of a read only between two steps.
        engine_args["kv_transfer_config"]["kv_connector_extra_config"]["kv_lease_duration"] = 1200
        arguments = (environment, engine_args, theirs, their_orders)
        self._process = multiprocessing.get_context("spawn").Process(target=_run, args=arguments)
        self._process.start()
        theirs.close()
        their_orders.close()
        self._frames = pipe.frame_decoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.answers: dict[str, Answer] = {}

    def ready(self) -> pipe.EngineReady:
        """Wait until the engine has loaded the model."""
        self._sock.settimeout(_START_S)
        message = next(self._messages())
        assert isinstance(message, pipe.EngineReady), message
        return message

    def add(self, attempt_id: str, prompt: list[int], num_emitted: int = 0, kv: bytes = b"", **params: Any) -> Answer:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **params)
        request = EngineCoreRequest(attempt_id, prompt, None, sampling, None, 0.0, None, None, None)
        buffers = [bytes(buffer) for buffer in MsgpackEncoder().encode(request)]
        self._sock.sendall(pipe.encode(pipe.AddToEngine(3, attempt_id, buffers, num_emitted, kv)))
        self.order("take_in")
        return self.answers.setdefault(attempt_id, Answer())

    def hand_over(self, attempt_id: str) -> None:
        self._sock.sendall(pipe.encode(pipe.HandOverInEngine([attempt_id])))
        self.order("take_in")

    def order(self, name: str, *args: Any) -> None:
        """Wait until the engine has done a function of this module."""
        self._orders.send((name, args))
        assert self._orders.recv() == name

    def finish(self, attempt_id: str) -> Answer:
        """Let the engine run until the attempt's last output has come."""
        self.order("until_over", attempt_id)
        answer = self.answers[attempt_id]
        messages = self._messages()
        while answer.last is None:
            self._take_in(next(messages))
        return answer

    def kill(self) -> None:
        pid = self._process.pid
        assert pid is not None
        end_group(pid)
        self._process.join()
        self._channel.sock.close()

    def _messages(self) -> Iterator[pipe.FromEngine]:
        while True:
            data = self._sock.recv(1 << 20)
            assert data, "the engine ended"
            for body in self._frames.receive_data(data):
                yield pipe.from_engine_decoder.decode(body)

    def _take_in(self, message: pipe.FromEngine) -> None:
        if not isinstance(message, pipe.StepOutputs):
            return
        for body in FrameDecoder(MAX_FRAME_BYTES).receive_data(message.frame):
            outputs = decode_message(body)
            assert isinstance(outputs, Outputs)
            for output in self._decoder.decode(outputs.buffers).outputs:
                answer = self.answers[output.request_id]
                answer.token_ids += output.new_token_ids
                if output.prefill_stats is not None:
                    answer.num_read = output.prefill_stats.num_external_cached_tokens
                if output.finish_reason is not None:
                    answer.last = output


def _run(environment: dict[str, str], arguments: dict[str, Any], sock: socket.socket, orders: Connection) -> None:
    os.setsid()  # for `end_group`
    os.environ.update(environment)
    end = pipe.EngineEnd(sock)
    try:
        from serve_app.host.vllm_start import inspect_models_here
        from serve_app.replica.engine_core import build_engine  # vLLM reads the environment when it is imported

        inspect_models_here()
        core = build_engine(arguments, sock, end, MAX_FRAME_BYTES, download_s=0.0)
        while True:
            while not orders.poll(
                0.001
            ):  # as the engine's own loop does while KV is kept: the other engine's read needs these steps
                if not core.scheduler.has_unfinished_requests() and core.has_work():
                    core._process_engine_step()
            name, args = orders.recv()
            _ORDERS[name](core, *args)
            orders.send(name)
    except BaseException as exc:  # also the end of the test's process
        end.send_failure(exc)
        end_own_group(1)


def _take_in(core: Any) -> None:
    """Wait for a message of the pipe and let the engine process it."""
    core._handle_client_request(*core.input_queue.get())


def _until(core: Any, attempt_id: str, num_tokens: int) -> None:
    """Step until the attempt has made so many tokens."""
    while core.scheduler.requests[attempt_id].num_output_tokens < num_tokens:
        core._process_engine_step()


def _until_over(core: Any, attempt_id: str) -> None:
    """Step until the attempt is over; its KV may still be kept."""
    while (request := core.scheduler.requests.get(attempt_id)) is not None and not request.is_finished():
        core._process_engine_step()


def _until_free(core: Any, attempt_id: str) -> None:
    """Step until nothing of the attempt is kept."""
    while attempt_id in core.scheduler.requests:
        core._process_engine_step()


def _spoil(core: Any) -> None:
    """Overwrite the KV of this engine."""
    core.model_executor.collective_rpc(_overwrite)


def _overwrite(worker: Any) -> None:
    for layer in worker.model_runner.kv_caches:
        layer.fill_(3.0)


def _limit(core: Any, limit_s: float) -> None:
    """Set the time within which KV has to be read."""
    core.scheduler._read_limit_s = limit_s


_ORDERS: dict[str, Callable[..., None]] = {
    "take_in": _take_in,
    "until": _until,
    "until_over": _until_over,
    "until_free": _until_free,
    "spoil": _spoil,
    "limit": _limit,
}
