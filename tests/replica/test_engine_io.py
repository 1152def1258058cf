"""The engine core's two IO threads run on a core without a model: real queues, a real socket pair, vLLM's own structs."""

import multiprocessing
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import KV_FETCH_IN_PROGRESS, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from serve_app.core.hand_over import HANDED_OVER
from serve_app.links.protocol.frames import FrameDecoder
from serve_app.links.protocol.messages import Outputs, decode_message
from serve_app.replica import engine_io, pipe
from serve_app.replica.engine_io import AttemptRefused, InputThread, OutputThread

DEAD = b"dead"
MAX_FRAME_BYTES = 2_000_000


class FakeCore:
    """Has the queues of vLLM's ``EngineCoreProc``; preprocessing leaves a request as it is."""

    ENGINE_CORE_DEAD = DEAD

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.num_steps = 3
        self.busy_s = 0.5
        self.failed: list[str] = []
        self.kv: list[bytes] = []

    def preprocess_attempt(self, request: EngineCoreRequest, num_emitted: int, kv: bytes = b"") -> tuple[EngineCoreRequest, int]:
        self.kv.append(kv)
        return request, num_emitted

    def golden_attempt(self, ask: pipe.AskGolden) -> tuple[str, int]:
        if not ask.prompt:
            raise ValueError("the model makes no text")
        return ask.prompt, ask.max_tokens

    def text_of(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None:
        self.failed.append(request.request_id)


def read(core: FakeCore, *messages: pipe.ToEngine) -> list[pipe.FromEngine]:
    """Let the input thread's body read these messages to the end of file; return what it sent."""
    sent: list[pipe.FromEngine] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in messages:
            ours.sendall(pipe.encode(message))
        ours.shutdown(socket.SHUT_WR)
        InputThread(core, sent.append, lambda: None).run(theirs)
    return sent


def write(core: FakeCore, *items: tuple[int, EngineCoreOutputs]) -> list[pipe.FromEngine]:
    """Let the output thread's body pass these outputs on; return what it sent."""
    sent: list[pipe.FromEngine] = []
    for item in (*items, DEAD):
        core.output_queue.put(item)
    OutputThread(core, sent.append, MAX_FRAME_BYTES).run()
    return sent


def taken(core: FakeCore) -> list[Any]:
    """Return the entries that wait for the engine."""
    return list(core.input_queue.queue)


def request(request_id: str) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=4)
    return EngineCoreRequest(request_id, [1, 2], None, params, None, 0.0, None, None, None)


