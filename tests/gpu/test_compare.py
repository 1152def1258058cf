"""These tests need an NVIDIA GPU: the fleet gives bare vLLM's answers and loses no request. They are skipped elsewhere."""

import pytest

from serve_app.checkpoints import fetch_embedded
from serve_app.config import default_cache_dir
from tests.gpu.compare import EMBEDDED, PROMPTS, compare, missing_device, model_on_gpu, problems


@pytest.mark.gpu
@pytest.mark.timeout(3600)
def test_the_fleet_answers_as_bare_vllm_on_a_gpu() -> None:
    if why := missing_device():
        pytest.skip(why)
    fetch_embedded(EMBEDDED.removeprefix("embedded:"), default_cache_dir())
    assert problems(compare(model_on_gpu(EMBEDDED), streams=[32], rounds=1)) == []


def test_another_answer_and_a_failed_request_are_problems() -> None:
    run = {"target": "fleet-1", "concurrency": 32, "failed": 0}
    other = {"prompt": PROMPTS[0], "bare": ("Paris", "stop"), "fleet-1": ("Rome", "stop")}
    assert problems({"different": [], "runs": [run]}) == []
    assert problems({"different": [other], "runs": [{**run, "failed": 2}]}) == [
        "another answer to 'The capital of France is': bare ('Paris', 'stop'), fleet ('Rome', 'stop')",
        "2 requests failed at fleet-1, 32 streams",
    ]
