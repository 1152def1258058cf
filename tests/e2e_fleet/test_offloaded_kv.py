"""Prompts that fell out of an accelerator's KV cache come back from its host, in real processes with simulated accelerators."""

from collections.abc import Iterator

import pytest

from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet
from tests.e2e_fleet.streams import completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT_TOKENS, NUM_PROMPTS = 1024, 6
CACHED_BLOCKS = 40
"""Blocks of the accelerator, too few for two prompts at once."""


@pytest.fixture(scope="module")
def offloading(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = configure(
        8059,
        replicas={"min": 1, "max": 1},
        timeouts={"drain_s": 5.0, "no_replica_s": 30.0},
        simulated={"profile": "a10g-llama-8b"},
        engine_args={"max_model_len": 1280, "block_size": 32, "num_gpu_blocks_override": CACHED_BLOCKS + 1},
    )
    config["models"][MODEL]["kv"] = {"transfer": "nixl", "port": 16600, "offload_gib": 4}
    with fleet(config, tmp_path_factory.mktemp("offloading")) as running:
        yield running


def cached(fleet: Fleet, source: str) -> float:
    """Return the prompt tokens that engines found in this tier, as the ingress shows them."""
    series = fleet.ingresses()[0]
    return sum(
        value
        for (name, labels), value in series.items()
        if name == "vllm:prompt_tokens_cached_by_source_total" and ("source", source) in labels
    )


def test_prompts_come_back_from_the_host_and_metrics_say_so(offloading: Fleet) -> None:
    asks = [completion(MODEL, prompt=[20 + number] * PROMPT_TOKENS, max_tokens=8) for number in range(NUM_PROMPTS)]
    first = [play(offloading.url, [ask])[0] for ask in asks]
    assert all(answer.is_complete() for answer in first)
    assert cached(offloading, "host") == 0
    again = [play(offloading.url, [ask])[0] for ask in asks]
    assert [answer.folded() for answer in again] == [answer.folded() for answer in first]
    assert cached(offloading, "host") >= 0.9 * NUM_PROMPTS * PROMPT_TOKENS
