"""Two real engines on the CPU hand requests over with their KV: each answer is that of an undisturbed run."""

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.links.protocol.messages import HANDED_OVER
from tests.replica.handing import Answer, Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install serve-app[kv]"),
]

BLOCK = 128
"""Tokens of a block of vLLM's CPU build."""
REST = 12
"""Tokens of the answer after the hand-over, at least two less."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("hand-over") / "model"))


@pytest.fixture(scope="module")
def engines(checkpoint: str) -> Iterator[tuple[Engine, Engine]]:
    """Return the source and the target, whose labels are the same."""
    both = Engine(checkpoint), Engine(checkpoint)
    try:
        labels = {engine.ready().capabilities.kv_transfer for engine in both}
        assert len(labels) == 1
        assert labels.pop().startswith("nixl ")
        assert any(is_read(both, number) for number in range(20))
        yield both
    finally:
        for engine in both:
            engine.kill()


def is_read(engines: tuple[Engine, Engine], number: int) -> bool:
    """Hand a request over. vLLM waits 5 s for another engine's first answer, which is too short on a busy machine."""
    source, target = engines
    prompt = prompt_of(f"first{number}", 150)
    before = left(source, f"first{number}", prompt, 2)
    return gone_on(target, f"first{number}", prompt, before, 4).num_read > 0


def prompt_of(name: str, length: int) -> list[int]:
    numbers = random.Random(name)
    return [numbers.randrange(20, 1000) for _ in range(length)]


def left(source: Engine, name: str, prompt: list[int], num_emitted: int, **params: Any) -> Answer:
    """Return a request's answer at the source, which is asked to hand it over after ``num_emitted`` tokens."""
    source.add(f"{name}@0", prompt, max_tokens=num_emitted + REST, **params)
    source.order("until", f"{name}@0", num_emitted)
    source.hand_over(f"{name}@0")
    return source.finish(f"{name}@0")


def gone_on(target: Engine, name: str, prompt: list[int], before: Answer, total: int, **params: Any) -> Answer:
    so_far = before.token_ids
    target.add(f"{name}@1", prompt + so_far, len(so_far), before.kv(), max_tokens=total - len(so_far), **params)
    return target.finish(f"{name}@1")


def undisturbed(engine: Engine, name: str, prompt: list[int], total: int, **params: Any) -> list[int]:
    engine.add(f"{name}-whole@0", prompt, max_tokens=total, **params)
    return engine.finish(f"{name}-whole@0").token_ids


@pytest.mark.parametrize(
    ("length", "num_emitted"),
    [
        *((125, 1), (124, 3), (127, 1), (128, 1), (129, 1)),  # 126 to 130 tokens: around one block
        *((250, 4), (254, 1), (255, 1), (250, 7), (256, 2)),
        *((380, 3), (383, 1), (384, 1), (384, 2)),
    ],
)
def test_a_request_goes_on_at_the_other_engine_with_its_kv(engines: tuple[Engine, Engine], length: int, num_emitted: int) -> None:
    source, target = engines
    name, total = f"r{length}-{num_emitted}", num_emitted + REST
    prompt = prompt_of(name, length)
    before = left(source, name, prompt, num_emitted)
    assert before.last is not None
    assert (before.last.stop_reason, before.last.kv_transfer_params is None) == (HANDED_OVER, False)
    at_edge = {0: 2, 1: 1}.get((length + num_emitted) % BLOCK, 0)
    assert len(before.token_ids) == num_emitted + at_edge
    after = gone_on(target, name, prompt, before, total)
    source.order("until_free", f"{name}@0")
    assert before.token_ids + after.token_ids == undisturbed(source, name, prompt, total)
    assert after.num_read == length + len(before.token_ids)


def test_penalties_go_on_with_all_tokens_so_far(engines: tuple[Engine, Engine]) -> None:
    source, target = engines
    prompt = prompt_of("penalty", 200)
    before = left(source, "penalty", prompt, 6, repetition_penalty=1.3)
    after = gone_on(target, "penalty", prompt, before, 18, repetition_penalty=1.3)
    assert before.token_ids + after.token_ids == undisturbed(source, "penalty", prompt, 18, repetition_penalty=1.3)
    assert after.num_read > 0


@pytest.mark.parametrize("change", ["a token more", "no MessagePack"])
def test_kv_that_is_not_of_this_prompt_is_not_read(engines: tuple[Engine, Engine], change: str) -> None:
    source, target = engines
    prompt = prompt_of(change, 150)
    before = left(source, change, prompt, 2)
    kv = before.kv() if change == "a token more" else b"\xc1"
    longer = [*prompt, *before.token_ids, 77]
    target.add(f"{change}@1", longer, 3, kv, max_tokens=5)
    after = target.finish(f"{change}@1")
    assert (after.token_ids, after.num_read) == (undisturbed(source, change, longer, 5), 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_read_is_the_sources_memory_unless_it_came_too_late(engines: tuple[Engine, Engine], is_late: bool) -> None:
    source, target = engines
    name = f"spoilt-{is_late}"
    prompt = prompt_of(name, 300)
    right = undisturbed(source, name, prompt, 16)
    before = left(source, name, prompt, 4)
    source.order("spoil")
    if is_late:
        target.order("limit", -1.0)
    after = gone_on(target, name, prompt, before, 16)
    target.order("limit", 600.0)
    assert (before.token_ids + after.token_ids == right) is is_late


def test_the_prompt_is_computed_if_the_source_is_dead(engines: tuple[Engine, Engine]) -> None:
    """The last test: it ends the source."""
    source, target = engines
    prompt = prompt_of("dead", 200)
    before = left(source, "dead", prompt, 5)
    source.kill()
    after = gone_on(target, "dead", prompt, before, 15)
    assert before.token_ids + after.token_ids == undisturbed(target, "dead", prompt, 15)
