"""Our engine core counts vLLM's steps: real `EngineCoreProc._process_engine_step`, no model."""

import queue
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from serve_app.replica import engine_core
from serve_app.replica.engine_core import PipedEngineCore
from serve_app.replica.engine_io import AttemptRefused
from serve_app.replica.kv_params import CAME_AT

STEP_S = 0.25


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an engine core whose every look for work takes `STEP_S`, and which runs no model until a test wants it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_core, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0))
    made: Any = PipedEngineCore.__new__(PipedEngineCore)
    made.num_steps, made.busy_s = 0, 0.0
    made.output_queue = queue.Queue()
    made.scheduler = SimpleNamespace(has_requests=lambda: False, requests={})
    made.post_step = lambda executed: None
    made.batch_queue, made.executes = None, False

    def step() -> tuple[dict[int, Any], bool]:
        clock.now += STEP_S
        return {}, made.executes

    made.step_fn = step
    return made


def attempt(num_tokens: int, *, task: str = "", **params: Any) -> Any:
    pooling = PoolingParams(task=task) if task else None
    sampling = None if task else SamplingParams(**params)
    return EngineCoreRequest("r@0", [5] * num_tokens, None, sampling, pooling, 0.0, None, None, None)


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (attempt(63), ""),
        (attempt(64), "prompt: has 64 tokens with the answer so far, and this replica has room for 63"),
        (attempt(64, task="embed"), ""),
        (attempt(65, task="embed"), "prompt: has 65 tokens with the answer so far, and this replica has room for 64"),
        (attempt(5, task="classify"), "task: 'classify' is none of this replica's model"),
        (attempt(5, logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias: has 1025 entries, limit 1024"),
    ],
)
def test_an_attempt_that_would_end_the_engine_is_refused(core: Any, asked: Any, refused: str) -> None:
    core.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 1024))
    core.get_supported_tasks = lambda: ("generate", "embed")
    core.preprocess_add_request = lambda request: (request, 0)
    core._adapters = set()
    if refused:
        with pytest.raises(AttemptRefused, match=re.escape(refused)):
            core.preprocess_attempt(asked, 0)
    else:
        assert core.preprocess_attempt(asked, 0) == (asked, 0)


def kv_of(num_tokens: int, **changes: Any) -> bytes:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 2 + (num_tokens - 1) // 16))],
        "remote_engine_id": "e",
        "remote_request_id": "r@0",
        "remote_host": "10.0.0.1",
        "remote_port": 15600,
        "remote_num_tokens": num_tokens - 1,
        "tp_size": 1,
    }
    return msgspec.msgpack.encode(params | changes)


@pytest.mark.parametrize(
    ("kv", "problem"),
    [
        (kv_of(40), ""),
        (kv_of(40, remote_registration_generation=2), ""),
        (kv_of(41), "KV of 40 tokens for a prompt of 40"),
        (kv_of(40, remote_block_ids=[[1, 2]]), "2 blocks of 16 for a prompt of 40 tokens"),
        (kv_of(40, remote_block_ids=[[1], [2], [3]]), "Expected `array` of length <= 1"),
        (kv_of(40, do_remote_prefill=False), "do_remote_prefill is false"),
        (kv_of(40, remote_port="15600"), "Expected `int`, got `str`"),
        (msgspec.msgpack.encode({1: 2}), "Expected `str`"),
        (msgspec.msgpack.encode([1]), "Expected `object`, got `array`"),
        (b"\xc1", "MessagePack data is malformed"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_an_engine_reads_the_kv_of_its_prompt_and_no_other(
    core: Any, kv: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 1024)
    core.vllm_config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=16))
    core.preprocess_add_request = lambda request: (request, 0)
    core._keeps_kv = lambda: True
    core.preprocess_attempt(asked := attempt(40), 0, kv)
    if problem:
        assert asked.sampling_params.extra_args is None
        assert problem in caplog.text
    else:
        params = asked.sampling_params.extra_args["kv_transfer_params"]
        assert (params["remote_block_ids"], params["remote_num_tokens"], params[CAME_AT]) == ([[1, 2, 3]], 39, 0.0)
        assert params["remote_registration_generation"] == msgspec.msgpack.decode(kv).get("remote_registration_generation", 0)
        assert "do_remote_decode" not in params
    with pytest.raises(AttemptRefused, match="kv_transfer_params"):
        core.preprocess_attempt(attempt(40, extra_args={"kv_transfer_params": {"do_remote_prefill": True}}), 0, kv)


def test_an_engine_without_transfer_takes_kv_and_hand_overs_as_if_there_were_none(core: Any) -> None:
    core.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 1024))
    core.preprocess_add_request = lambda request: (request, 0)
    core.preprocess_attempt(asked := attempt(40), 0, kv_of(40))
    assert asked.sampling_params.extra_args is None
    core.hand_over(["r@0"])
    core.free_kv(["r@0"])
    assert core.output_queue.empty()


def test_a_step_that_runs_the_model_is_counted_with_its_time(core: Any) -> None:
    core.executes = True
    core._process_engine_step()
    assert (core.num_steps, core.busy_s) == (1, STEP_S)


@pytest.mark.parametrize("batch_queue", [None, deque()])
def test_a_look_for_work_that_finds_none_is_not_counted(core: Any, batch_queue: Any) -> None:
    core.batch_queue = batch_queue
    core._process_engine_step()
    assert (core.num_steps, core.busy_s) == (0, 0.0)


def test_the_wait_for_the_last_batch_under_async_scheduling_is_busy_time_and_no_step(core: Any) -> None:
    core.batch_queue = deque([("future", "scheduler output", "deferred")])
    core._process_engine_step()
    assert (core.num_steps, core.busy_s) == (0, STEP_S)


def test_a_step_for_the_probe_alone_counts_as_no_work(core: Any) -> None:
    core.executes = True
    core.scheduler.requests = {"probe": "request"}
    core._process_engine_step()
    assert (core.num_steps, core.busy_s) == (0, 0.0)
    core.scheduler.requests = {"probe": "request", "r1@0": "request"}
    core._process_engine_step()
    assert (core.num_steps, core.busy_s) == (1, STEP_S)


@pytest.mark.parametrize(("asleep", "makes_text", "added"), [(False, True, ["probe"]), (True, True, []), (False, False, [])])
def test_a_probe_is_a_request_unless_the_engine_could_not_serve_it(
    core: Any, *, asleep: bool, makes_text: bool, added: list[str]
) -> None:
    requests: list[str] = []
    core.is_sleeping, core._makes_text = lambda: asleep, makes_text
    core.preprocess_add_request = lambda request: (request, 0)
    core.add_request = lambda request, wave: requests.append(request.request_id)
    assert core.probe() is bool(added)
    assert requests == added
