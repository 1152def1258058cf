"""These tests list the tokens of a real tokenizer that a simulated model may emit."""

from pathlib import Path

import numpy as np

from serve_app.simulated.vocabulary import source_for


def test_only_whole_plain_text_is_drawn(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_llama))
    source = source_for(tokenizer, len(tokenizer) + 64, eos_probability=0.0)  # models pad their vocabulary
    drawn = set(source.draw(np.arange(50_000, dtype=np.uint64)).tolist())
    expected = {i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids and "\ufffd" not in tokenizer.decode([i])}
    assert drawn == expected - set(tokenizer.added_tokens_decoder)
    assert max(drawn) < len(tokenizer)


def test_without_a_tokenizer_every_id_is_drawn() -> None:
    source = source_for(None, 50, eos_probability=0.0)
    assert set(source.draw(np.arange(5000, dtype=np.uint64)).tolist()) == set(range(50))
