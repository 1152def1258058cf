"""Text that spans the cut between two replicas stays whole: vLLM's own front end, whose detokenizer survives the loss; fake engines."""

import asyncio
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from serve_app.core.request import RequestState, Resume
from tests.doubles import fake_engine
from tests.doubles.fleet import in_loop, until
from tests.ingress.test_held_frontend import Ingress, serving

TEXT = "one ☃ two zEND OFz three"
STOP = "zEND OFz"
LIMITS_S = {"no_replica_s": 60.0}


@pytest.fixture
def script(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the engines say `TEXT`, whatever they are asked; return its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    script = list[int](tokenizer.encode(TEXT, add_special_tokens=False))
    prompt = tokenizer.encode("Say it:")
    monkeypatch.setattr(fake_engine, "next_token", lambda sequence: script[len(sequence) - len(prompt)])
    return script


async def cut(ingress: Ingress, script: list[int], count: int) -> str:
    """Return the text of a completion whose replica is lost after ``count`` tokens."""
    fields = {"prompt": "Say it:", "max_tokens": len(script), "stop": [STOP]}
    first = await ingress.join()
    answer = asyncio.create_task(ingress.post("/v1/completions", **fields))
    await until(lambda: first.engine.running)
    first.engine.step(count)
    (state,) = ingress.front.client.fleet.requests.values()
    assert state.resume is Resume.CONTINUE
    await until(lambda: _has(state, count))
    await first.close()
    await until(lambda: not ingress.front.client.fleet.replicas)
    second = await ingress.join()
    await until(lambda: second.engine.running)
    second.engine.step(len(script) - count)
    text = (await answer).json()["choices"][0]["text"]
    await second.close()
    await until(lambda: not ingress.front.client.fleet.replicas)
    return str(text)


def _has(state: RequestState, count: int) -> bool:
    return len(state.emitted_ids) == count


@in_loop
async def test_a_cut_within_a_character_or_a_stop_string_is_not_seen(model: Path, script: list[int]) -> None:
    before_stop = next(n for n in range(len(script)) if _is_over(model, script[: n + 1]))
    async with serving(model, silence_s=1e6, **LIMITS_S) as ingress:
        texts = [await cut(ingress, script, count) for count in range(1, before_stop + 1)]
    assert before_stop > 8
    assert texts == ["one ☃ two "] * before_stop


def _is_over(model: Path, ids: list[int]) -> bool:
    return STOP in AutoTokenizer.from_pretrained(model).decode(ids)
