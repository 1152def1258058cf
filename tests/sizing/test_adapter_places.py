"""Places for LoRA adapters take the bytes worked out by hand, and leave so much less for KV in estimates, reports and the check."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.fit import memory_notes
from serve_app.cli.main import app
from serve_app.config import parse_settings
from serve_app.sizing.adapters import Places, limit_of
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.estimate import Estimate, Wish, estimate
from serve_app.sizing.fits import accelerator_named
from tests.sizing import shapes
from tests.sizing.shapes import Config

# Inputs and outputs of a layer's matrices. Llama 3.1 8B: q, k, v, o, then gate, up, down. Mixtral: a router of 8, then 8 experts.
LLAMA = 32 * ((4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 14336)) + 2 * (128256 + 4096)
MIXTRAL = 32 * (2 * 8192 + 2 * 5120 + (4096 + 8) + 8 * 3 * (4096 + 14336)) + 2 * (32000 + 4096)
# Of two GPUs each has half of the outputs of q, k, v, gate and up, and half of the inputs of o and down.
LLAMA_HALF = 32 * (2 * (4096 + 2048) + 2 * (4096 + 512) + 3 * (4096 + 7168)) + 2 * (128256 + 4096)
MIXTRAL_HALF = 32 * (2 * 6144 + 2 * 4608 + 4104 + 8 * 3 * (4096 + 7168)) + 2 * 36096
MIXTRAL_APART = 32 * (2 * 6144 + 2 * 4608 + 4104 + 4 * 3 * (4096 + 14336)) + 2 * 36096
DEEPSEEK = (
    61 * ((7168 + 1536) + (7168 + 576) + (1536 + 128 * 192) + (512 + 128 * 256) + (128 * 128 + 7168))
    + 3 * 3 * (7168 + 18432)
    + 58 * (257 * 3 * (7168 + 2048) + 7168 + 256)
    + 2 * (129280 + 7168)
)


@pytest.mark.parametrize(
    ("config", "num_gpus", "apart", "numbers"),
    [
        (shapes.LLAMA_8B, 1, False, LLAMA),
        (shapes.LLAMA_8B, 2, False, LLAMA_HALF),
        (shapes.MIXTRAL, 1, True, MIXTRAL),
        (shapes.MIXTRAL, 2, False, MIXTRAL_HALF),
        (shapes.MIXTRAL, 2, True, MIXTRAL_APART),
        (shapes.DEEPSEEK_V3, 1, False, DEEPSEEK),
    ],
)
def test_bytes_of_the_places(config: Config, num_gpus: int, apart: bool, numbers: int) -> None:
    places = Places(num=4, rank=16, experts_apart=apart)
    assert places.bytes_on_each_gpu(architecture_of(config, "config.json"), 2, num_gpus) == 4 * 16 * 2 * numbers


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (2, 8), (16, 16), (100, 128), (512, 512), (1000, 512)])
def test_the_rank_of_the_places_is_the_next_limit(rank: int, limit: int) -> None:
    assert limit_of(rank) == limit


def of(config: Config, **args: Any) -> Estimate:
    wish = Wish(accelerator=accelerator_named("l40s"), num_gpus=1, context=16384, engine_args=args)
    return estimate(architecture_of(config, "config.json"), None, wish)


@pytest.mark.parametrize(
    ("args", "num"),
    [({}, 1), ({"max_loras": 4}, 4), ({"max_loras": 2, "max_lora_rank": 64}, 8), ({"kv_cache_memory_bytes": 2**30}, 0)],
)
def test_the_places_leave_less_for_kv(args: dict[str, Any], num: int) -> None:
    plain = of(shapes.LLAMA_8B, **{key: value for key, value in args.items() if "lora" not in key})
    found = of(shapes.LLAMA_8B, enable_lora=True, **args)
    assert plain.fit.kv_bytes - found.fit.kv_bytes == num * 16 * 2 * LLAMA
    assert (plain.fit.adapter_bytes, found.adapter_error) == (0, "exact")


def test_places_that_leave_no_room_for_a_fixed_cache_do_not_fit() -> None:
    room = of(shapes.LLAMA_8B).fit.accelerator.memory_bytes - 20 * 2**30
    assert of(shapes.LLAMA_8B, kv_cache_memory_bytes=room).fit.fits
    assert not of(shapes.LLAMA_8B, kv_cache_memory_bytes=room, enable_lora=True, max_loras=8, max_lora_rank=256).fit.fits


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Any]:
    """A configuration of Llama 3.1 8B on one L40S with five adapters, whose greatest rank is 24."""
    (tmp_path / "config.json").write_text(json.dumps(shapes.LLAMA_8B))
    for number, rank in enumerate((8, 24, 8, 8, 8)):
        folder = tmp_path / f"adapter-{number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    chat = {
        "model": str(tmp_path),
        "device": "cuda",
        "gpus_per_replica": 1,
        "resources": {"accelerator_type:L40S": 0.001},
        "engine_args": {"max_model_len": 16384},
        "adapters": {f"chat-{number}": {"path": str(tmp_path / f"adapter-{number}")} for number in range(5)},
    }
    return {"models": {"chat": chat}}


def fit(folder: Path, config: dict[str, Any]) -> str:
    """Return the output of `serve-app fit` for a configuration, in one line."""
    (folder / "fleet.yaml").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["fit", str(folder / "fleet.yaml"), "--gpu", "l40s"], terminal_width=80)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_report_has_the_adapters_with_the_rank_of_their_files(tmp_path: Path, adapters: dict[str, Any]) -> None:
    output = fit(tmp_path, adapters)
    assert f"adapters {4 * 32 * 2 * LLAMA / 2**30:.2f} GiB 4 LoRA adapters of rank 32; exact" in output
    assert "assumed" not in output


def test_the_report_says_which_rank_it_assumes_for_adapters_that_are_elsewhere(tmp_path: Path, adapters: dict[str, Any]) -> None:
    (tmp_path / "adapter-3/adapter_config.json").unlink()
    output = fit(tmp_path, adapters)
    assert "4 LoRA adapters of rank 16; exact" in output
    assert "note: not all adapters are here: a rank of 16 is assumed; engine_args.max_lora_rank sets another" in output


def test_experts_were_not_compared() -> None:
    assert of(shapes.MIXTRAL, enable_lora=True).adapter_error == "not compared with vLLM's"


def test_the_check_counts_the_adapters(adapters: dict[str, Any]) -> None:
    chat = adapters["models"]["chat"]
    chat["engine_args"]["max_model_len"] = 65536
    assert list(memory_notes(parse_settings(adapters).models)) == []
    chat["engine_args"] |= {"max_loras": 8, "max_lora_rank": 512}
    (note,) = memory_notes(parse_settings(adapters).models)
    assert note.startswith("models.chat does not fit on 1 x l40s with 65,536 tokens; ")
