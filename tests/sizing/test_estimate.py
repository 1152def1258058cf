"""An estimate says what fits and what would, in terms of the GPUs, engine arguments and rate that were given."""

import math
from dataclasses import replace
from typing import Any

import pytest

from serve_app.autoscaling.capacity import Slo
from serve_app.errors import ConfigError
from serve_app.simulated.profiles import ACCELERATORS
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.estimate import Estimate, Wish, estimate, tokens_of
from serve_app.sizing.fits import accelerator_named, batch_defaults
from serve_app.sizing.nodes import INSTANCES, nodes_for, pod_sizes
from serve_app.sizing.rate import Load
from tests.sizing import shapes
from tests.sizing.shapes import Config

LOAD = Load(requests_per_s=5, prompt_tokens=500, answer_tokens=200, slo=Slo(ttft_s=2, itl_s=0.1), utilization=0.95, headroom=0.4)


def of(config: Config, gpu: str, *, gpus: int | None = None, context: int | None = 16384, **rest: Any) -> Estimate:
    more = {name: rest.pop(name) for name in ("load", "offload_gib", "pod") if name in rest}
    nodes = rest.pop("nodes", 1)
    wish = Wish(accelerator=accelerator_named(gpu), num_gpus=gpus, num_nodes=nodes, context=context, engine_args=rest, **more)
    return estimate(architecture_of(config, "config.json"), None, wish)


@pytest.mark.parametrize(
    ("config", "gpu", "gpus"),
    [
        (shapes.LLAMA_8B, "l4", 1),
        (shapes.LLAMA_70B, "h100", 2),  # 141 GB of weights: 2 x 80 GB leave 3 GiB each, 22,000 tokens
        (shapes.LLAMA_70B_FP8, "h100", 2),
        (shapes.QWEN_32B, "l4", 4),
        (shapes.QWEN_32B, "h100", 1),
        (shapes.MIXTRAL, "a100-80gb", 2),
        (shapes.QWEN3_235B_FP8, "h100", 4),
        (shapes.GPT_OSS_120B, "h100", 1),
        (shapes.DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}, "h200", 8),
    ],
)
def test_the_fewest_gpus_are_found(config: Config, gpu: str, gpus: int) -> None:
    found = of(config, gpu)
    assert (found.fit.fits, found.fit.num_gpus) == (True, gpus)


def test_what_does_not_fit_says_what_would() -> None:
    found = of(shapes.LLAMA_8B, "l4", gpus=1, context=131072)
    assert not found.fit.fits
    assert found.ways_out == (f"a context of {found.fit.longest_context:,} tokens", "2 x l4", "1 x a100-40gb")
    assert of(shapes.LLAMA_8B, "l4", gpus=1, context=found.fit.longest_context).fit.fits
    assert not of(shapes.LLAMA_8B, "l4", gpus=1, context=found.fit.longest_context + 16).fit.fits


def test_a_model_too_large_for_one_node_is_sized_over_two_with_the_pods_and_nodes_of_each() -> None:
    alone = of(shapes.DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}, "h100")  # 671 GB of weights, 8 x 80 GB
    assert (alone.fit.fits, alone.fit.num_gpus) == (False, 8)
    assert "16 x h100 on 2 nodes" in alone.ways_out
    wide = of(shapes.DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}, "h100", nodes=2)
    assert (wide.fit.fits, wide.fit.num_gpus, wide.fit.num_nodes) == (True, 16, 2)
    assert wide.pod == pod_sizes(8)
    assert [(nodes.instance.name, nodes.per_node, nodes.num) for nodes in wide.nodes] == [("p5.48xlarge", 1, 2)]
    assert any("no engine over 2 nodes was measured" in note for note in wide.notes)
    assert not any("nodes was measured" in note for note in alone.notes)


def test_the_fewest_gpus_over_two_nodes_are_two() -> None:
    found = of(shapes.LLAMA_8B, "l4", nodes=2)
    assert (found.fit.num_gpus, found.fit.num_nodes, found.pod) == (2, 2, pod_sizes(1))
    assert (found.nodes[0].instance.name, found.nodes[0].num) == ("g6.xlarge", 2)


def test_two_pods_of_a_replica_are_on_two_nodes_even_if_one_could_hold_both() -> None:
    (large, *_) = [nodes for nodes in nodes_for("l4", 1, pod_sizes(1), nodes_each=2) if nodes.instance.name == "g6.12xlarge"]
    assert (large.per_node, large.num) == (4, 2)
    assert {nodes.instance.name: nodes.num for nodes in nodes_for("h100", 8, pod_sizes(8), 3, nodes_each=2)} == {"p5.48xlarge": 6}


