"""These cases test the part of /v1/responses that needs no store, and the small routes."""

from typing import Any

from tests.e2e.answers import Case
from tests.e2e.cases_chat import ASK, SYSTEM, WEATHER
from tests.e2e.cases_completions import PROMPT, SCHEMA
from tests.e2e.fleet import MODEL

NO_STORE = {"status": "responses-state", "body.error": "responses-state"}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"]}  # type: ignore[index]
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
CODEX: dict[str, Any] = {
    # The body of Codex's requests. Two runs of bare vLLM differ in how many tokens each delta has, and so in the events' numbers: `fold`
    # leaves both out.
    "instructions": "You are a coding agent. Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: workspace-write"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [{**FUNCTION, "strict": False}, PATCH],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a1b2-0000-7000-8000-000000000000",
    "text": {"verbosity": "medium"},
    "max_output_tokens": 200,
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


def respond(name: str, **fields: Any) -> Case:
    """Return a greedy request of 12 tokens, changed by ``fields``; fields of ``Case`` are recognised by their names."""
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
    respond("as Codex asks", **CODEX),
    respond("as Codex asks, seeded", **CODEX, seed=3, temperature=1.0),
    respond("as Codex asks, with a call", **{**CODEX, "tools": [FUNCTION], "tool_choice": "required"}),
    respond("invalid: as Codex asks, a tool with a grammar", **{**CODEX, "tools": [{**PATCH, "format": GRAMMAR}]}),
    respond("invalid: without input", input=None),
    respond("invalid: unknown model", model="other", wanted={"body.error.message": "unknown-model"}),
    respond("invalid: max_output_tokens 0", max_output_tokens=0),
    respond("invalid: bad tool", tools=[{"type": "no_such_tool"}]),
    respond("invalid: stored: previous_response_id", previous_response_id="resp_1", wanted=NO_STORE),
    respond("invalid: stored: background", background=True, wanted={"body.error": "responses-state"}),
    respond("invalid: stored: background yes", background="yes", wanted={"body.error": "responses-state"}),
    respond("invalid: stored: previous_response_id number", previous_response_id=5, wanted={"body.error": "responses-state"}),
    Case("invalid: responses retrieve", "/v1/responses/resp_1", method="GET", wanted=NO_STORE),
    Case("invalid: responses cancel", "/v1/responses/resp_1/cancel", wanted=NO_STORE),
]

TOKENS = [
    Case("tokenize prompt", "/tokenize", {"model": MODEL, "prompt": PROMPT}),
    Case("tokenize with strings", "/tokenize", {"model": MODEL, "prompt": "Grüße", "return_token_strs": True}),
    Case("tokenize without special tokens", "/tokenize", {"prompt": PROMPT, "add_special_tokens": False}),
    Case("tokenize chat", "/tokenize", {"model": MODEL, "messages": [SYSTEM, *ASK]}),
    Case(
        "tokenize chat with tools",
        "/tokenize",
        {"model": MODEL, "messages": ASK, "tools": [WEATHER], "add_generation_prompt": False},
    ),
    Case(
        "invalid: tokenize of another model",
        "/tokenize",
        {"model": "other", "prompt": PROMPT},
        wanted={"body.error.message": "unknown-model"},
    ),
    Case("invalid: tokenize without a prompt", "/tokenize", {"model": MODEL}),
    Case("detokenize", "/detokenize", {"model": MODEL, "tokens": [5, 300, 17, 900]}),
    Case("detokenize nothing", "/detokenize", {"model": MODEL, "tokens": []}),
    Case("detokenize outside the vocabulary", "/detokenize", {"model": MODEL, "tokens": [99999]}),
    Case("invalid: detokenize text", "/detokenize", {"model": MODEL, "tokens": "abc"}),
]

ERROR_BODY = {"body": "error-bodies"}
CORS = {"headers.server": "server-header", "headers.vary": "cors"}
SERVER = {"headers.server": "server-header"}
ONE_TOKEN = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}


