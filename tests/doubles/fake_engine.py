"""`FakeEngine` is an engine core without a model, behind the interface of ``replica.process.EngineProcess``: a test says when it computes.

It reads and writes vLLM's own structs. The next token is a function of the sequence so far, so that a resumed answer can be
compared with an undisturbed one; ``max_tokens`` ends it.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm import version
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serve_app.core.hand_over import HANDED_OVER
from serve_app.core.load import EngineLoad
from serve_app.links.fingerprint import public_version
from serve_app.links.protocol.frames import encode_frame
from serve_app.links.protocol.messages import Capabilities, Outputs, encode_message
from serve_app.replica import pipe
from serve_app.replica.cold_start import EnginePhases

VLLM_VERSION = public_version(version.__version__)
FINGERPRINT = "f" * 16

CAPABILITIES = Capabilities(
    max_model_len=1 << 20,
    block_size=128,
    num_kv_blocks=512,
    tasks=("generate",),
    weights="w" * 16,
)


def next_token(sequence: Sequence[int]) -> int:
    """Return 0 <= id < 1000."""
    return zlib.crc32(repr(list(sequence)).encode()) % 1000


def prompt_logprobs(prompt: Sequence[int], count: int) -> LogprobsTensors:
    """Return for each token of the prompt but the first its log probability, of rank 1, and those of ``count`` more tokens."""
    ids = torch.tensor([[token, *(5 + (token + other) % 900 for other in range(count))] for token in prompt[1:]])
    return LogprobsTensors(ids, -0.5 - torch.arange(ids.numel()).reshape(ids.shape) / 7, torch.ones(len(ids), dtype=torch.long))


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first ``count`` tokens that an undisturbed engine gives after ``prompt``."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class FakeEngine:
    """An engine core for tests: ``connect`` it to a ``ReplicaServer``, then call ``step``."""

    def __init__(
        self, *, version: str = VLLM_VERSION, fingerprint: str = FINGERPRINT, capabilities: Capabilities = CAPABILITIES
    ) -> None:
        self.ready = pipe.EngineReady(version, fingerprint, capabilities, max_num_seqs=8, phases=EnginePhases(0.0, 0.0, 0.0))
        self.pid = 0
        self.running: dict[str, tuple[int, EngineCoreRequest, list[int]]] = {}
        """Attempt id -> slot, request, output so far."""
        self.added: list[EngineCoreRequest] = []
        self.num_emitted: dict[str, int] = {}
        """Attempt id -> how many ids at the end of its prompt are the answer so far."""
        self.aborted: list[str] = []
        self.leaving: list[str] = []
        """Attempts to be handed over: `hand_over` does it."""
        self.freed: list[str] = []
        """Attempts whose KV is not to be kept any more."""
        self.kv: dict[str, bytes] = {}
        """Attempt id -> what came with its Add."""
        self.steps = 0
        self.num_output_tokens = 0
        self._emit: Callable[[pipe.FromEngine], None] = lambda message: None
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()

    def connect(self, emit: Callable[[pipe.FromEngine], None]) -> None:
        """Send the engine's messages to ``emit``."""
        self._emit = emit

    def send(self, message: pipe.ToEngine) -> None:
        if isinstance(message, pipe.AddToEngine):
            self._add(message)
        elif isinstance(message, pipe.AbortInEngine):
            for attempt_id in message.attempt_ids:
                self.aborted += [attempt_id] if self.running.pop(attempt_id, None) else []
        elif isinstance(message, pipe.HandOverInEngine):
            self.leaving += [i for i in message.attempt_ids if i in self.running]
        elif isinstance(message, pipe.FreeKvInEngine):
            self.freed += message.attempt_ids
        elif isinstance(message, pipe.AskTrial):
            self._emit(pipe.Answered(pipe.TRIALS_SLOT))

    async def stop(self) -> None:
        self.running.clear()

    def step(self, count: int = 1) -> None:
        """Give every running attempt up to ``count`` more tokens: one step, one message per slot."""
        self.steps += 1
        by_slot: dict[int, list[EngineCoreOutput]] = {}
        for attempt_id, (slot, request, output) in list(self.running.items()):
            by_slot.setdefault(slot, []).append(self._compute(attempt_id, request, output, count))
        for slot, outputs in by_slot.items():
            self._emit(self._frame(slot, outputs))

    def fail(self, attempt_id: str) -> None:
        """End the attempt as vLLM does when it cannot compile a grammar: an error without a reason."""
        slot, _, _ = self.running.pop(attempt_id)
        self._emit(self._frame(slot, [EngineCoreOutput(attempt_id, [], finish_reason=FinishReason.ERROR)]))

    def hand_over(self, where: dict[str, Any] | None) -> None:
        """End the attempts that are to be handed over; ``where`` says where their KV is kept."""
        for attempt_id in self.leaving:
            slot, _, _ = self.running.pop(attempt_id)
            last = EngineCoreOutput(
                attempt_id, [], finish_reason=FinishReason.LENGTH, stop_reason=HANDED_OVER, kv_transfer_params=where
            )
            self._emit(self._frame(slot, [last]))
        self.leaving.clear()

    def emit_outputs(self, slot: int, buffers: list[bytes], finished: Sequence[str] = ()) -> None:
        """Send any bytes as a step's outputs."""
        frame = encode_frame(encode_message(Outputs(buffers)))
        self._emit(pipe.StepOutputs(slot, self._load(), 0.0, list(finished), frame, 1))

    def _load(self) -> EngineLoad:
        return EngineLoad(self.steps, len(self.running), 0, 0.5)

    def _add(self, message: pipe.AddToEngine) -> None:
        request = self._decoder.decode(message.buffers)
        assert request.request_id == message.attempt_id
        assert message.attempt_id not in self.running, "vLLM would assert on it"
        self.added.append(request)
        self.num_emitted[message.attempt_id] = message.num_emitted
        self.kv[message.attempt_id] = message.kv
        self.running[message.attempt_id] = (message.slot, request, [])

    def _compute(self, attempt_id: str, request: EngineCoreRequest, output: list[int], count: int) -> EngineCoreOutput:
        prompt = list(request.prompt_token_ids or ())
        params: Any = request.sampling_params
        asked = getattr(params, "prompt_logprobs", None)
        of_prompt = None if asked is None or output else prompt_logprobs(prompt, asked)
        new = answer([*prompt, *output], min(count, params.max_tokens - len(output)))
        output += new
        self.num_output_tokens += len(new)
        finished = len(output) == params.max_tokens
        if finished:
            del self.running[attempt_id]
        return EngineCoreOutput(
            attempt_id, new, finish_reason=FinishReason.LENGTH if finished else None, new_prompt_logprobs_tensors=of_prompt
        )

    def _frame(self, slot: int, outputs: list[EngineCoreOutput]) -> pipe.StepOutputs:
        finished = [o.request_id for o in outputs if o.finish_reason is not None]
        encoded = self._encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
        frame = encode_frame(encode_message(Outputs([bytes(b) for b in encoded])))
        return pipe.StepOutputs(slot, self._load(), 0.0, finished, frame, len(outputs))