@pytest.mark.parametrize(
    ("gpus", "nodes", "said"),
    [
        (9, 2, "is 9 on 2 nodes; each node holds the same number: give a multiple of the nodes"),
        (24, 2, "and the model has 32 attention heads and 8 KV heads; vLLM splits them evenly: possible are 1, 2, 4, 8, 16"),
    ],
)
def test_gpus_that_cannot_share_the_model_over_nodes_are_refused(gpus: int, nodes: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of(shapes.LLAMA_8B, "h100", gpus=gpus, nodes=nodes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (1, "is 1 and pipeline_parallel_size is 2; each stage has the same number: give a multiple of the stages"),
        (3, "is 3 and pipeline_parallel_size is 2; each stage has the same number: give a multiple of the stages"),
        (12, "vLLM splits them evenly: possible are 2, 4, 8, 16"),
    ],
)
def test_gpus_that_stages_cannot_share_are_refused(gpus: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of(shapes.LLAMA_8B, "h100", gpus=gpus, pipeline_parallel_size=2)
    assert said in str(refused.value)


def test_without_a_wish_the_context_is_the_one_that_vllm_takes() -> None:
    assert of(shapes.PHI3_MINI_128K, "h100", context=None).fit.context == 4096
    assert of(shapes.PHI3_MINI_128K, "h100", context=131072).fit.context == 131072


@pytest.mark.parametrize("given", [-1, "auto"])
def test_a_context_that_vllm_sets_itself_is_what_the_memory_holds(given: object) -> None:
    found = of(shapes.LLAMA_8B, "l4", gpus=1, context=None, max_model_len=given)
    assert (found.fit.fits, found.fit.context, found.fit.longest_context, found.notes) == (True, 31360, 31360, ())
    assert of(shapes.LLAMA_8B, "h100", context=None, max_model_len=given).fit.context == 131072
    assert not of(shapes.LLAMA_70B, "l4", gpus=1, context=None, max_model_len=given).fit.fits
    with pytest.raises(ConfigError, match="prompt and answer are 40000 tokens, and the longest request has 31360"):
        of(shapes.LLAMA_8B, "l4", gpus=1, context=None, max_model_len=given, load=replace(LOAD, prompt_tokens=39800))


def test_a_fit_within_the_error_is_noted() -> None:
    notes = [of(shapes.LLAMA_8B, "l4", gpus=1, context=context).notes for context in (16384, 31360, 31376)]
    assert notes == [(), ("it fits by less than the error of the reserve: measure it before you rely on it",), ()]


def test_kv_in_the_pods_memory_makes_the_pod_larger_and_says_how_many_tokens_it_is() -> None:
    plain, kept = (of(shapes.LLAMA_8B, "l4", gpus=1, offload_gib=gib) for gib in (0.0, 15.5))
    assert (plain.offload_tokens, kept.offload_tokens) == (0, 31 * 2**29 // 131_072)
    sizes = [(found.pod.memory_request_gib, found.pod.memory_limit_gib, found.pod.shm_gib) for found in (plain, kept)]
    assert sizes == [(12, 24, 3), (28, 40, 19)]
    assert plain.nodes[0].instance.name == "g6.xlarge", "16 GiB"
    assert kept.nodes[0].instance.name == "g6.2xlarge", "32 GiB"
    assert of(shapes.LLAMA_8B, "l4", gpus=1, pod=kept.pod).nodes == kept.nodes
    assert of(shapes.LLAMA_70B, "h100", gpus=2, offload_gib=10.0).offload_tokens == 10 * 2**30 // 327_680


def test_fewer_bits_are_a_way_out() -> None:
    found = of(shapes.QWEN_32B, "l40s", gpus=1)
    assert found.ways_out == ("2 x l40s", "FP8 weights", "1 x h100")


@pytest.mark.parametrize(
    ("args", "grows"),
    [
        ({"gpu_memory_utilization": 0.8}, False),
        ({"gpu_memory_utilization": 0.95}, True),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"quantization": "fp8"}, True),
        ({"enforce_eager": True}, True),
        ({"max_num_batched_tokens": 16384}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_engine_arguments_count(args: dict[str, Any], grows: bool) -> None:
    plain, changed = of(shapes.LLAMA_8B, "l4", gpus=1), of(shapes.LLAMA_8B, "l4", gpus=1, **args)
    assert (changed.fit.longest_context > plain.fit.longest_context) is grows
    assert changed.fit.longest_context != plain.fit.longest_context


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"context": 131073}, "--context: is 131073, and the model's config.json allows 131072"),
        ({"context": None, "max_model_len": 200000}, "engine_args.max_model_len: is 200000, and"),
        ({"context": None, "max_model_len": "long"}, "engine_args.max_model_len: is 'long'; give tokens such as 16384"),
        ({"gpus": 3}, "--gpus, or gpus_per_replica: is 3, and the model has 32 attention heads and 8 KV heads; "),
        ({"gpu_memory_utilization": "half"}, "engine_args.gpu_memory_utilization: is 'half'"),
        ({"max_num_seqs": -1}, "engine_args.max_num_seqs: is '-1'; give a whole number above 0"),
        ({"dtype": "int7"}, "engine_args.dtype: is 'int7'; known are auto, float16"),
        ({"context": 600, "load": LOAD}, "--prompt: prompt and answer are 700 tokens, and the longest request has 600"),
    ],
)
def test_a_wrong_wish_is_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(shapes.LLAMA_8B, "l4", **args)
    assert str(caught.value).startswith(said)