def absent(name: str, path: str, body: Any = None, method: str = "POST", *parts: str) -> Case:
    """A route that vLLM answers and the ingress does not have; ``parts`` differ beside status and body."""
    return Case(f"routes {name}", path, body, method, wanted=dict.fromkeys(("status", "body", *parts), "routes"))


ROUTES = [
    Case("models", "/v1/models", method="GET"),
    Case("invalid: models by HEAD", "/v1/models", method="HEAD", wanted={"status": "head"}),
    Case("version", "/version", method="GET", wanted={"body.serve_app": "version"}),
    Case(
        "invalid: our own generate",
        "/generate",
        {"prompt": PROMPT, "max_tokens": 2},
        wanted={"status": "generate", "body": "generate"},
    ),
    absent("documentation", "/docs", None, "GET", "type"),
    absent("openapi", "/openapi.json", method="GET"),
    Case("health", "/health", method="GET"),
    Case(
        "invalid: a model by its id", f"/v1/models/{MODEL}", method="GET", wanted={"status": "model-by-id", "body": "model-by-id"}
    ),
    absent("ping", "/ping", None, "GET", "type"),
    absent("load", "/load", method="GET"),
    absent("sagemaker", "/invocations", ONE_TOKEN),
    absent("invalid: render", "/v1/completions/render", {"model": MODEL, "prompt": PROMPT}),
    absent("invalid: generate tokens", "/inference/v1/generate", {"model": MODEL, "token_ids": [5, 6], "sampling_params": {}}),
    absent("trailing slash", "/v1/completions/", ONE_TOKEN, "POST", "type"),
    Case("invalid: embeddings of a generative model", "/v1/embeddings", {"model": MODEL, "input": "hello"}, wanted=ERROR_BODY),
    Case("invalid: models posted", "/v1/models", {}, wanted=ERROR_BODY),
    Case("invalid: completions by GET", "/v1/completions", method="GET", wanted=ERROR_BODY),
    Case("invalid: chat by DELETE", "/v1/chat/completions", method="DELETE", wanted=ERROR_BODY),
    Case("invalid: unknown route", "/v1/nothing", {}, wanted=ERROR_BODY),
    Case("invalid: unknown route by GET", "/nothing", method="GET", wanted=ERROR_BODY),
    Case("invalid: score", "/score", {"model": MODEL, "text_1": "a", "text_2": "b"}, wanted=ERROR_BODY),
    Case("invalid: root", "/", method="GET", wanted={"status": "root", "body": "root"}),
    Case(
        "invalid: CORS preflight",
        "/v1/completions",
        method="OPTIONS",
        headers={"origin": "http://a", "access-control-request-method": "POST"},
        wanted=dict.fromkeys(("status", "type", "body"), "cors"),
    ),
    Case("CORS", "/v1/models", method="GET", headers={"origin": "http://a"}, with_headers=True, wanted=CORS),
    Case("headers", "/v1/models", method="GET", with_headers=True, wanted=CORS),
    Case(
        "headers of a completion",
        "/v1/completions",
        ONE_TOKEN,
        headers={"x-request-id": "mine-3", "authorization": "Bearer anything"},
        with_headers=True,
        wanted=SERVER,
    ),
    Case(
        "load metrics in a header",
        "/v1/completions",
        ONE_TOKEN,
        headers={"endpoint-load-metrics-format": "TEXT"},
        with_headers=True,
        wanted=SERVER,
    ),
    Case(
        "a receipt",
        "/v1/completions",
        ONE_TOKEN,
        headers={"x-serve-app-receipt": "1"},
        with_headers=True,
        wanted={**SERVER, "headers.x-serve-app-receipt": "receipt"},
    ),
    Case("headers of a stream", "/v1/completions", {**ONE_TOKEN, "stream": True}, with_headers=True, wanted=SERVER),
]

CASES = [*RESPONSES, *TOKENS, *ROUTES]
