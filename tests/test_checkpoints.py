"""Tiny checkpoints are reproducible and loadable; names resolve; the command line prints paths."""

import functools
import hashlib
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from typer.testing import CliRunner

from serve_app.checkpoints import KINDS, CheckpointError, fetch_embedded, make_tiny_llama, resolve_model
from serve_app.checkpoints.tiny_tokenizer import CHAT_TEMPLATE
from serve_app.cli.model import app

SMOLLM2 = "smollm2-135m-instruct"


def hashes(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- tiny checkpoints ---


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_make_the_same_bytes(kind: str, tmp_path: Path) -> None:
    here = KINDS[kind](tmp_path / "here")
    program = "import sys, pathlib, serve_app.checkpoints as c; c.KINDS[sys.argv[1]](pathlib.Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", program, kind, str(tmp_path / "there")], check=True, timeout=60)
    assert hashes(here) == hashes(tmp_path / "there")


def test_another_seed_changes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    first, second = hashes(make_tiny_llama(tmp_path / "0")), hashes(make_tiny_llama(tmp_path / "1", seed=1))
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_finds_every_weight_it_expects_and_no_other(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModel if kind == "embedding" else AutoModelForCausalLM
    model, loading = auto.from_pretrained(KINDS[kind](tmp_path / kind), output_loading_info=True)
    assert {name: list(keys) for name, keys in loading.items() if keys} == {}
    assert model.config.vocab_size == 1024


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as scratch:
        return Tokenizer.from_file(str(make_tiny_llama(Path(scratch) / "tiny") / "tokenizer.json"))


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_and_the_end_of_text_are_tokens() -> None:
    vocabulary = tiny_tokenizer().get_vocab()
    assert len(vocabulary) == 1024
    assert sum(symbol in vocabulary for symbol in pre_tokenizers.ByteLevel.alphabet()) == 256
    assert [vocabulary[token] for token in ("<s>", "</s>", "<pad>")] == [0, 1, 2]


def test_the_chat_template_renders_system_tools_calls_and_results(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path / "tiny"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1+?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe short.\nYou may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "add"}}\n</tools>\nTo call one, answer\n'
        '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1+?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_chat_without_system_and_tools_has_only_its_turns(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path / "tiny"))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert (tokenizer.chat_template, rendered) == (CHAT_TEMPLATE, "<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_a_vocabulary_that_the_training_text_cannot_give_is_refused(vocab_size: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"vocab_size {vocab_size}: the nearest .* is"):
        make_tiny_llama(tmp_path / "tiny", vocab_size=vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="mine exists and holds something else: remove it"):
        make_tiny_llama(tmp_path / "mine")
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == {"config.json": "{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*Not a directory"):
        make_tiny_llama(tmp_path / "file" / "tiny")


def test_threads_that_make_the_same_checkpoint_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(make_tiny_llama, [tmp_path / "tiny"] * 4))
    assert paths == [tmp_path / "tiny"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


# --- names and command line ---


@pytest.mark.parametrize("model", ["facebook/opt-125m", "/models/mine", "./embedded"])
def test_paths_and_hub_ids_stay_as_they_are(model: str, tmp_path: Path) -> None:
    assert resolve_model(model, tmp_path) == model


def test_an_embedded_model_that_is_not_fetched_names_the_command(tmp_path: Path) -> None:
    way_out = f"is not there; run `serve-app model fetch {SMOLLM2} --cache-dir {tmp_path}`"
    with pytest.raises(CheckpointError) as caught:
        resolve_model(f"embedded:{SMOLLM2}", tmp_path)
    assert str(caught.value) == f"embedded:{SMOLLM2}: {tmp_path / SMOLLM2} {way_out}"


def test_an_unknown_embedded_model_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no embedded model 'gpt-5'; known: {SMOLLM2}"):
        fetch_embedded("gpt-5", tmp_path)


def test_the_commands_print_paths_and_errors_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path / "cache"))
    run = CliRunner().invoke
    made = run(app, ["tiny", str(tmp_path / "opt"), "--kind", "opt"])
    assert (made.exit_code, made.stdout) == (0, f"{tmp_path / 'opt'}\n")
    assert json.loads((tmp_path / "opt" / "config.json").read_text())["model_type"] == "opt"
    unknown = run(app, ["fetch", "gpt-5"])
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert unknown.stderr == f"error: no embedded model 'gpt-5'; known: {SMOLLM2}\n"
    listed = run(app, ["list"])
    assert (listed.exit_code, f"embedded:{SMOLLM2}" in listed.stdout, "is not there" in listed.stdout) == (
        0,
        True,
        True,
    )
