"""vLLM's structs on a link are the same in both images, but for fields at their ends that the older vLLM leaves out."""

from typing import Any

import pytest

from serve_app.vllm_versions import may_speak
from tests.contracts.tables import VERSIONS
from tests.cuda.conftest import PYTHONS, run

NEW = {"EngineCoreOutput": ["error"], "PoolingParams": ["late_chunking_params"]}
"""Fields of the CUDA image's vLLM that the CPU image's lacks. A new one needs an answer to: what does a client lose if it is left out?

``error``: the front end's text of a request that the engine refused. Our ingress gives its own (`refused_by_engines`), and an engine is
never paused. ``late_chunking_params``: no ingress of the CPU image sends it.
"""


@pytest.fixture(scope="module")
def encoded() -> dict[str, dict[str, Any]]:
    return {image: run(image, "tests.cuda.wire", env={"VLLM_TARGET_DEVICE": "cpu"}) for image in PYTHONS}


def test_each_image_reads_what_the_other_one_writes(encoded: dict[str, dict[str, Any]]) -> None:
    added, wrong = {}, []
    for name, (how, *older) in encoded["cpu"].items():
        its_how, *newer = encoded["cuda"][name]
        last = newer[len(older) :]
        if (its_how, newer[: len(older)]) != (how, older) or any(default == "required" for _, _, default in last):
            wrong.append(f"{name}: was {[how, *older]}, is {[its_how, *newer]}")
        if last:
            added[name] = [field for field, _, _ in last]
    assert wrong == []
    assert added == NEW
    assert {"EngineCoreRequest", "SamplingParams", "EngineCoreOutputs", "LogprobsLists", "SchedulerStats"} <= encoded[
        "cpu"
    ].keys()


def test_an_ingress_of_the_cpu_image_may_speak_to_engines_of_the_cuda_image_and_not_the_other_way() -> None:
    cpu, cuda = VERSIONS
    assert (may_speak(cpu, cuda), may_speak(cuda, cpu)) == (True, False)
