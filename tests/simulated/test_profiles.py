"""Named and free-form profiles agree with sizes worked out from datasheets and config.json files."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.errors import ConfigError
from serve_app.simulated.profiles import MIB, MODELS, PROFILES, Profile, profile_from


def test_the_profiles_the_documentation_names_exist() -> None:
    assert set(PROFILES) == {
        "h100-llama-8b",
        "a10g-llama-8b",
        "a10g-llama-7b",
        "a100-40gb-opt-13b",
        "a100-40gb-llama-13b",
        "t4-gemma-2b",
    }


def llama_parameters(*, vocab: int, hidden: int, kv: int, ffn: int, layers: int) -> int:
    # q, o: hidden x hidden; k, v: hidden x kv; gate, up, down: hidden x ffn; two norms. Embedding, output, last norm.
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
    return layers * layer + 2 * vocab * hidden + hidden


def opt_parameters(*, vocab: int, hidden: int, ffn: int, layers: int, positions: int) -> int:
    # q, k, v, o and the two feed-forward matrices have biases; norms have weight and bias; the output layer is shared.
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return layers * layer + (vocab + positions) * hidden + 2 * hidden


def gemma_parameters(*, vocab: int, hidden: int, heads: int, head: int, ffn: int, layers: int) -> int:
    # One key and value head; the output layer is shared with the embedding.
    layer = 2 * hidden * heads * head + 2 * hidden * head + 3 * hidden * ffn + 2 * hidden
    return layers * layer + vocab * hidden + hidden


def test_parameter_counts_follow_from_the_published_shapes() -> None:
    assert {name: m.num_parameters for name, m in MODELS.items()} == {
        "llama-8b": llama_parameters(vocab=128_256, hidden=4096, kv=1024, ffn=14_336, layers=32),
        "llama-7b": llama_parameters(vocab=32_000, hidden=4096, kv=4096, ffn=11_008, layers=32),
        "llama-13b": llama_parameters(vocab=32_000, hidden=5120, kv=5120, ffn=13_824, layers=40),
        "opt-13b": opt_parameters(vocab=50_272, hidden=5120, ffn=20_480, layers=40, positions=2050),
        "gemma-2b": gemma_parameters(vocab=256_000, hidden=2048, heads=8, head=256, ffn=16_384, layers=18),
    }


def test_kv_bytes_per_token_are_those_of_the_shapes() -> None:
    assert {name: m.kv_bytes_per_token for name, m in MODELS.items()} == {
        "llama-8b": 131_072,  # 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB
        "llama-7b": 524_288,  # 2 x 32 x 32 x 128 x 2 = 512 KiB
        "llama-13b": 819_200,  # 2 x 40 x 40 x 128 x 2 = 800 KB, as in the PagedAttention paper for OPT-13B
        "opt-13b": 819_200,
        "gemma-2b": 18_432,  # 2 x 18 x 1 x 256 x 2
    }


def test_kv_capacity_is_memory_minus_weights_minus_reserve() -> None:
    assert {name: p.kv_cache_tokens for name, p in PROFILES.items()} == {
        # (memory MiB x 2^20 x 0.92 - 512 x 2^20 - parameters x 2) / KV bytes per token, rounded down
        "h100-llama-8b": 473_646,  # (78,679,145,185 - 536,870,912 - 16,060,522,496) / 131,072
        "a10g-llama-8b": 42_858,  # (22,214,879,477 - 536,870,912 - 16,060,522,496) / 131,072
        "a10g-llama-7b": 15_642,  # (22,214,879,477 - 536,870,912 - 13,476,831,232) / 524,288
        "a100-40gb-opt-13b": 16_198,  # (39,513,699,123 - 536,870,912 - 25,706,946,560) / 819,200
        "a100-40gb-llama-13b": 15_802,  # (39,513,699,123 - 536,870,912 - 26,031,728,640) / 819,200
        "t4-gemma-2b": 502_844,  # (14,817,637,171 - 536,870,912 - 5,012,344,832) / 18,432
    }


def test_opt_13b_on_a100_has_the_published_number_of_kv_slots() -> None:
    # PagedAttention paper (arXiv 2309.06180), table 1: 40 GB, 26 GB of parameters, 12 GB for KV, 15.7K slots.
    # vLLM then took 0.9 of the memory: 42,949,672,960 x 0.9 - 25,706,946,560 = 12,947,759,104 bytes / 819,200.
    given: dict[str, Any] = {"accelerator": "a100-40gb", "model": "opt-13b"}
    profile = profile_from({**given, "memory_utilization": 0.9, "workspace_bytes": 0})
    assert profile.kv_cache_tokens == 15_805


def test_a_free_form_profile_combines_names_and_fields() -> None:
    profile = profile_from(
        {
            "name": "many-small-ones",
            "accelerator": {"memory_bytes": 1000 * MIB, "bandwidth_bytes_per_s": 1e9, "flops_per_s": 1e12},
            "model": "gemma-2b",
            "num_accelerators": 12,
        }
    )
    assert (profile.name, profile.model, profile.num_accelerators) == ("many-small-ones", MODELS["gemma-2b"], 12)
    # 12 x (1000 MiB x 0.92 - 512 MiB) - 5,012,344,832 bytes of weights
    assert profile.kv_cache_bytes == 12 * 427_819_008 - 5_012_344_832
    assert profile_from({"accelerator": "t4", "model": "gemma-2b"}) == Profile(
        accelerator=PROFILES["t4-gemma-2b"].accelerator, model=MODELS["gemma-2b"]
    )


def test_the_documented_free_form_profile_works() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulated.md").read_text()
    (example,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "two-l4" in block)
    profile = profile_from(yaml.safe_load(example)["simulated"]["profile"])
    # (24,152,899,584 x 0.92 - 536,870,912) x 2 - 16,060,522,496 = 27,307,070,914 bytes / 131,072
    assert (profile.name, profile.kv_cache_tokens) == ("two-l4-llama-8b", 208_336)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("h200-llama-8b", "simulated.profile: unknown name 'h200-llama-8b'"),
        ({"accelerator": "b7", "model": "opt-13b"}, "simulated.profile.accelerator: unknown name 'b7'"),
        ({"accelerator": "t4", "model": 3}, "simulated.profile.model: is 3"),
        ({"accelerator": "t4", "model": {"layers": 2}}, "simulated.profile.model.layers: unknown field"),
        ({"accelerator": "t4", "model": {"num_layers": 2}}, "simulated.profile.model: missing 4 required keyword-only"),
        ({"model": "opt-13b"}, "simulated.profile: missing 1 required keyword-only argument: 'accelerator'"),
        ({"accelerator": "t4", "model": "gemma-2b", "num_accelerators": 1.5}, "num_accelerators: is 1.5; give a whole"),
        (
            {"accelerator": "t4", "model": "gemma-2b", "step_overhead_s": "1e-3"},
            "is '1e-3'; give a number; with an exp",
        ),
        ({"accelerator": "t4", "model": "gemma-2b", "num_accelerators": True}, "num_accelerators: is True"),
        (
            {"accelerator": "t4", "model": "gemma-2b", "memory_utilization": 1.1},
            "memory_utilization: is 1.1; give a sh",
        ),
        ({"accelerator": "t4", "model": "gemma-2b", "step_overhead_s": -1}, "step_overhead_s: is -1; must not"),
        ({"accelerator": "t4", "model": "gemma-2b", "name": 5}, "simulated.profile.name: is 5; give a str"),
        (
            {"accelerator": "t4", "model": "llama-13b"},
            "the weights of llama-13b leave no memory for the KV cache on t4",
        ),
    ],
)
def test_a_wrong_profile_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_from(value)
    assert message in str(caught.value)
