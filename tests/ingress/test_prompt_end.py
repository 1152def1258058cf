"""An answer's text is that of vLLM's detokenizer, although ours begins with the end of the prompt."""

import asyncio
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from serve_app.checkpoints import make_tiny_llama
from serve_app.checkpoints.tiny_tokenizer import write_tokenizer
from serve_app.ingress.shortcuts import streaming
from serve_app.ingress.shortcuts.prompt_end import MAX_WHOLE_TOKENS, NUM_END_TOKENS, begin_at_the_end
from tests.doubles.fleet import in_loop, until
from tests.ingress.test_held_frontend import serving
from tests.shortcuts import of_shortcuts

pytestmark = [pytest.mark.engine, of_shortcuts]
SPECIAL = 0


def byte_level() -> Tokenizer:
    """The tiny model's: its pieces are bytes, also parts of characters."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size=1024, max_tokens=2048, with_template=False, wrap=False)
        return Tokenizer.from_file(f"{folder}/tokenizer.json")


def byte_fallback() -> Tokenizer:
    """One in the manner of Llama 2's: a blank at the beginning is dropped, and bytes in a row are one text or none."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *("▁", "▁the", "▁cat", "s", "é", "日本", "▁▁", "!")]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return made


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def detokenizer(tokenizer: Tokenizer, prompt: list[int], *, skip: bool = True) -> Any:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(skip_special_tokens=skip),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    tokens: Any = SimpleNamespace(_tokenizer=tokenizer)
    return FastIncrementalDetokenizer(tokens, request)


def texts(found: Any, answer: list[int]) -> list[str]:
    return [found.decode_next(token_id) for token_id in answer]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_token_has_the_text_that_it_has_after_the_whole_prompt(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    # Bytes and words by turns: an emoji's four bytes, halves of them, special tokens, blanks.
    in_bytes = "🙂é".encode()
    bytes_of = [1 + byte for byte in in_bytes] if name == "byte fallback" else tokenizer.encode(in_bytes.decode()).ids
    ids = st.one_of(st.integers(0, tokenizer.get_vocab_size() - 1), st.sampled_from([*bytes_of, SPECIAL]))
    run = st.one_of(st.lists(ids, min_size=1, max_size=12), st.just(bytes_of * 20), st.just([SPECIAL] * NUM_END_TOKENS))
    runs = data.draw(st.lists(run, min_size=1, max_size=12))
    prompt = [5] * MAX_WHOLE_TOKENS + [token_id for each in runs for token_id in each]
    answer = data.draw(st.lists(ids, min_size=1, max_size=8))
    skip = data.draw(st.booleans())
    whole, ours = (detokenizer(tokenizer, prompt, skip=skip) for _ in range(2))
    begin_at_the_end(ours, prompt)
    assert texts(ours, answer) == texts(whole, answer)


@pytest.mark.parametrize(
    ("prompt", "begins_at_the_end"),
    [
        ([260, 258] * MAX_WHOLE_TOKENS, True),
        ([260, 258] * (MAX_WHOLE_TOKENS // 2), False),
        ([260] * MAX_WHOLE_TOKENS + [SPECIAL] * NUM_END_TOKENS, False),
        ([260] * MAX_WHOLE_TOKENS + [1 + 0x9F] * NUM_END_TOKENS, False),
        ([260] * MAX_WHOLE_TOKENS + [1 + 0x41] * NUM_END_TOKENS, False),
        ([260] * MAX_WHOLE_TOKENS + [1 + 0x80] + [1 + 0x41] * (NUM_END_TOKENS - 2) + [SPECIAL] * 2, False),
        ([260] * MAX_WHOLE_TOKENS + [1 + 0x41] * (NUM_END_TOKENS - 1), True),
    ],
    ids=[
        "long",
        "short",
        "ends without a text",
        "ends with parts of characters",
        "ends with bytes",
        "ends with bytes and special tokens",
        "has a word before its bytes",
    ],
)
def test_only_where_it_makes_the_same_text(prompt: list[int], begins_at_the_end: bool) -> None:
    found = detokenizer(TOKENIZERS["byte fallback"], prompt)
    before = found.stream
    begin_at_the_end(found, prompt)
    assert (found.stream is not before) == begins_at_the_end


def test_a_byte_that_is_no_text_before_many_that_are() -> None:
    prompt = [260] * MAX_WHOLE_TOKENS + [1 + 0x80] + [1 + byte for byte in "é".encode()] * NUM_END_TOKENS
    whole, ours = (detokenizer(TOKENIZERS["byte fallback"], prompt) for _ in range(2))
    begin_at_the_end(ours, prompt)
    assert texts(ours, [258, 259]) == texts(whole, [258, 259])


@in_loop
async def test_a_request_begins_with_the_end_of_its_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[tuple[type, int]] = []
    monkeypatch.setattr(streaming, "begin_at_the_end", lambda found, ids: begun.append((type(found), len(ids))))
    async with serving(make_tiny_llama(tmp_path / "tiny"), silence_s=1e6, no_replica_s=60.0) as ingress:
        replica = await ingress.join()
        answer = asyncio.create_task(ingress.post("/v1/completions", prompt=[5] * 300, max_tokens=1))
        await until(lambda: replica.engine.running)
        replica.engine.step()
        await answer
    assert begun == [(FastIncrementalDetokenizer, 300)]
