from types import SimpleNamespace
from typing import Any

from serve_app.fingerprint import model_fingerprint


def fingerprint(max_model_len: int = 2048, **config: Any) -> str:
    values = {"model_type": "llama", "vocab_size": 512, "_name_or_path": "/a", **config}
    hf_config = SimpleNamespace(to_dict=lambda: dict(values))
    return model_fingerprint(SimpleNamespace(hf_config=hf_config, skip_tokenizer_init=True, max_model_len=max_model_len))


def test_the_maximum_length_and_the_path_are_not_part_of_it_but_the_configuration_is() -> None:
    assert fingerprint() == fingerprint(max_model_len=1024) == fingerprint(_name_or_path="/b", torch_dtype="bfloat16")
    assert fingerprint() != fingerprint(vocab_size=513)
