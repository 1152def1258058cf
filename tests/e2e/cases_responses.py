"""/v1/responses, as far as it needs no store, and the small routes."""

from typing import Any

from tests.e2e.answers import Case
from tests.e2e.cases_chat import ASK, SYSTEM, WEATHER
from tests.e2e.cases_completions import PROMPT, SCHEMA
from tests.e2e.fleet import MODEL

STATELESS = "responses-state"
FUNCTION = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"]}  # type: ignore[index]


def respond(name: str, **fields: Any) -> Case:
    """A greedy request of 12 tokens, but for ``fields``; fields of ``Case`` are told apart by their names."""
    ours = {k: fields.pop(k) for k in ("sampled", "by_chunk", "wanted", "headers") if k in fields}
    body = {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 12, "temperature": 0, **fields}
    return Case(f"responses {name}", "/v1/responses", body, **ours)


def both(name: str, **fields: Any) -> list[Case]:
    """The same request answered whole and streamed."""
    return [respond(name, **fields), respond(f"{name}, streamed", stream=True, **fields)]


RESPONSES = [
    *both("greedy"),
    respond("store off", store=False),
    respond("instructions", instructions="Be brief."),
    respond("input messages", input=[{"role": "user", "content": "Hello"}]),
    respond("input parts", input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]),
    respond(
        "a conversation",
        input=[
            {"role": "user", "content": "Hello"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
            {"role": "user", "content": "Why?"},
        ],
    ),
    respond("top_logprobs", top_logprobs=2, include=["message.output_text.logprobs"]),
    respond("seed", seed=3, temperature=1.0, top_p=0.9),
    respond("unseeded", temperature=1.0, ignore_eos=True, sampled=True),
    respond("stop", stop=["e"]),
    respond("logit_bias", logit_bias={"100": 100.0}),
    respond("metadata", metadata={"a": "b"}, user="u"),
    respond("truncation auto", truncation="auto"),
    respond("reasoning effort", reasoning={"effort": "low"}),
    respond("enable_response_messages", enable_response_messages=True),
    *both("text format", text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}, max_output_tokens=60),
    respond("structured_outputs", structured_outputs={"choice": ["yes", "no"]}),
    *both("tools", tools=[FUNCTION]),
    *both("tool_choice required", tools=[FUNCTION], tool_choice="required", max_output_tokens=80),
    respond("tool_choice none", tools=[FUNCTION], tool_choice="none"),
    respond("without input", input=None),
    respond("unknown model", model="other"),
    respond("max_output_tokens 0", max_output_tokens=0),
    respond("bad tool", tools=[{"type": "no_such_tool"}]),
    respond("stored: previous_response_id", previous_response_id="resp_1"),
    respond("stored: background", background=True),
    Case("responses retrieve", "/v1/responses/resp_1", method="GET"),
    Case("responses cancel", "/v1/responses/resp_1/cancel"),
]

TOKENS = [
    Case("tokenize prompt", "/tokenize", {"model": MODEL, "prompt": PROMPT}),
    Case("tokenize with strings", "/tokenize", {"model": MODEL, "prompt": "Grüße", "return_token_strs": True}),
    Case("tokenize without special tokens", "/tokenize", {"prompt": PROMPT, "add_special_tokens": False}),
    Case("tokenize chat", "/tokenize", {"model": MODEL, "messages": [SYSTEM, *ASK]}),
    Case("tokenize chat with tools", "/tokenize", {"model": MODEL, "messages": ASK, "tools": [WEATHER], "add_generation_prompt": False}),
    Case("tokenize of another model", "/tokenize", {"model": "other", "prompt": PROMPT}),
    Case("tokenize without a prompt", "/tokenize", {"model": MODEL}),
    Case("detokenize", "/detokenize", {"model": MODEL, "tokens": [5, 300, 17, 900]}),
    Case("detokenize nothing", "/detokenize", {"model": MODEL, "tokens": []}),
    Case("detokenize outside the vocabulary", "/detokenize", {"model": MODEL, "tokens": [99999]}),
    Case("detokenize text", "/detokenize", {"model": MODEL, "tokens": "abc"}),
]

ROUTES = [
    Case("models", "/v1/models", method="GET"),
    Case("models posted", "/v1/models", {}),
    Case("version", "/version", method="GET"),
    Case("embeddings of a generative model", "/v1/embeddings", {"model": MODEL, "input": "hello"}),
    Case("completions by GET", "/v1/completions", method="GET"),
    Case("chat by DELETE", "/v1/chat/completions", method="DELETE"),
    Case("unknown route", "/v1/nothing", {}),
    Case("unknown route by GET", "/nothing", method="GET"),
    Case("trailing slash", "/v1/completions/", {"model": MODEL, "prompt": PROMPT}),
    Case("documentation pages", "/docs", method="GET"),
    Case("openapi", "/openapi.json", method="GET"),
    Case("health", "/health", method="GET"),
    Case("ping", "/ping", method="GET"),
    Case("load", "/load", method="GET"),
    Case("messages of another vendor", "/v1/messages", {"model": MODEL, "max_tokens": 3, "messages": ASK}),
    Case("sagemaker", "/invocations", {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0}),
    Case("render", "/v1/completions/render", {"model": MODEL, "prompt": PROMPT}),
    Case("score", "/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    Case("generate tokens", "/inference/v1/generate", {"model": MODEL, "token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}),
    Case("our own generate", "/generate", {"prompt": PROMPT, "max_tokens": 2}),
    Case("CORS preflight", "/v1/completions", method="OPTIONS", headers={"origin": "http://a", "access-control-request-method": "POST"}),
    Case("CORS", "/v1/models", method="GET", headers={"origin": "http://a"}, with_headers=True),
    Case("headers", "/v1/models", method="GET", with_headers=True),
    Case(
        "headers of a completion",
        "/v1/completions",
        {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0},
        headers={"x-request-id": "mine-3", "authorization": "Bearer anything"},
        with_headers=True,
    ),
    Case(
        "headers of a stream",
        "/v1/completions",
        {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True},
        with_headers=True,
    ),
]

CASES = [*RESPONSES, *TOKENS, *ROUTES]