def test_an_encoder_computes_a_text_in_one_step_and_a_step_that_is_too_short_is_refused() -> None:
    assert of(shapes.BGE_M3, "l4", context=None).fit.plan.step_tokens == 8192
    with pytest.raises(ConfigError) as refused:
        of(shapes.BGE_M3, "l4", context=None, max_num_batched_tokens=2048)
    assert str(refused.value) == (
        "engine_args.max_num_batched_tokens: is 2048, and a text of 8192 tokens is computed in one step; "
        "give at least 8192, or a shorter context"
    )
    found = of(shapes.BGE_M3, "l4", context=None, max_num_batched_tokens=2048, max_model_len=2048)
    assert (found.fit.fits, found.fit.context, found.fit.plan.step_tokens) == (True, 2048, 2048)
    assert of(shapes.LLAMA_8B, "l4", max_num_batched_tokens=2048).fit.plan.step_tokens == 2048  # computes a prompt in parts


def test_arguments_that_are_not_counted_are_named() -> None:
    found = of(shapes.LLAMA_8B, "h100", speculative_config={"method": "ngram"}, quantization="gptq")
    assert found.notes[-2:] == (
        "left out: speculative_config",
        "quantization gptq counts only if the checkpoint is quantized already",
    )


def test_overrides_of_the_file_may_allow_a_longer_context() -> None:
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    found = of(shapes.LLAMA_8B, "h100", context=None, max_model_len=200_000, hf_overrides=rope)
    assert (found.fit.fits, found.fit.context, found.fit.longest_context) == (True, 200_000, 200_000)
    assert found.notes == (
        "the file allows 131,072 tokens: whether hf_overrides allow more is not checked",
        "left out: hf_overrides",
    )


def test_a_method_of_quantized_checkpoints_is_noted_only_for_others() -> None:
    stored = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert of(shapes.LLAMA_8B | stored, "h100", quantization="gptq_marlin").notes == ()


@pytest.mark.parametrize(("args", "is_noted"), [({}, False), ({"dtype": "half"}, False), ({"dtype": "bfloat16"}, True)])
def test_a_t4_is_noted_where_bfloat16_is_asked_for(args: dict[str, Any], is_noted: bool) -> None:
    notes = of(shapes.LLAMA_1B, "t4", **args).notes  # by itself vLLM takes float16 there
    assert notes == (("a T4 does not run bfloat16: leave dtype out",) if is_noted else ())


def test_a_t4_computes_gemma_in_32_bits() -> None:
    t4, l4 = (of(shapes.GEMMA2_9B, gpu, context=4096).weight_bytes for gpu in ("t4", "l4"))
    assert t4 == 2 * l4


def test_replicas_are_those_of_the_autoscaler_and_grow_with_the_rate() -> None:
    rates = (1, 5, 50)
    found = [of(shapes.LLAMA_8B, "l4", load=replace(LOAD, requests_per_s=rate)).replicas for rate in rates]
    one = found[0]
    assert one is not None
    # With a headroom of 40 %, which decides here.
    assert [each.num for each in found if each is not None] == [math.ceil(1.4 * rate / one.most_per_replica) for rate in rates]
    # A step reads 15 GB of weights at 0.8 x 300 GB/s: 62.7 ms and 1 ms of overhead, and more for its requests.
    assert 0.063 < one.token_s < 0.08
    # 500 tokens x 2 x 7.5e9 parameters at 0.5 x 121e12 FLOP/s: 124 ms.
    assert one.prompt_s == pytest.approx(0.126, rel=0.03)


