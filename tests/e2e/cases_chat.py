"""These cases test /v1/chat/completions: templates, tools, structured output and the other fields that completions lack."""

from typing import Any

from tests.e2e.answers import Case
from tests.e2e.cases_completions import SCHEMA
from tests.e2e.fleet import MODEL

ASK = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
PREFILL = [*ASK, {"role": "assistant", "content": "The capital of"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
WEATHER_CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"unit": "(C|K)", "days": [1-9]\}\}\n</tool_call>'
"""A regular expression: what the tool parser reads as a call of `WEATHER`."""
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALLED = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"unit": "celsius", "days": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "17 degrees"},
]


def chat(name: str, **fields: Any) -> Case:
    """Return a greedy request of 12 tokens, changed by ``fields``; fields of ``Case`` are recognised by their names."""
    ours = {k: fields.pop(k) for k in ("sampled", "alone", "by_chunk", "wanted", "headers", "with_headers") if k in fields}
    body = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0, **fields}
    return Case(f"chat {name}", "/v1/chat/completions", body, **ours)


def both(name: str, **fields: Any) -> list[Case]:
    """The same request answered whole and streamed."""
    return [chat(name, **fields), chat(f"{name}, streamed", stream=True, **fields)]


MESSAGES = [
    *both("greedy"),
    chat("without a model", model=None),
    chat("system message", messages=[SYSTEM, *ASK]),
    chat(
        "several turns", messages=[SYSTEM, *ASK, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Why?"}]
    ),
    chat("developer role", messages=[{"role": "developer", "content": "Be brief."}, *ASK]),
    chat("a role of one's own", messages=[{"role": "narrator", "content": "Once"}]),
    chat("name of the speaker", messages=[{"role": "user", "name": "Ann", "content": "Hello"}]),
    chat(
        "content parts",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]}],
    ),
    chat("invalid: content parts without a type", messages=[{"role": "user", "content": [{"text": "Hello"}]}]),
    chat("assistant without content", messages=[*ASK, {"role": "assistant", "content": None}]),
    chat("reasoning in the history", messages=[*ASK, {"role": "assistant", "content": "Paris", "reasoning": "easy"}, *ASK]),
    *both("continue_final_message", messages=PREFILL, continue_final_message=True, add_generation_prompt=False),
    chat(
        "continue_final_message and echo", messages=PREFILL, continue_final_message=True, add_generation_prompt=False, echo=True
    ),
    chat(
        "invalid: continue_final_message and echo, streamed",  # of vLLM itself: it takes the message for a text
        messages=PREFILL,
        continue_final_message=True,
        add_generation_prompt=False,
        echo=True,
        stream=True,
    ),
    chat("add_generation_prompt off", add_generation_prompt=False),
    chat("add_special_tokens", add_special_tokens=True),
    chat("chat_template_kwargs", chat_template_kwargs={"enable_thinking": False}),
    chat("documents", documents=[{"title": "a", "text": "b"}]),
    chat("default max_tokens", max_tokens=None, stop=["e"]),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    chat("max_completion_tokens over max_tokens", max_completion_tokens=3),
    chat("truncate_prompt_tokens", truncate_prompt_tokens=6),
    chat("reasoning_effort", reasoning_effort="low"),
    chat("include_reasoning off", include_reasoning=False),
    chat("parallel_tool_calls off", parallel_tool_calls=False),
    chat("metadata of OpenAI's own", user="u", store=False, metadata={"a": "b"}, service_tier="auto"),
    chat("request_id", request_id="mine-2"),
    chat("cache_salt", cache_salt="salt"),
]

