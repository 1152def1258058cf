"""Receipts describe requests, from an ingress with vLLM's own front end and fake engines; real HTTP."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from serve_app.core.routing import Reason
from serve_app.ingress.shortcuts.streaming import Stream
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.streams import CHANGING
from tests.ingress.test_ledger import KEY, SECRET_TEXT, Ingress, serving

pytestmark = pytest.mark.engine

ASKS = {"x-serve-app-receipt": "1"}
_COMMENT = re.compile(rb": receipt (.*)\n\n$")


async def ask(ingress: Ingress, headers: dict[str, str], *, tokens: int = 6, **fields: Any) -> httpx.Response:
    """Return the answer to a request that replica a computes, a token a step."""
    body = {"model": MODEL, "prompt": SECRET_TEXT, "temperature": 0, "max_tokens": tokens, **fields}
    asked = asyncio.create_task(
        ingress.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}", **headers})
    )
    engine = ingress.replicas["a"].engine
    await until(lambda: engine.running or asked.done())
    while engine.running:
        engine.step()
        await asyncio.sleep(0.001)
    return await asked


@in_loop
async def test_an_answer_has_its_receipt_in_a_header(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, ingress={"receipts": True}) as ingress:
        await ingress.join("a")
        response = await ask(ingress, ASKS, request_id="mine \u00e9")
        told = json.loads(response.headers["x-serve-app-receipt"])
        total_s = told.pop("total_s")
        assert sum(told["phases_s"].values()) == pytest.approx(total_s, abs=1e-5)
        assert list(told.pop("phases_s")) == ["intake", "queue", "prefill", "decode", "finish"]
        assert told["attempts"][0].pop("reason") in {reason.value for reason in Reason}
        assert told == {
            "id": "mine \u00e9",
            "model": MODEL,
            "attempts": [{"replica": "a", "end": "length"}],
            "expected_prefix_hit_tokens": 0,
            "prefix_hit_tokens": None,
            "resume_gaps_s": [],
        }
        refused = await ask(ingress, ASKS, tokens=-1)
        assert list(json.loads(refused.headers["x-serve-app-receipt"])["phases_s"]) == ["intake"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"n": 2, "temperature": 0.7, "seed": 1}])
@in_loop
async def test_a_stream_has_its_receipt_behind_its_last_event_and_is_else_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    repeated = 0
    add = Stream.add

    def counted(stream: Stream, output: Any) -> bool:
        nonlocal repeated
        taken = add(stream, output)
        repeated += taken
        return taken

    monkeypatch.setattr(Stream, "add", counted)
    async with serving(model, tmp_path, ingress={"receipts": True}) as ingress:
        await ingress.join("a")
        fields = {"stream": True, "tokens": 24, **options}
        plain = await ask(ingress, {}, **fields)
        asks_for_none = await ask(ingress, {"x-serve-app-receipt": "0"}, **fields)
        repeated = 0
        with_receipt = await ask(ingress, ASKS, **fields)
    assert (repeated > 0) == ("n" not in options), "the middle of a stream is repeated for a client with a receipt, too"
    events, receipt, _ = _COMMENT.split(with_receipt.content)
    assert CHANGING.sub(b"", events) == CHANGING.sub(b"", plain.content) == CHANGING.sub(b"", asks_for_none.content)
    told = json.loads(receipt)
    assert [each["replica"] for each in told["attempts"]] == ["a"] * options.get("n", 1)
    assert sum(told["phases_s"].values()) == pytest.approx(told["total_s"], abs=1e-5)
    assert with_receipt.headers.keys() == plain.headers.keys()


@in_loop
async def test_the_receipt_of_a_stream_that_went_on_elsewhere_has_both_replicas_and_the_gap(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, ingress={"receipts": True}) as ingress:
        await ingress.join("a", "b")
        body = {"model": MODEL, "prompt": "hello", "temperature": 0, "max_tokens": 4, "stream": True}
        headers = {"authorization": f"Bearer {KEY}", **ASKS}
        answer = asyncio.create_task(ingress.http.post("/v1/completions", json=body, headers=headers))
        await until(lambda: any(replica.engine.running for replica in ingress.replicas.values()))
        first = ingress.holder()
        (other,) = ingress.replicas.keys() - {first}
        ingress.replicas[first].engine.step(2)
        await until(lambda: ingress.front.client.fleet.tally.output_tokens == 2)
        ingress.replicas[first].stop_listening()
        await until(lambda: ingress.replicas[other].engine.running)
        ingress.replicas[other].engine.step(2)
        content = (await answer).content
    found = _COMMENT.search(content)
    assert found is not None
    told = json.loads(found[1])
    assert [(each["replica"], each["end"]) for each in told["attempts"]] == [(first, "broke_off"), (other, "length")]
    assert len(told["resume_gaps_s"]) == 1


@in_loop
async def test_openais_client_reads_a_stream_with_a_receipt(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, ingress={"receipts": True}) as ingress:
        await ingress.join("a")
        engine = ingress.replicas["a"].engine
        async with AsyncOpenAI(base_url=f"{ingress.http.base_url}/v1", api_key=KEY) as client:
            stream = await asyncio.gather(
                client.completions.create(
                    model=MODEL, prompt="hello", temperature=0, max_tokens=3, stream=True, extra_headers=ASKS
                ),
                _step_when_asked(engine),
            )
            reasons = [event.choices[0].finish_reason async for event in stream[0]]
    assert reasons[-1] == "length"


async def _step_when_asked(engine: Any) -> None:
    await until(lambda: engine.running)
    engine.step(3)


@in_loop
async def test_where_the_settings_do_not_allow_receipts_no_client_gets_one(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path) as ingress:
        await ingress.join("a")
        assert "x-serve-app-receipt" not in (await ask(ingress, ASKS)).headers
        assert b": receipt" not in (await ask(ingress, ASKS, stream=True)).content