def add(attempt_id: str, request_id: str = "", num_emitted: int = 0) -> pipe.AddToEngine:
    buffers = [bytes(b) for b in MsgpackEncoder().encode(request(request_id or attempt_id))]
    return pipe.AddToEngine(5, attempt_id, buffers, num_emitted)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (AttemptRefused("prompt", "has 2 tokens"), "refused prompt: has 2 tokens"),
        (VLLMValidationError("one backend per engine"), "refused structured_outputs: one backend per engine"),
    ],
)
def test_a_refused_attempt_ends_alone_and_the_ingress_gets_the_reason(refusal: Exception, reason: str) -> None:
    class Refusing(FakeCore):
        def preprocess_attempt(
            self, request: EngineCoreRequest, num_emitted: int, kv: bytes = b""
        ) -> tuple[EngineCoreRequest, int]:
            if request.request_id == "r@0":
                raise refusal
            return request, num_emitted

    core = Refusing()
    assert read(core, add("r@0"), add("s@0")) == []
    ((slot, outputs),) = core.output_queue.queue
    ended = EngineCoreOutput("r@0", [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    assert (slot, outputs.outputs, core.failed) == (5, [ended], [])
    assert [entry[1][0].request_id for entry in taken(core)] == ["s@0"]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (pipe.AddToEngine(5, "r@0", [b"\xc1"], 0), "DecodeError: "),
        (pipe.AddToEngine(5, "r@0", [b"\x93"], 0), "ValidationError: "),
        (add("r@0", "other@0"), "ValueError: request id 'other@0' inside attempt 'r@0'"),
        (add("r@0", "x" * 20_000), "ValueError: request id 'xxx"),
    ],
)
def test_a_request_that_is_none_ends_alone_with_an_error_and_the_next_message_is_read(
    message: pipe.AddToEngine, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    core = FakeCore()
    assert read(core, message, add("s@0", num_emitted=2), pipe.AbortInEngine(["s@0"])) == []
    (sent,) = write(core)
    assert isinstance(sent, pipe.StepOutputs)
    assert sent.slot == 5
    assert arrived([sent]) == [("r@0", FinishReason.ERROR)]
    (line,) = caplog.messages
    assert line.startswith(f"attempt 'r@0' holds no request: {problem}")
    assert len(line) < 1100
    (kind, (taken_in, num_emitted)), abort = taken(core)
    assert (kind, taken_in.request_id, taken_in.client_index, num_emitted) == (EngineCoreRequestType.ADD, "s@0", 5, 2)
    assert abort == (EngineCoreRequestType.ABORT, ["s@0"])
    assert core.aborts_queue.get_nowait() == ["s@0"]


def test_attempts_to_hand_over_are_named_to_the_engines_own_loop_and_the_kv_of_others_comes_with_them() -> None:
    core = FakeCore()
    with_kv = pipe.AddToEngine(5, "s@1", add("s@1").buffers, 2, b"kv")
    assert read(core, add("r@0"), with_kv, pipe.HandOverInEngine(["r@0", "s@1"]), pipe.FreeKvInEngine(["r@0"])) == []
    assert core.kv == [b"", b"kv"]
    assert taken(core)[2:] == [
        (EngineCoreRequestType.UTILITY, (pipe.HAND_OVER_SLOT, 0, "hand_over", (["r@0", "s@1"],))),
        (EngineCoreRequestType.UTILITY, (pipe.HAND_OVER_SLOT, 0, "free_kv", (["r@0"],))),
    ]


def test_a_request_that_reads_kv_of_another_engine_runs() -> None:
    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=4)
    stats.num_kv_fetch_reqs_by_stage = {KV_FETCH_IN_PROGRESS: 2, "other": 1}
    (sent,) = [m for m in write(FakeCore(), (5, EngineCoreOutputs(scheduler_stats=stats))) if isinstance(m, pipe.StepOutputs)]
    assert (sent.load.running, sent.load.waiting) == (5, 3)


def test_an_engine_that_only_waits_for_reads_reports_its_load_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(reading: int, running: int = 0) -> tuple[int, EngineCoreOutputs]:
        stats = SchedulerStats(num_running_reqs=running, num_skipped_waiting_reqs=reading)
        stats.num_kv_fetch_reqs_by_stage = {KV_FETCH_IN_PROGRESS: reading}
        return 5, EngineCoreOutputs(scheduler_stats=stats)

    monkeypatch.setattr(engine_io, "time", SimpleNamespace(monotonic=lambda: 7.0))
    sent = write(FakeCore(), waits(2), waits(2), waits(2), waits(1), waits(1), waits(1, running=1), waits(1, running=1), waits(0))
    assert [m.load.running for m in sent if isinstance(m, pipe.StepOutputs)] == [2, 1, 2, 2, 0]
    later = iter((7.0, 8.0))
    monkeypatch.setattr(engine_io, "time", SimpleNamespace(monotonic=lambda: next(later)))
    assert len(write(FakeCore(), waits(2), waits(2))) == 2


@pytest.mark.parametrize(
    ("stop_reason", "params", "kept"),
    [(HANDED_OVER, {"remote_port": 1}, ["r@0"]), (HANDED_OVER, None, []), (None, {"remote_port": 1}, [])],
)
def test_the_supervisor_hears_of_kv_that_another_replica_is_to_read(stop_reason: Any, params: Any, kept: list[str]) -> None:
    ended = EngineCoreOutput("r@0", [], finish_reason=FinishReason.LENGTH, stop_reason=stop_reason, kv_transfer_params=params)
    (sent,) = write(FakeCore(), (5, EngineCoreOutputs(outputs=[EngineCoreOutput("s@0", [1]), ended])))
    assert isinstance(sent, pipe.StepOutputs)
    assert (sent.kept, sent.finished) == (kept, ["r@0"])
    assert [o.kv_transfer_params for o in outputs_of([sent])] == [None, params]


