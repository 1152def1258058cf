"""Ids from the cache are those of the whole text."""

import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.checkpoints.tiny_tokenizer import write_tokenizer
from serve_app.ingress.shortcuts import token_cache
from serve_app.ingress.shortcuts.token_cache import MIN_PART_CHARS, TokenCache, cuts_of

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>")
TEMPLATE = "".join(SPECIAL)
CORPUS = ["the cat is on the mat, and it was as long as the day is. día 日本 é\n\n  two"] * 3


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizer
    made.normalizer = normalizer
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], show_progress=False))
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("mat", normalized=True)])
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
    return TokenCache(partial(tokenizer.encode_batch_fast, add_special_tokens=False), cuts_of(tokenizer, TEMPLATE))


WORDS = st.sampled_from(
    [*SPECIAL, CORPUS[0], " ", "\n", "the", "é", "e\u0301", "ﬁ", "日本", "<|im_", "end|>", "<", "x", "🙂", "ca", "<t"]
)
TEXTS = st.one_of(st.lists(WORDS, max_size=20).map("".join), st.text(max_size=40))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MIN_PART_CHARS", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_text(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    cache = cache_of(tokenizer)
    for text in [*texts, "".join(texts), *texts]:
        assert cache.ids_of([text]) == [tokenizer.encode(text, add_special_tokens=False).ids]
    assert cache.ids_of(texts) == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def noted(seen: list[str]) -> TokenCache:
    """Return a cache that notes what it tokenizes."""

    def encode(texts: Any) -> Any:
        seen.extend(texts)
        return TOKENIZERS["normalized"].encode_batch_fast(texts, add_special_tokens=False)

    return TokenCache(encode, ("<|im_start|>", "<|im_end|>"))


def test_the_beginning_of_a_conversation_is_tokenized_once() -> None:
    seen: list[str] = []
    cache = noted(seen)
    system, first, second = ("<|im_start|>" + text * MIN_PART_CHARS for text in ("system ", "one ", "two "))
    cache.ids_of([system + first])
    cache.ids_of([system + first + second, system + second])
    cache.ids_of([system + second + "<|im_end|>"])
    assert seen == [system, first, second, "<|im_end|>"]


def test_a_text_of_special_tokens_has_few_parts() -> None:
    seen: list[str] = []
    (ids,) = noted(seen).ids_of(["<|im_end|>" * 10_000])
    assert len(ids) == 10_000
    assert len(seen) <= 2, "all parts but the last one are equal"
    assert len(seen[0]) >= MIN_PART_CHARS


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_BYTES", 40_000)
    cache = cache_of(TOKENIZERS["normalized"])
    short, long = "a" * (MIN_PART_CHARS - 1), "b" * 3000
    cache.ids_of([short, long])
    assert cache._ids == {}
    texts = [f"{n:0200}" for n in range(100)]
    for text in texts:
        cache.ids_of([text])
        cache.ids_of(texts[:1])  # what is used again stays
        assert cache._num_bytes == sum(token_cache._num_bytes(part, ids) for (_, part), ids in cache._ids.items()) <= 40_000
    kept = [part for _, part in cache._ids]
    assert len(kept) > 10
    assert sorted(kept) == sorted([texts[0], *texts[101 - len(kept) :]])


def test_parts_of_one_space_are_not_found_in_another() -> None:
    asked: list[str] = []

    def encode(texts: Sequence[str]) -> Sequence[Any]:
        asked.extend(texts)
        return TOKENIZERS["normalized"].encode_batch(list(texts), add_special_tokens=False)

    cache, text = TokenCache(encode, []), "a" * MIN_PART_CHARS
    for space in ("", "one", "two", "one", "two", ""):
        assert cache.ids_of([text], space) == [TOKENIZERS["normalized"].encode(text, add_special_tokens=False).ids]
    assert asked == [text] * 3


def test_threads_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_BYTES", 40_000)
    cache = cache_of(TOKENIZERS["normalized"])
    texts = [f"{n} {'the cat ' * 40}" for n in range(40)]
    expected = [TOKENIZERS["normalized"].encode(text).ids for text in texts]
    found: list[bool] = []

    def ask(step: int) -> None:
        for _ in range(20):
            found.extend(cache.ids_of([texts[k]]) == [expected[k]] for k in range(0, 40, step))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=ask, args=(step,)) for step in (1, 1, 3, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sys.setswitchinterval(before)
    assert found == [True] * (2 * 20 * 40 + 2 * 20 * 14)
    assert cache._num_bytes == sum(token_cache._num_bytes(part, ids) for (_, part), ids in cache._ids.items())


def test_a_token_is_no_cut_where_it_may_be_a_part_of_another() -> None:
    tokenizer = trained(pre_tokenizers.Whitespace())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("a<b>", "<b>", "<c", "c><d", "<e><e>", "<e>")])
    assert set(cuts_of(tokenizer, "a<b> <b> <c c><d <e><e> <e> <s>")) == {"a<b>", "<c", "<s>"}


def test_only_tokens_of_the_template_are_looked_for() -> None:
    assert cuts_of(TOKENIZERS["normalized"], "<|im_end|>{{ bos_token }}") == ["<|im_end|>"]
    assert cuts_of(TOKENIZERS["normalized"], "") == []


@pytest.mark.parametrize("field", ["lstrip", "rstrip", "single_word"])
def test_a_tokenizer_whose_tokens_look_around_them_is_not_cut(field: str) -> None:
    tokenizer = trained(pre_tokenizers.Whitespace())
    flags: Any = {field: True}
    tokenizer.add_special_tokens([AddedToken("<mask>", **flags)])
    assert cuts_of(tokenizer, TEMPLATE) == []


def test_a_tokenizer_that_takes_special_tokens_for_text_is_not_cut() -> None:
    tokenizer = trained(pre_tokenizers.Whitespace())
    tokenizer.encode_special_tokens = True
    assert cuts_of(tokenizer, TEMPLATE) == []
