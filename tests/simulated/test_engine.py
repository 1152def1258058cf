"""The executor runs in a real vLLM engine, with its scheduler, KV cache, preemption, stopping and grammars."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.simulated.vocabulary import source_for

pytestmark = pytest.mark.engine

EOS = 1
# 24 blocks of 16 tokens, one of them the null block: four requests of 64 + 96 tokens need 40 blocks.
TIGHT: dict[str, Any] = {
    "accelerator": {
        "memory_bytes": 24 * 16 * 64 + 2000,  # KV bytes per token: 2 x 2 layers x 1 head x 8 x 2 bytes; weights 2,000 bytes
        "bandwidth_bytes_per_s": 1e9,
        "flops_per_s": 1e12,
    },
    "model": {"num_parameters": 1000, "num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1, "head_size": 8},
    "workspace_bytes": 0,
    "memory_utilization": 1.0,
}


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def tight_engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine({"profile": TIGHT}, max_model_len=320, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def wide_engine(make_engine: Callable[..., Any]) -> Any:
    """Return an engine that gives log probabilities of the whole vocabulary."""
    return make_engine(max_logprobs=-1)


def sampling(**kwargs: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "detokenize": False, **kwargs})


def generate(engine: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def preemptions(engine: Any) -> int:
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


def prompts(count: int, size: int) -> list[list[int]]:
    return [[20 + (7 * i + j) % 900 for j in range(size)] for i in range(count)]


def test_the_kv_cache_has_the_profile_s_tokens(engine: Any, tight_engine: Any) -> None:
    sizes = [e.llm_engine.vllm_config.cache_config for e in (engine, tight_engine)]
    # 473,646 tokens (test_profiles) // 16
    assert [(c.num_gpu_blocks, c.block_size) for c in sizes] == [(29_602, 16), (24, 16)]


def test_an_answer_has_exactly_max_tokens_and_no_special_token(engine: Any) -> None:
    found = generate(engine, prompts(3, 40), [sampling(max_tokens=n) for n in (1, 17, 300)])
    assert [(len(o.token_ids), o.finish_reason) for o in found] == [(1, "length"), (17, "length"), (300, "length")]
    assert not {0, EOS}.intersection(*(o.token_ids for o in found))


def test_an_answer_resumed_at_any_point_is_the_same(engine: Any, tight_engine: Any) -> None:
    (prompt,) = prompts(1, 50)
    (whole,) = generate(engine, [prompt], sampling(max_tokens=24))
    emitted = list(whole.token_ids)
    for elsewhere in (engine, tight_engine):  # another capacity, chunk size and batch; with and without cached prefix
        cuts = list(range(24))
        resumed = generate(elsewhere, [prompt + emitted[:cut] for cut in cuts], [sampling(max_tokens=24 - cut) for cut in cuts])
        assert [emitted[:cut] + list(o.token_ids) for cut, o in zip(cuts, resumed, strict=True)] == [emitted] * 24


def test_preemption_changes_no_token(engine: Any, tight_engine: Any) -> None:
    batch = prompts(4, 64)
    expected = [list(o.token_ids) for o in generate(engine, batch, sampling(max_tokens=96))]
    before = preemptions(tight_engine)
    assert [list(o.token_ids) for o in generate(tight_engine, batch, sampling(max_tokens=96))] == expected
    assert preemptions(tight_engine) > before


def test_stop_token_ids_end_an_answer(engine: Any) -> None:
    (prompt,) = prompts(1, 30)
    (whole,) = generate(engine, [prompt], sampling(max_tokens=20))
    stop = whole.token_ids[9]
    position = whole.token_ids.index(stop)
    (stopped,) = generate(engine, [prompt], sampling(max_tokens=20, stop_token_ids=[stop]))
    assert (list(stopped.token_ids), stopped.stop_reason) == (list(whole.token_ids[: position + 1]), stop)


def test_stop_strings_end_an_answer(engine: Any) -> None:
    (prompt,) = prompts(1, 30)
    (whole,) = generate(engine, [prompt], sampling(max_tokens=20, detokenize=True))
    middle = whole.text[len(whole.text) // 2 :][:4]
    (stopped,) = generate(engine, [prompt], sampling(max_tokens=20, detokenize=True, stop=[middle]))
    assert (stopped.text, stopped.stop_reason) == (whole.text[: whole.text.index(middle)], middle)
    assert "\ufffd" not in whole.text


def test_eos_ends_answers_unless_ignored(make_engine: Callable[..., Any]) -> None:
    engine = make_engine({"profile": "h100-llama-8b", "eos_probability": 1.0})
    ended, late, ignored = generate(
        engine, prompts(3, 20), [sampling(), sampling(min_tokens=5), sampling(max_tokens=12, ignore_eos=True)]
    )
    assert (list(ended.token_ids), ended.finish_reason) == ([EOS], "stop")
    assert (len(late.token_ids), late.token_ids[-1], late.finish_reason) == (6, EOS, "stop")
    assert (len(ignored.token_ids), ignored.finish_reason) == (12, "length")
    assert EOS not in ignored.token_ids


@pytest.mark.parametrize("json_schema", [True, False])
def test_a_grammar_gives_valid_json(engine: Any, tight_engine: Any, json_schema: bool) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    grammar = StructuredOutputsParams(json=schema) if json_schema else StructuredOutputsParams(json_object=True)
    constrained = sampling(max_tokens=256, detokenize=True, structured_outputs=grammar)
    free = sampling(max_tokens=40)
    batch, params = prompts(6, 30), [constrained, free] * 3
    found = generate(engine, batch, params)
    for output in found[::2]:
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        assert isinstance(value, dict)
        assert not json_schema or sorted(value) == ["ages", "name"]
    assert [list(o.token_ids) for o in found[1::2]] == [list(o.token_ids) for o in generate(engine, batch[1::2], free)]
    # the same, whatever the chunks and the batch
    assert [list(o.token_ids) for o in generate(tight_engine, batch[::2], constrained)] == [list(o.token_ids) for o in found[::2]]


def test_logprobs_start_with_the_sampled_token_and_fall(engine: Any) -> None:
    batch = prompts(3, 20)
    with_logprobs = [sampling(max_tokens=5, logprobs=4), sampling(max_tokens=5), sampling(max_tokens=5, logprobs=0)]
    found = generate(engine, batch, with_logprobs)
    assert [list(o.token_ids) for o in found] == [list(o.token_ids) for o in generate(engine, batch, sampling(max_tokens=5))]
    assert found[1].logprobs is None
    for token, position in zip(found[0].token_ids, found[0].logprobs, strict=True):
        assert next(iter(position)) == token
        assert [p.rank for p in position.values()] == [1, 2, 3, 4]
        values = [p.logprob for p in position.values()]
        assert values == sorted(values, reverse=True)
    assert [list(position) for position in found[2].logprobs] == [[token] for token in found[2].token_ids]


def test_the_prompts_own_logprobs_cover_it_whole_chunked_or_not(engine: Any, tight_engine: Any) -> None:
    (prompt,) = prompts(1, 150)
    asked = sampling(max_tokens=2, prompt_logprobs=2)
    whole, chunked = (e.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0] for e in (engine, tight_engine))
    first, *others = whole.prompt_logprobs
    assert first is None
    for token, position in zip(prompt[1:], others, strict=True):
        assert next(iter(position)) == token
        assert position[token].rank == 1
        assert [p.logprob for p in position.values()] == sorted((p.logprob for p in position.values()), reverse=True)
        assert len(position) == 2
    assert chunked.prompt_logprobs == whole.prompt_logprobs
    assert chunked.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize(("count", "size"), [(0, 3), (2, 3), (-1, 3), (2, 1)], ids=["none beside", "two", "all", "one token"])
def test_prompt_logprobs_of_every_number_and_length(wide_engine: Any, count: int, size: int) -> None:
    (prompt,) = prompts(1, size)
    asked = sampling(max_tokens=1, prompt_logprobs=count)
    (output,) = wide_engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    first, *others = output.prompt_logprobs
    assert first is None
    assert [next(iter(position)) for position in others] == prompt[1:]
    vocabulary = source_for(wide_engine.get_tokenizer(), 1024, eos_probability=0.0)
    assert [len(position) for position in others] == [vocabulary.size if count < 0 else max(1, count)] * (size - 1)


def test_beam_search_finds_beams_of_falling_probability(engine: Any) -> None:
    from vllm.sampling_params import BeamSearchParams

    (prompt,) = prompts(1, 20)
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    (output,) = engine.beam_search([{"prompt_token_ids": prompt}], params)
    beams = output.sequences
    assert [len(b.tokens) for b in beams] == [26, 26, 26]
    assert [b.cum_logprob for b in beams] == sorted((b.cum_logprob for b in beams), reverse=True)
    assert len({tuple(b.tokens) for b in beams}) == 3


def test_seeded_sampling_differs_by_seed_and_repeats(engine: Any) -> None:
    (prompt,) = prompts(1, 20)
    params = [sampling(temperature=1.0, seed=s, max_tokens=8) for s in (1, 2, 1)]
    one, two, again = (list(o.token_ids) for o in generate(engine, [prompt] * 3, params))
    assert one == again != two


def test_a_max_model_len_beyond_the_profile_is_refused(make_engine: Callable[..., Any]) -> None:
    from serve_app.errors import ConfigError

    # 23 blocks without the null block
    message = "engine_args.max_model_len: is 2048, but profile custom has room for 368 tokens; set it to at most 368"
    with pytest.raises(ConfigError, match=message):
        make_engine({"profile": TIGHT}, max_model_len=2048)


def test_settings_without_a_profile_are_refused(make_engine: Callable[..., Any]) -> None:
    from serve_app.errors import ConfigError

    with pytest.raises(ConfigError, match=r"additional_config.simulated: is missing"):
        make_engine({"seed": 1})


def test_an_adapter_s_answers_are_its_own_whatever_else_is_in_the_batch(make_engine: Callable[..., Any]) -> None:
    from vllm.lora.request import LoRARequest

    engine = make_engine(enable_lora=True, max_loras=2)
    (prompt,) = prompts(1, 50)
    adapters = [None, *(LoRARequest(name, number, f"/adapters/{name}") for name, number in (("a", 70_000), ("b", 80_000)))]

    def ask(lora_requests: list[Any]) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt}] * len(lora_requests)
        return [[*o.outputs[0].token_ids] for o in engine.generate(asked, sampling(), lora_request=lora_requests, use_tqdm=False)]

    together = ask(adapters)
    assert together == [answer for adapter in adapters for answer in ask([adapter])]
    assert len({tuple(answer) for answer in together}) == 3


def test_a_chat_that_offers_a_tool_gets_a_whole_call_resumed_at_any_point(make_engine: Callable[..., Any]) -> None:
    engine = make_engine({"profile": "h100-llama-8b", "calls_tools": True})
    tokenizer = engine.get_tokenizer()
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "What is the weather?"}]
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )
    (whole,) = generate(engine, [prompt], sampling(max_tokens=100, detokenize=True))
    assert (whole.text, whole.finish_reason) == ('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>', "stop")
    emitted = list(whole.token_ids)
    resumed = generate(engine, [prompt + emitted[:cut] for cut in range(len(emitted))], sampling(max_tokens=100))
    assert [emitted[:cut] + list(o.token_ids) for cut, o in enumerate(resumed)] == [emitted] * len(emitted)
