"""These cases test /v1/completions: each field of the request, alone and in the combinations that share code."""

from typing import Any

from tests.e2e.answers import Case
from tests.e2e.fleet import MODEL

PROMPT = "The capital of France is"
OTHERS = ["Once upon a time", "A scheduler decides in every step"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "count"],
    "additionalProperties": False,
}


def completion(name: str, **fields: Any) -> Case:
    """Return a greedy request of 12 tokens, changed by ``fields``; fields of ``Case`` are recognised by their names."""
    ours = {k: fields.pop(k) for k in ("sampled", "alone", "by_chunk", "wanted", "headers", "with_headers") if k in fields}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    return Case(f"completions {name}", "/v1/completions", body, **ours)


def both(name: str, **fields: Any) -> list[Case]:
    """The same request answered whole and streamed."""
    return [completion(name, **fields), completion(f"{name}, streamed", stream=True, **fields)]


PLAIN = [
    *both("greedy"),
    completion("without a model", model=None),
    completion("default max_tokens", max_tokens=None),
    completion("one token", max_tokens=1),
    completion("invalid: empty prompt", prompt=""),
    completion("text outside ASCII", prompt="Grüße 日本語 🙂"),
    completion("prompt of one token id", prompt=[17]),
    completion("prompt of token ids", prompt=[5, 300, 17, 900]),
    completion("list of token id prompts", prompt=[[5, 300], [17, 900, 44]]),
    *both("list of prompts", prompt=[PROMPT, *OTHERS]),
    completion("user", user="somebody"),
    completion("session_id", session_id="s-1"),
    completion("request_id", request_id="mine-1"),
    completion("unknown field", no_such_field=1),
    completion("up to the model's length", prompt=[9] * 1000, max_tokens=24, ignore_eos=True),
    completion("invalid: suffix empty", suffix=""),
    completion("cache_salt", cache_salt="salt"),
    completion("vllm_xargs", vllm_xargs={"a": 1}),
    completion("add_special_tokens", add_special_tokens=False),
    completion("truncate_prompt_tokens", truncate_prompt_tokens=3),
    completion("truncate_prompt_tokens, left", truncate_prompt_tokens=3, truncation_side="left"),
    completion("truncate_prompt_tokens -1", prompt=[9] * 1100, truncate_prompt_tokens=-1),
]

SAMPLING = [
    *both("seed", seed=7, temperature=1.0),
    completion("seed and top_p", seed=7, temperature=1.0, top_p=0.5),
    completion("seed and top_k", seed=7, temperature=1.0, top_k=5),
    completion("seed and min_p", seed=7, temperature=1.0, min_p=0.2),
    completion("seed -2", seed=-2, temperature=0.7),
    completion("seed -1 is no seed", seed=-1, temperature=0.7, ignore_eos=True, sampled=True),
    *both("seed and n", seed=3, n=3, temperature=1.0),
    completion("seed and n and prompts", seed=3, n=2, temperature=1.0, prompt=[PROMPT, OTHERS[0]]),
    completion("unseeded", temperature=1.0, ignore_eos=True, sampled=True),
    completion("unseeded, streamed", temperature=1.0, ignore_eos=True, stream=True, sampled=True),
    completion("unseeded n", temperature=1.0, n=4, ignore_eos=True, sampled=True),
    completion("presence_penalty", presence_penalty=1.5, max_tokens=24),
    completion("frequency_penalty", frequency_penalty=1.5, max_tokens=24),
    completion("negative frequency_penalty", frequency_penalty=-1.0, max_tokens=24),
    completion("repetition_penalty", repetition_penalty=1.5, max_tokens=24),
    completion("all penalties", presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, seed=1, temperature=0.9),
    completion("logit_bias up", logit_bias={"100": 100.0}),
    completion("logit_bias down", logit_bias={"100": -100.0, "101": 2.5}),
    completion("allowed_token_ids", allowed_token_ids=[50, 60, 70]),
    completion("bad_words", bad_words=["the", " and"], max_tokens=24),
    completion(
        "repetition_detection",
        max_tokens=64,
        logit_bias={"100": 100.0},
        repetition_detection={"max_pattern_size": 2, "min_count": 3},
    ),
    completion("priority 0", priority=0),
    completion("watermarking off", watermarking=False),
]