SAMPLING = [
    *both("seed and n", seed=11, n=2, temperature=1.0),
    chat("seed, top_p, top_k, min_p", seed=11, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
    chat("unseeded", temperature=1.0, ignore_eos=True, sampled=True),
    chat("unseeded, streamed", temperature=1.0, ignore_eos=True, stream=True, sampled=True),
    chat("penalties", presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.1, max_tokens=24),
    chat("logit_bias", logit_bias={"100": 100.0}),
    chat("allowed_token_ids", allowed_token_ids=[50, 60]),
    chat("bad_words", bad_words=["the"]),
    *both("stop strings", stop=["e", "a"], max_tokens=40),
    chat("stop string kept", stop=["e"], include_stop_str_in_output=True, max_tokens=40),
    chat("stop_token_ids", logit_bias={"100": 100.0}, stop_token_ids=[100]),
    chat("min_tokens and ignore_eos", min_tokens=4, ignore_eos=True),
    *both("end of text", logit_bias={"1": 100.0}),
    chat("skip_special_tokens off", logit_bias={"1": 100.0}, ignore_eos=True, skip_special_tokens=False),
    chat("beam search", use_beam_search=True, n=2, max_tokens=5),
]

LOGPROBS = [
    *both("logprobs", logprobs=True),
    *both("top_logprobs", logprobs=True, top_logprobs=4),
    chat("prompt_logprobs", prompt_logprobs=1),
    chat("logprob_token_ids", alone=True, logprobs=True, logprob_token_ids=[5, 6]),
    *both("return_token_ids", return_token_ids=True),
    chat("return_tokens_as_token_ids", logprobs=True, return_tokens_as_token_ids=True),
    *both("return_prompt_text", return_prompt_text=True),
]

STREAMING = [
    chat("include_usage", stream=True, stream_options={"include_usage": True}),
    chat("continuous usage", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    chat("n and usage", stream=True, n=3, seed=4, temperature=1.0, stream_options={"include_usage": True}),
    chat("one token by chunk", stream=True, max_tokens=1, by_chunk=True),
    chat("end of text by chunk", stream=True, logit_bias={"1": 100.0}, by_chunk=True, stream_options={"include_usage": True}),
]

TOOLS = [
    *both("tools, not called", tools=[WEATHER]),
    chat("tools and tool_choice none", tools=[WEATHER], tool_choice="none"),
    *both("tools and tool_choice required", tools=[WEATHER], tool_choice="required", max_tokens=80),
    *both(
        "named tool", tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=80
    ),
    chat("tools and the results of a call", messages=CALLED, tools=[WEATHER]),
    *both(
        "a call in the parser's own form",
        tools=[WEATHER],
        tool_choice="auto",
        max_tokens=80,
        structured_outputs={"regex": WEATHER_CALL},
    ),
    *both(
        "two calls and text before them",
        tools=[WEATHER, CLOCK],
        tool_choice="auto",
        max_tokens=120,
        structured_outputs={
            "regex": r'Well: <tool_call>\n\{"name": "get_weather", "arguments": \{"days": [1-9]\}\}\n</tool_call>'
            r'\n<tool_call>\n\{"name": "get_time", "arguments": \{\}\}\n</tool_call>'
        },
    ),
    *both(
        "a broken call",
        tools=[WEATHER],
        max_tokens=60,
        structured_outputs={"regex": r'<tool_call>\n\{"name": "get_weather", "arguments": \{"days": \n</tool_call>'},
    ),
]

STRUCTURED = [
    *both(
        "response_format json_schema",
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
        max_tokens=60,
    ),
    chat("response_format json_object", response_format={"type": "json_object"}, max_tokens=20),
    chat("response_format text", response_format={"type": "text"}),
    chat("structured choice", structured_outputs={"choice": ["yes", "no"]}),
    *both("structured regex", structured_outputs={"regex": "[0-9]{3}"}),
    chat("structured, seeded, logprobs", structured_outputs={"regex": "[a-z]{5}"}, seed=8, temperature=1.0, logprobs=True),
]

CASES = [*MESSAGES, *SAMPLING, *LOGPROBS, *STREAMING, *TOOLS, *STRUCTURED]