@pytest.mark.parametrize(
    ("slot", "answer", "sent"),
    [
        (pipe.TRIALS_SLOT, UtilityOutput(0, None, UtilityResult(False)), [pipe.Answered(pipe.TRIALS_SLOT)]),
        (pipe.TRIALS_SLOT, UtilityOutput(0, "it failed"), [pipe.Answered(pipe.TRIALS_SLOT)]),
        (pipe.PROBE_SLOT, UtilityOutput(0, None, UtilityResult(False)), [pipe.Answered(pipe.PROBE_SLOT)]),
        (pipe.PROBE_SLOT, UtilityOutput(0, "it failed"), [pipe.Answered(pipe.PROBE_SLOT)]),
        (pipe.PROBE_SLOT, UtilityOutput(0, None, UtilityResult(True)), []),
        (pipe.HAND_OVER_SLOT, UtilityOutput(0, None, UtilityResult(None)), []),
    ],
)
def test_a_question_is_answered_unless_it_is_a_probe_whose_step_is_still_to_come(
    slot: int, answer: UtilityOutput, sent: list[pipe.FromEngine]
) -> None:
    assert write(FakeCore(), (slot, EngineCoreOutputs(utility_output=answer))) == sent


def output(request_id: str, num_values: int, *, num_arrays: int = 1, ended: bool = False) -> EngineCoreOutput:
    """Return an output with arrays of ``num_values`` bytes; 256 or more are a buffer each."""
    arrays: Any = [np.zeros(num_values, dtype=np.uint8) for _ in range(num_arrays)]
    reason = FinishReason.STOP if ended else None
    return EngineCoreOutput(request_id, [7], finish_reason=reason, kv_transfer_params={"arrays": arrays})


def arrived(sent: list[pipe.FromEngine]) -> list[tuple[str, FinishReason | None]]:
    """Return request and finish reason of the outputs that an ingress gets, and check that its link takes each frame."""
    return [(o.request_id, o.finish_reason) for o in outputs_of(sent)]


def outputs_of(sent: list[pipe.FromEngine]) -> list[EngineCoreOutput]:
    decoder, outputs = MsgpackDecoder(EngineCoreOutputs), list[EngineCoreOutput]()
    for step in sent:
        assert isinstance(step, pipe.StepOutputs)
        (body,) = FrameDecoder(MAX_FRAME_BYTES).receive_data(step.frame)
        message = decode_message(body)
        assert isinstance(message, Outputs)
        frame = decoder.decode(message.buffers)
        assert step.num_outputs == len(frame.outputs)
        assert step.finished == [o.request_id for o in frame.outputs if o.finish_reason is not None]
        outputs += frame.outputs
    return outputs


@pytest.mark.parametrize(
    ("sizes", "too_large"),
    [
        ([100, 1_900_000, 100], []),
        ([100, 3_000_000, 100], ["r1"]),
        ([100, 2_000_000, 100], ["r1"]),
        ([3_000_000, 100, 4_000_000], ["r0", "r2"]),
        ([900_000, 1_200_000, 100], []),
    ],
)
def test_outputs_too_large_for_a_frame_by_themselves_end_their_own_requests_and_no_other(
    sizes: list[int], too_large: list[str]
) -> None:
    core = FakeCore()
    outputs = [output(f"r{i}", size) for i, size in enumerate(sizes)]
    sent = write(core, (5, EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=3))))
    assert arrived(sent) == [(o.request_id, FinishReason.ERROR if o.request_id in too_large else None) for o in outputs]
    assert [o.stop_reason for o in outputs_of(sent)] == ["replica" if o.request_id in too_large else None for o in outputs]
    assert sorted(i for ids in core.aborts_queue.queue for i in ids) == too_large
    assert sorted(taken(core), key=str) == [(EngineCoreRequestType.ABORT, [i]) for i in too_large]


def test_outputs_in_too_many_buffers_come_in_several_frames() -> None:
    core = FakeCore()
    outputs = [output(f"r{i}", 256, num_arrays=1000, ended=i == 4) for i in range(5)]
    sent = write(core, (5, EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=3))))
    assert arrived(sent) == [(f"r{i}", FinishReason.STOP if i == 4 else None) for i in range(5)]
    assert len(sent) == 2
    assert taken(core) == []


