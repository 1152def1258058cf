"""An engine over two nodes answers as one on one node does, and ends as a whole, whichever of its processes ends or stops.

Both nodes are this machine.
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
    return make_tiny_llama(tmp_path_factory.mktemp("shards") / "model")


@pytest.fixture
def nodes(model: Path) -> Iterator[Nodes]:
    """Two nodes that have joined and load the engine, which then runs one request of 2000 tokens."""
    with two_nodes(model, request_file(model)) as started:
        yield started


def request_file(model: Path) -> Path:
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
    file = model.parent / "request"
    file.write_bytes(encoded)
    return file


each_process = pytest.mark.parametrize("victim", VICTIMS)


@pytest.mark.parametrize("stages", [1, 2])
def test_greedy_answers_are_those_of_one_process(model: Path, stages: int) -> None:
    with two_nodes(model, request_file(model), stages=stages) as nodes:
        ids: list[int] = []
        while len(ids) < NUM_TOKENS:
            ids += map(int, nodes[0].hears("tokens"))
    assert ids[:NUM_TOKENS] == greedy(model)


@each_process
def test_nothing_is_left_of_a_serving_engine_that_lost_a_process(nodes: Nodes, victim: str) -> None:
    nodes[0].hears("tokens")
    os.kill(VICTIMS[victim](nodes), signal.SIGKILL)
    until_all_gone(nodes)


@each_process
def test_nothing_is_left_of_a_loading_engine_that_lost_a_process(nodes: Nodes, victim: str) -> None:
    for node in nodes:
        node.worker()
    os.kill(VICTIMS[victim](nodes), signal.SIGKILL)
    until_all_gone(nodes)


@each_process
def test_a_serving_engine_with_a_stopped_process_ends_as_a_whole(nodes: Nodes, victim: str) -> None:
    nodes[0].hears("tokens")
    os.kill(VICTIMS[victim](nodes), signal.SIGSTOP)
    for node in nodes:
        node.supervisor.wait()
    until_all_gone(nodes)