STOPPING = [
    *both("stop string", stop="e", max_tokens=40),
    *both("stop strings kept", stop=["e", " t"], include_stop_str_in_output=True, max_tokens=40),
    completion("stop string that never comes", stop="never in here"),
    completion("stop list empty", stop=[]),
    *both("stop_token_ids", logit_bias={"100": 100.0}, stop_token_ids=[100]),
    *both("end of text", logit_bias={"1": 100.0}),
    completion("ignore_eos", logit_bias={"1": 100.0}, ignore_eos=True),
    completion("skip_special_tokens off", logit_bias={"1": 100.0}, ignore_eos=True, skip_special_tokens=False),
    completion("min_tokens", logit_bias={"1": 100.0}, min_tokens=5),
    completion("spaces_between_special_tokens", spaces_between_special_tokens=False),
]

LOGPROBS = [
    *both("logprobs 0", logprobs=0),
    *both("logprobs 3", logprobs=3),
    completion("logprobs at the limit", logprobs=20, max_tokens=2),
    *both("echo", echo=True),
    *both("echo and logprobs", echo=True, logprobs=2),
    completion("echo of the prompt only", echo=True, max_tokens=0),
    completion("echo of the prompt only with logprobs", echo=True, max_tokens=0, logprobs=1),
    completion("echo and n and prompts", echo=True, n=2, prompt=[PROMPT, OTHERS[0]], seed=5, temperature=1.0),
    completion("echo of token ids", echo=True, prompt=[5, 300, 17]),
    completion("prompt_logprobs", prompt_logprobs=2),
    completion("prompt_logprobs 0", prompt_logprobs=0),
    completion("logprob_token_ids", alone=True, logprobs=1, logprob_token_ids=[5, 6, 7]),
    completion("return_tokens_as_token_ids", logprobs=1, return_tokens_as_token_ids=True),
    *both("return_token_ids", return_token_ids=True),
    completion("seed and logprobs", seed=2, temperature=1.0, logprobs=4, n=2),
]

STREAMING = [
    completion("include_usage", stream=True, stream_options={"include_usage": True}),
    completion("continuous usage", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    completion("usage off", stream=True, stream_options={"include_usage": False}),
    completion(
        "usage of n and prompts",
        stream=True,
        n=2,
        seed=1,
        temperature=1.0,
        prompt=[PROMPT, OTHERS[0]],
        stream_options={"include_usage": True},
    ),
    completion("one token by chunk", stream=True, max_tokens=1, by_chunk=True),
    completion("one token with usage by chunk", stream=True, max_tokens=1, by_chunk=True, stream_options={"include_usage": True}),
    completion("end of text by chunk", stream=True, logit_bias={"1": 100.0}, by_chunk=True),
    completion("stream_interval", stream=True, max_tokens=40, stream_interval=1000, ignore_eos=True),
]

STRUCTURED = [
    *both("json schema", structured_outputs={"json": SCHEMA}, max_tokens=60),
    completion("json schema as text", structured_outputs={"json": '{"type": "integer"}'}),
    *both("regex", structured_outputs={"regex": "[a-f]{4}-[0-9]{2}"}),
    completion("choice", structured_outputs={"choice": ["yes", "no", "perhaps"]}),
    completion("grammar", structured_outputs={"grammar": 'root ::= "a" | "b" root'}),
    completion("json object", structured_outputs={"json_object": True}, max_tokens=20),
    completion("structured, seed and n", structured_outputs={"regex": "[a-z]{6}"}, seed=3, n=3, temperature=1.0),
    completion("response_format json_object", response_format={"type": "json_object"}, max_tokens=20),
    completion("response_format text", response_format={"type": "text"}),
    completion(
        "response_format json_schema",
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
        max_tokens=60,
    ),
    completion("structured and logprobs", structured_outputs={"regex": "[a-z]{5}"}, logprobs=2),
]

BEAMS = [
    completion("beam search", use_beam_search=True, n=3, max_tokens=6),
    completion("beam search, length_penalty", use_beam_search=True, n=2, max_tokens=6, length_penalty=2.0),
    completion("beam search, prompts", use_beam_search=True, n=2, max_tokens=4, prompt=[PROMPT, OTHERS[0]]),
    completion("invalid: beam search, streamed", use_beam_search=True, n=2, max_tokens=4, stream=True),
]

CASES = [*PLAIN, *SAMPLING, *STOPPING, *LOGPROBS, *STREAMING, *STRUCTURED, *BEAMS]
