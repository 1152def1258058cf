"""A replica measures itself in real vLLM engines: one whose law of step times is known, and one that computes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.autoscaling.simulation.simulated_replica import Hardware, steps_of_profile
from serve_app.replica.self_measurement import CPU_LEAST_S, CPU_SHARE, DECODES, GPU_LIMIT_S, limit_s, measure
from serve_app.simulated import executor
from serve_app.simulated.profiles import PROFILES

pytestmark = pytest.mark.engine

PROFILE = "a10g-llama-8b"


def core_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def answer(engine: Any) -> list[int]:
    from vllm import SamplingParams

    (output,) = engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
    return list(output.outputs[0].token_ids)


class Clock:
    """Seconds that pass only in the sleeps of the simulated accelerator, and ``per_look`` with each look."""

    def __init__(self, per_look: float = 0.0) -> None:
        self.now, self.per_look = 0.0, per_look

    def perf_counter(self) -> float:
        self.now += self.per_look
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def simulated(make_engine: Callable[..., Any]) -> Any:
    return make_engine({"profile": PROFILE, "time_scale": 1.0}, max_model_len=1024)


def test_a_simulated_accelerator_measures_its_own_law(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    found = measure(core_of(simulated), GPU_LIMIT_S, clock.perf_counter)
    profile = PROFILES[PROFILE]
    law = Hardware(step_s=steps_of_profile(profile), kv_tokens=profile.kv_cache_tokens, max_num_seqs=256).measured()
    assert found is not None
    assert law is not None
    assert clock.now <= GPU_LIMIT_S
    assert found.step_s == pytest.approx(law.step_s, rel=0.02)
    assert found.output_token_s == pytest.approx(law.output_token_s, rel=0.1)
    assert found.prompt_token_s == pytest.approx(law.prompt_token_s, rel=0.05)
    assert min(found.step_error_s, found.output_token_error_s, found.prompt_token_error_s) > 0
    bytes_per_s = profile.accelerator.bandwidth_bytes_per_s * profile.accelerator.bandwidth_efficiency
    assert found.context_token_s == pytest.approx(profile.model.kv_bytes_per_token / bytes_per_s, rel=0.1)


@pytest.mark.parametrize("limit_s", [0.5, 0.3])
def test_what_little_time_allows_is_right_within_its_errors(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """A step takes 31 ms: 0.5 s are enough for three steps of each kind, and 0.3 s for those of one sequence and a prompt."""
    clock = Clock()
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    found = measure(core_of(simulated), limit_s, clock.perf_counter)
    profile = PROFILES[PROFILE]
    law = Hardware(step_s=steps_of_profile(profile), kv_tokens=profile.kv_cache_tokens, max_num_seqs=256).measured()
    assert found is not None
    assert law is not None
    assert clock.now <= limit_s + 0.1, "the step that runs at the end of the time, and one that empties the engine"
    assert abs(found.step_s - law.step_s) <= 2 * found.step_error_s
    assert abs(found.output_token_s - law.output_token_s) <= 2 * found.output_token_error_s
    assert abs(found.prompt_token_s - law.prompt_token_s) <= 2 * found.prompt_token_error_s


def test_where_the_time_is_over_nothing_is_said_and_nothing_left(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(per_look=0.2)
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    core = core_of(simulated)
    assert measure(core, 1.0, clock.perf_counter) is None
    assert clock.now <= 4.0, "one step a look, and the current step ends"
    assert not core.scheduler.has_requests()
    assert len(answer(simulated)) == 4


def test_an_engine_that_computes_measures_itself(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(distributed_executor_backend=None, additional_config={}, block_size=128)
    core = core_of(engine)
    scheduled: list[int] = []
    schedule = core.scheduler.schedule

    def noted(*args: Any) -> Any:
        made = schedule(*args)
        scheduled.append(made.total_num_scheduled_tokens)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler, "schedule", noted)
        found = measure(core, 120.0)
    assert found is not None
    assert found.step_s > 0
    assert found.prompt_token_s < found.step_s
    assert scheduled[0] == 129, "a block of the prefix cache, and a token"
    assert scheduled.count(32) == DECODES + 1, "32 sequences compute one token each of their context, too"
    assert not core.scheduler.has_requests()
    assert core.scheduler.kv_cache_manager.usage == 0.0
    assert len(answer(engine)) == 4


def test_what_fails_is_no_error_of_the_start_and_leaves_no_cached_blocks() -> None:
    cached = {"blocks"}
    core = SimpleNamespace(vllm_config=None, abort_requests=None, reset_prefix_cache=lambda reset_connector: cached.pop())
    assert measure(core, 5.0) is None
    assert not cached


def test_on_a_cpu_the_limit_is_a_share_of_the_start_and_at_least_four_seconds() -> None:
    assert limit_s("cpu", 20.0) == CPU_LEAST_S
    assert limit_s("cpu", 100.0) == pytest.approx(100.0 * CPU_SHARE)
    assert limit_s("cuda", 100.0) == GPU_LIMIT_S
