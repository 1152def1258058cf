"""A model in pipeline stages is sized by the stage whose KV cache holds the fewest requests."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.autoscaling.capacity import Slo
from serve_app.cli.fit import memory_notes
from serve_app.cli.main import app
from serve_app.config import parse_settings
from serve_app.errors import ConfigError
from serve_app.sizing.adapters import Places
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.estimate import Estimate, Wish, estimate
from serve_app.sizing.fits import accelerator_named, shared_by
from serve_app.sizing.kv_memory import kv_bytes_of_request
from serve_app.sizing.rate import Load
from serve_app.sizing.stages import stages_of
from serve_app.sizing.weights import bytes_of_stage, parameters_of
from tests.sizing import shapes
from tests.sizing.shapes import Config

GIB = 2**30
# Parameters of Llama 3.1 8B: q and o, k and v, gate, up and down, two norms; the embeddings, and as many of the output layer.
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
EMBEDDINGS = 128256 * 4096


def of(config: Config, gpu: str, gpus: int | None, stages: int, context: int = 16384, **rest: Any) -> Estimate:
    more = {name: rest.pop(name) for name in ("load", "num_nodes", "offload_gib") if name in rest}
    args = {"pipeline_parallel_size": stages, **rest}
    wish = Wish(accelerator=accelerator_named(gpu), num_gpus=gpus, context=context, engine_args=args, **more)
    return estimate(architecture_of(config, "config.json"), None, wish)


def test_a_gpu_of_a_stage_holds_its_layers_and_the_last_the_output_layer_and_logits() -> None:
    whole, two = of(shapes.LLAMA_8B, "l4", 1, 1).fit, of(shapes.LLAMA_8B, "l4", 2, 2).fit
    assert (two.stage, two.weight_bytes) == (2, 2 * (16 * LAYER + EMBEDDINGS + 4096))  # stage 1 has no logits, and so more KV
    assert (whole.request_bytes, two.request_bytes) == (16384 * 131_072, 16384 * 65_536)
    assert two.reserve_bytes - whole.reserve_bytes == 512 * 2**20, "of NCCL"


def test_layers_that_are_left_over_are_on_the_stages_before_the_last_and_these_decide() -> None:
    found = of(shapes.LLAMA_8B | {"num_hidden_layers": 34}, "l4", 4, 4)
    assert [stage.num_layers for stage in stages_of(found.shape, 4)] == [8, 9, 9, 8]
    # A ninth layer costs an eighth more for each request, which is more than stage 4 loses to 1.2 GiB of output layer and logits.
    assert (found.fit.stage, found.fit.request_bytes) == (2, 16384 * 9 * 4096)


def test_the_gpus_of_a_stage_share_its_layers() -> None:
    two = of(shapes.LLAMA_70B, "h100", 4, 2).fit
    # 40 layers with half of their 8 KV heads, and 32,768 bytes of norms and the like beside them are far below a thousandth.
    assert two.request_bytes == 16384 * 40 * 2 * 4 * 128 * 2
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert two.weight_bytes == pytest.approx((40 * layer + 128256 * 8192) * 2 / 2, rel=1e-3)


def test_quantized_layers_are_counted_beside_embeddings_of_16_bits() -> None:
    plain, fp8 = (of(config, "h100", 4, 2).fit.weight_bytes for config in (shapes.LLAMA_70B, shapes.LLAMA_70B_FP8))
    output = 128256 * 8192 * 2 / 2
    assert fp8 - output == pytest.approx((plain - output) / 2, rel=1e-3)


def test_windows_and_experts_are_on_the_stages_of_their_layers() -> None:
    first, second = stages_of(architecture_of(shapes.DEEPSEEK_V3, "config.json"), 2)
    assert [(each.num_layers, each.num_expert_layers) for each in (first, second)] == [(31, 28), (30, 30)]
    in_three = stages_of(architecture_of(shapes.GEMMA3_27B | {"num_hidden_layers": 24}, "config.json"), 3)
    assert [(each.num_full_layers, each.num_sliding_layers) for each in in_three] == [(1, 7), (1, 7), (2, 6)]


def test_with_stages_more_steps_are_in_flight_while_a_window_is_filled() -> None:
    shape = architecture_of(shapes.GPT_OSS_120B, "config.json")
    one, three = (kv_bytes_of_request(shape, 131_072, element=2, num_gpus=1, step_tokens=2048, stages=n) for n in (1, 3))
    assert three - one == 18 * 2 * 2048 * 2 * 8 * 64 * 2


def test_the_places_of_adapters_are_with_their_layers_embeddings_and_output_layer() -> None:
    whole = architecture_of(shapes.LLAMA_8B, "config.json")
    stages = stages_of(whole, 3)
    places = Places(num=2, rank=16)
    assert sum(places.bytes_on_each_gpu(stage, 2, 1) for stage in stages) == places.bytes_on_each_gpu(whole, 2, 1)
    assert places.bytes_on_each_gpu(stages[0], 2, 1) > 2 * 16 * 2 * (128256 + 4096)


def test_kept_kv_is_that_of_all_stages() -> None:
    tokens = {stages: of(shapes.LLAMA_8B, "l40s", 4, stages, offload_gib=16.0).offload_tokens for stages in (1, 2, 4)}
    assert tokens == dict.fromkeys((1, 2, 4), 16 * GIB // 131_072)


def test_what_would_fit_keeps_the_stages() -> None:
    found = of(shapes.LLAMA_70B, "l40s", 2, 2)
    assert not found.fit.fits
    assert "4 x l40s" in found.ways_out
    assert of(shapes.LLAMA_70B, "l40s", 4, 2).fit.fits


def test_what_would_fit_in_three_stages_are_multiples_of_three() -> None:
    found = of(shapes.LLAMA_70B, "l40s", 3, 3)
    assert not found.fit.fits
    assert found.ways_out == ("6 x l40s", "FP8 weights", "3 x h100")
    assert of(shapes.LLAMA_70B, "l40s", 6, 3).fit.fits
    assert "12 x l4 on 2 nodes" in of(shapes.LLAMA_70B, "l4", 3, 3).ways_out


@pytest.mark.parametrize(
    ("nodes", "stages", "numbers"),
    [
        (1, 1, [1, 2, 4, 8]),
        (2, 1, [2, 4, 8, 16]),
        (1, 3, [3, 6]),
        (2, 3, [6, 12]),
        (2, 4, [4, 8, 16]),
        (1, 16, [16]),
        (5, 3, []),  # 15: 5 GPUs of a stage do not divide the heads
    ],
)
def test_gpus_are_divided_by_nodes_and_stages_with_at_most_8_on_a_node(nodes: int, stages: int, numbers: list[int]) -> None:
    assert shared_by(architecture_of(shapes.LLAMA_8B, "config.json"), nodes, stages) == numbers


def test_without_gpus_the_fewest_of_all_stages_are_found() -> None:
    assert [of(shapes.LLAMA_70B, "l40s", None, n).fit.num_gpus for n in (2, 3)] == [4, 6]
    alone = of(shapes.LLAMA_405B, "l4", None, 3).fit
    assert (alone.fits, alone.num_gpus) == (False, 6)
    with pytest.raises(ConfigError, match="is 15, and the model has 32 attention heads"):
        of(shapes.LLAMA_8B, "l4", None, 3, num_nodes=5)


def test_no_stage_takes_less_than_nothing_where_the_embeddings_are_packed_too() -> None:
    """A model of four layers has more parameters in its embeddings, here 4 bits each, than in its layers."""
    shape = architecture_of(shapes.LLAMA_8B | {"num_hidden_layers": 4}, "config.json")
    whole, middle = parameters_of(shape), parameters_of(stages_of(shape, 4)[1])
    assert bytes_of_stage(middle, whole, whole.total // 2, 2) == 2 * middle.rest


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.pipeline_parallel_size: is 64, and the model has 32 layers; give each"):
        of(shapes.LLAMA_8B, "h100", 64, 64)


def test_times_are_noted_as_those_of_one_stage() -> None:
    load = Load(
        requests_per_s=5, prompt_tokens=500, answer_tokens=200, slo=Slo(ttft_s=2, itl_s=0.1), utilization=0.95, headroom=0.4
    )
    told = [
        any("a token takes up to 2 times longer" in note for note in of(shapes.LLAMA_8B, "l40s", 2, n, load=load).notes)
        for n in (1, 2)
    ]
    assert told == [False, True]


def test_fit_and_check_name_the_stage_and_what_does_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shapes.LLAMA_70B))
    model = {"model": str(folder), "device": "cuda", "nodes": 2, "resources": {"accelerator_type:L40S": 0.001}}
    args = {"engine_args": {"pipeline_parallel_size": 2, "max_model_len": 16384}}
    models = {"small": model | args | {"gpus_per_replica": 2}, "wide": model | args | {"gpus_per_replica": 4}}
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"models": models}))
    (note,) = memory_notes(parse_settings({"models": models}).models)
    assert note.startswith("models.small does not fit on 2 x l40s with 16,384 tokens; 4 x l40s or ")
    done = CliRunner().invoke(app, ["fit", str(file), "--gpu", "l40s"], terminal_width=80)
    said = " ".join(done.output.split())
    assert "1 on each of 2 nodes; 2 stages, and below is stage 1, which holds the fewest requests" in said
    told = json.loads(CliRunner().invoke(app, ["fit", str(file), "--gpu", "l40s", "--json"]).output)["models"]["wide"]
    assert (told["fits"], told["stages"]) == (True, {"num": 2, "deciding_stage": 2})