def test_one_output_in_too_many_buffers_ends_its_request() -> None:
    core = FakeCore()
    sent = write(core, (5, EngineCoreOutputs(outputs=[output("r0", 256), output("r1", 256, num_arrays=4096)])))
    assert arrived(sent) == [("r0", None), ("r1", FinishReason.ERROR)]
    assert taken(core) == [(EngineCoreRequestType.ABORT, ["r1"])]


@pytest.fixture
def pipe_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _fail_to_read(sock: socket.socket) -> None:
    end = pipe.EngineEnd(sock)
    thread = threading.Thread(target=end.run_thread, args=(lambda: InputThread(FakeCore(), end.send, end.pinged).run(sock),))
    thread.start()
    threading.Event().wait()  # as the engine's main thread, which does not notice it


def _fail_to_write(sock: socket.socket) -> None:
    core, end = FakeCore(), pipe.EngineEnd(sock)
    core.output_queue.put((0, EngineCoreOutputs(outputs=[EngineCoreOutput("r@0", [1], kv_transfer_params={"x": object()})])))
    thread = threading.Thread(target=end.run_thread, args=(OutputThread(core, end.send, MAX_FRAME_BYTES).run,))
    thread.start()
    threading.Event().wait()


@pytest.mark.parametrize(
    ("process", "reason"),
    [(_fail_to_read, "ValidationError: "), (_fail_to_write, "TypeError: Object of type <class 'object'> is not serializable")],
)
def test_a_thread_that_fails_says_why_and_ends_the_process(
    process: Any, reason: str, pipe_ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pipe_ends
    ours.sendall(b"\0\0\0\x01\x07")  # a frame that holds no message of the pipe: for the reader only
    child = multiprocessing.get_context("fork").Process(target=process, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    (said,) = (pipe.from_engine_decoder.decode(body) for body in FrameDecoder(1 << 20).receive_data(ours.recv(1 << 20)))
    assert isinstance(said, pipe.EngineFailed)
    assert said.reason.startswith(reason)
    child.join()
    assert child.exitcode == 1


def test_a_ping_is_noted_and_asks_the_engine_for_a_token_only_if_it_says_so() -> None:
    core, noted = FakeCore(), []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pipe.encode(pipe.Ping(False)) + pipe.encode(pipe.Ping(True)))
        ours.shutdown(socket.SHUT_WR)
        InputThread(core, lambda message: None, lambda: noted.append("ping")).run(theirs)
    assert noted == ["ping", "ping"]
    assert taken(core) == [(EngineCoreRequestType.UTILITY, (pipe.PROBE_SLOT, 0, "probe", ()))]


def test_the_question_of_a_trial_waits_in_line_behind_the_abort() -> None:
    core = FakeCore()
    assert read(core, pipe.AbortInEngine(["r@1"]), pipe.AskTrial()) == []
    question = (EngineCoreRequestType.UTILITY, (pipe.TRIALS_SLOT, 0, "is_sleeping", ()))
    assert taken(core) == [(EngineCoreRequestType.ABORT, ["r@1"]), question]


def test_a_golden_prompt_is_added_or_refused_and_its_answer_leaves_as_one_text() -> None:
    core, slot = FakeCore(), pipe.GOLDEN_SLOT
    assert read(core, pipe.AskGolden("1 + 1 =", 8), pipe.AskGolden("", 8)) == [
        pipe.GoldenAnswer("", "ValueError: the model makes no text")
    ]
    assert taken(core) == [(EngineCoreRequestType.ADD, ("1 + 1 =", 8))]
    parts = [EngineCoreOutput("golden", [5, 6]), EngineCoreOutput("golden", [7], finish_reason=FinishReason.LENGTH)]
    failed = EngineCoreOutput("golden", [], finish_reason=FinishReason.ERROR)
    sent = write(core, *((slot, EngineCoreOutputs(outputs=[output])) for output in (*parts, failed)))
    assert sent == [pipe.GoldenAnswer("5 6 7"), pipe.GoldenAnswer("", "error")]