def test_a_mixture_of_experts_computes_what_a_token_passes() -> None:
    dense = of(shapes.MIXTRAL | {"num_experts_per_tok": 8}, "h100", gpus=2, load=LOAD).replicas
    sparse = of(shapes.MIXTRAL, "h100", gpus=2, load=LOAD).replicas
    assert dense is not None
    assert sparse is not None
    assert sparse.prompt_s < dense.prompt_s / 2
    assert sparse.most_per_replica > dense.most_per_replica


def test_a_limit_that_no_number_of_replicas_keeps_is_noted() -> None:
    found = of(shapes.LLAMA_8B, "l4", load=replace(LOAD, slo=Slo(ttft_s=2, itl_s=0.01)))
    assert found.notes == ("even one request alone breaks the limit of itl: more replicas do not help",)


@pytest.mark.parametrize(
    ("text", "tokens"), [("16384", 16384), ("16k", 16000), ("16K", 16384), ("1.5k", 1500), ("1m", 10**6), ("1", 1)]
)
def test_tokens_are_read_as_vllm_reads_them(text: str, tokens: int) -> None:
    assert tokens_of(text, "--context") == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "16kk", "1e9", "9999999999", "nan", "16 k", "１６"])
def test_other_numbers_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--context: is "):
        tokens_of(text, "--context")


@pytest.mark.parametrize(
    ("name", "known"),
    [("l4", "l4"), ("L40S", "l40s"), ("A100-80G", "a100-80gb"), ("a100_40", "a100-40gb"), ("nvidia-h100", "h100")],
)
def test_accelerators_are_known_by_their_usual_names(name: str, known: str) -> None:
    assert accelerator_named(name).name == known


@pytest.mark.parametrize("name", ["a100", "a10", "", "rtx"])
def test_an_unknown_or_unclear_accelerator_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="known are a100-40gb, a100-80gb, a10g, b200, h100, h200, l4, l40s, t4"):
        accelerator_named(name)


def test_every_accelerator_has_a_node_with_8_of_it_or_4() -> None:
    most = {name: max(i.num_gpus for i in INSTANCES if i.accelerator == name) for name in ACCELERATORS}
    assert most == dict.fromkeys(ACCELERATORS, 8) | {"t4": 4}
    assert {batch_defaults(each) for each in ACCELERATORS.values()} == {(2048, 256), (8192, 1024), (16384, 1024)}


def test_nodes_are_ordered_by_the_price_of_all_replicas() -> None:
    found = nodes_for("h100", 1, pod_sizes(1), replicas=9)
    # 9 x $6.88 = $61.92, and 2 nodes with 8 replicas each at $55.04.
    assert [(n.instance.name, n.num) for n in found] == [("p5.4xlarge", 9), ("p5.48xlarge", 2)]
    assert [n.usd_per_hour for n in found] == pytest.approx([61.92, 110.08])
    assert nodes_for("h200", 8, pod_sizes(8))[-1].usd_per_month is None
    assert nodes_for("l4", 2, pod_sizes(2))[0].instance.name == "g6.12xlarge"


def test_a_node_holds_a_replica_only_with_cpus_and_memory_for_its_pod() -> None:
    (small,) = (instance for instance in INSTANCES if instance.name == "g4dn.xlarge")
    assert small.replicas(1, pod_sizes(1)) == 1  # 3 of 3.92 CPUs, 12 of 14.1 GiB
    assert replace(small, pods_memory_mib=12 * 1024 - 1).replicas(1, pod_sizes(1)) == 0


def test_a_checkpoint_is_read_ahead_if_90_percent_of_the_free_memory_hold_it() -> None:
    pod = pod_sizes(1)
    assert (pod.memory_request_gib, pod.memory_limit_gib) == (12, 24)
    held = int(0.9 * 12 * 2**30)
    assert (pod.prefetches(held), pod.prefetches(held + 1)) == (True, False)
    # 10 / 0.9 and 11 / 0.9, rounded up, beside 12 GiB.
    assert [pod.limit_of_chart_gib(gib) for gib in (0, 10, 11, 18)] == [24, 24, 25, 32]
