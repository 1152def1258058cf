"""The configured routing reaches the replicas, over real links to fake engines."""

import msgspec
import pytest

from tests.doubles.fake_engine import CAPABILITIES, FakeEngine
from tests.doubles.fleet import MODEL, Fleet, fleet, in_loop, settings, until

PROMPT = list(range(3 * CAPABILITIES.block_size))


async def _ask_twice(f: Fleet) -> list[str]:
    """Send a long prompt, one that keeps the other replica as busy, and the first prompt with more text; return their replicas."""
    await f.front.add("r0", PROMPT, max_tokens=8)
    await f.front.add("r1", [7, *PROMPT[1:]], max_tokens=1)
    await f.front.add("r2", [*PROMPT, *range(200)], max_tokens=8)
    await until(lambda: sum(len(f.running(name)) for name in "ab") == 3)
    return [next(name for name in "ab" if f"r{n}@0" in f.running(name)) for n in range(3)]


@pytest.mark.parametrize(
    ("routing", "ingresses", "went", "reasons"),
    [
        ({}, 1, ["a", "b", "a"], {"load": 2, "prefix": 1}),
        ({}, 2, ["a", "a", "a"], {"hash": 2, "prefix": 1}),  # where another ingress would have put them, too
        ({"by": "load"}, 1, ["a", "b", "b"], {"load": 3}),
    ],
)
@in_loop
async def test_by_prefix_a_prompt_follows_its_beginning_and_by_load_it_does_not(
    routing: dict[str, str], ingresses: int, went: list[str], reasons: dict[str, int]
) -> None:
    models = {MODEL: {"model": "/m", "simulated": {"profile": "a10g-llama-8b"}, "routing": routing}}
    async with fleet(settings(models=models, ingress={"replicas": {"max": ingresses}})) as f:
        await f.join("a")
        await f.join("b")
        assert await _ask_twice(f) == went
        assert f.client.fleet.routed == reasons
        assert f.client.fleet.expected_hit_tokens == (len(PROMPT) if "prefix" in reasons else 0)
        replica = f.client.fleet.replicas["a"]
        assert replica.kv_tokens == CAPABILITIES.num_kv_blocks * CAPABILITIES.block_size


@in_loop
async def test_the_ingress_knows_what_a_replicas_host_keeps() -> None:
    models = {MODEL: {"model": "/m", "simulated": {"profile": "a10g-llama-8b"}}}
    async with fleet(settings(models=models)) as f:
        await f.join("a", engine=FakeEngine(capabilities=msgspec.structs.replace(CAPABILITIES, host_kv_tokens=4096)))
        assert f.client.fleet.replicas["a"].host_kv_tokens == 4096
