"""An engine whose layers are split into two stages, one on each of two nodes, answers as one process does, and ends as a whole.

Both nodes are this machine, and vLLM's CPU build takes the place of CUDA's.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.checkpoints import make_tiny_llama
from tests.replica.answering import NUM_TOKENS, PROMPT, greedy
from tests.replica.nodes import VICTIMS, Nodes, two_nodes, until_all_gone
from tests.replica.tensor_parallel import ATTEMPT_ID

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("stages") / "model")


@pytest.fixture
def nodes(model: Path) -> Iterator[Nodes]:
    request = EngineCoreRequest(
        request_id=ATTEMPT_ID,
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    (encoded,) = MsgpackEncoder().encode(request)
    (model / "request").write_bytes(encoded)
    environment = {**os.environ, "STAGES": "2"}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    with two_nodes(model, model / "request", environment) as started:
        yield started


def test_greedy_answers_are_those_of_one_process_and_nothing_is_left_of_an_engine_that_lost_a_stage(
    nodes: Nodes, model: Path
) -> None:
    ids: list[int] = []
    while len(ids) < NUM_TOKENS:
        ids += map(int, nodes[0].hears("tokens"))
    assert ids[:NUM_TOKENS] == greedy(model)
    os.kill(VICTIMS["second worker"](nodes), signal.SIGKILL)
    until_all_gone(nodes)
