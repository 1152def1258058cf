"""Ids from the cache are those of the whole text."""

import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.checkpoints.tiny_tokenizer import write_tokenizer
from serve_app.ingress import token_cache
from serve_app.ingress.token_cache import LEAST_CHARS, MAX_CHARS, TokenCache, special_tokens_of

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>")
CORPUS = ["the cat is on the mat, and it was as long as the day is. día 日本 é\n\n  two"] * 3


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizer
    made.normalizer = normalizer
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], show_progress=False))
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    made.decoder = decoders.ByteFallback()
    return made


def tiny() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size=1024, max_tokens=2048, with_template=True, wrap=False)
        return Tokenizer.from_file(f"{folder}/tokenizer.json")


TOKENIZERS = {
    "byte level, of the tiny model": tiny(),
    "byte level with a blank before each text": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a blank before the first text only": trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "a blank before each text": trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "prepended by the normalizer": trained(None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "normalized": trained(pre_tokenizers.Whitespace(), normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])),
}


def cache_of(tokenizer: Tokenizer) -> TokenCache:
    return TokenCache(partial(tokenizer.encode_batch_fast, add_special_tokens=False), special_tokens_of(tokenizer))


WORDS = st.sampled_from(
    [*SPECIAL, *CORPUS[:1], " ", "\n", "the", "é", "e\u0301", "ﬁ", "日本", "<|im_", "end|>", "<", "x", "🙂", "ca"]
)
TEXTS = st.one_of(st.lists(WORDS, max_size=20).map("".join), st.text(max_size=40))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_text(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    assert special_tokens_of(tokenizer)
    cache = cache_of(tokenizer)
    for text in [*texts, "".join(texts), *texts]:
        assert cache.ids_of(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_beginning_of_a_conversation_is_tokenized_once() -> None:
    seen: list[str] = []

    def encode(texts: Any) -> Any:
        seen.extend(texts)
        return TOKENIZERS["normalized"].encode_batch_fast(texts, add_special_tokens=False)

    cache = TokenCache(encode, SPECIAL)
    system, first, second = ("<|im_start|>" + text * LEAST_CHARS for text in ("system ", "one ", "two "))
    cache.ids_of(system + first)
    cache.ids_of(system + first + second)
    cache.ids_of(system + second + "<|im_end|>")
    assert seen == [system, first, second, "<|im_end|>"]


def test_a_text_of_special_tokens_has_few_parts() -> None:
    seen: list[str] = []

    def encode(texts: Any) -> Any:
        seen.extend(texts)
        return TOKENIZERS["normalized"].encode_batch_fast(texts, add_special_tokens=False)

    assert len(TokenCache(encode, SPECIAL).ids_of("<s>" * 10_000)) == 10_000
    assert len(set(seen)) <= 2
    assert all(len(text) >= LEAST_CHARS for text in seen[:-1])


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_CHARS", 4000)
    monkeypatch.setattr(token_cache, "MOST_SHARE", 2)
    cache = cache_of(TOKENIZERS["normalized"])
    short, long, *others = "a" * (LEAST_CHARS - 1), "b" * 2001, *(f"{n:0200}" for n in range(50))
    for text in (short, long, *others):
        cache.ids_of(text)
        assert cache._num_chars == sum(map(len, cache._ids)) <= 4000
    assert list(cache._ids) == others[-20:]
    assert MAX_CHARS > 4000


def test_threads_share_it() -> None:
    cache = cache_of(TOKENIZERS["normalized"])
    texts = [f"<s>{n} {'the cat ' * 40}" * 2 for n in range(40)]
    expected = {text: TOKENIZERS["normalized"].encode(text).ids for text in texts}
    found: list[bool] = []

    def ask() -> None:
        found.extend(cache.ids_of(text) == expected[text] for text in texts * 5)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 800
    assert cache._num_chars == sum(map(len, cache._ids))


@pytest.mark.parametrize("field", ["lstrip", "rstrip", "single_word"])
def test_a_tokenizer_whose_tokens_look_around_them_is_not_cut(field: str) -> None:
    tokenizer = trained(pre_tokenizers.Whitespace())
    flags: Any = {field: True}
    tokenizer.add_special_tokens([AddedToken("<mask>", **flags)])
    assert special_tokens_of(tokenizer) == []


def test_a_tokenizer_that_takes_special_tokens_for_text_is_not_cut() -> None:
    tokenizer = trained(pre_tokenizers.Whitespace())
    tokenizer.encode_special_tokens = True
    assert special_tokens_of(tokenizer) == []
