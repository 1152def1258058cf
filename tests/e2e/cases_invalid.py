"""These cases are requests that no server can serve: errors, their bodies and their order are vLLM's own."""

import gzip
import json
from dataclasses import replace

from tests.e2e.answers import Case
from tests.e2e.cases_chat import ASK, WEATHER, chat
from tests.e2e.cases_completions import PROMPT, completion
from tests.e2e.cases_responses import ERROR_BODY
from tests.e2e.fleet import MODEL

_BODY = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}).encode()
_JSON = {"content-type": "application/json"}
_UNENCODABLE = {"status": "unencodable", "body.error": "unencodable"}
_MOST_CHOICES = {"body.error.message": "most-choices"}
_ENGINE_LIMITS = {"status": "engine-limits", "body": "engine-limits"}
_UNENCODABLE_STREAMED = dict.fromkeys(("status", "type", "body", "events"), "unencodable")


def raw(name: str, content: bytes, path: str = "/v1/completions", **headers: str) -> Case:
    return Case(f"body {name}", path, content, headers={k.replace("_", "-"): v for k, v in headers.items()} or _JSON)


def unparsed(name: str, content: bytes, **headers: str) -> Case:
    """Return a case whose body Python cannot parse: vLLM reports that in FastAPI's form."""
    return replace(raw(name, content, **headers), wanted=ERROR_BODY)


BYTES = [
    raw("invalid: malformed JSON", b'{"model": "tiny", "prompt": '),
    raw("invalid: malformed JSON for chat", b"{]", "/v1/chat/completions"),
    raw("invalid: empty body", b""),
    raw("invalid: JSON null", b"null"),
    raw("invalid: JSON list", b"[1, 2]"),
    raw("invalid: JSON string", b'"hello"'),
    raw("invalid: empty object", b"{}"),
    raw("invalid: empty object for chat", b"{}", "/v1/chat/completions"),
    unparsed("invalid: not UTF-8", b'{"model": "tiny", "prompt": "\xff\xfe"}'),
    raw("invalid: NaN", b'{"model": "tiny", "prompt": "a", "temperature": NaN}'),
    raw("invalid: a number too large", b'{"model": "tiny", "prompt": "a", "temperature": 1e999}'),
    raw("invalid: an integer of 30 digits", b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 30 + b"}"),
    raw("the same key twice", b'{"model": "tiny", "prompt": "a", "max_tokens": 2, "max_tokens": 1, "temperature": 0}'),
    raw("byte order mark", b"\xef\xbb\xbf" + _BODY),
    unparsed("invalid: deep nesting", b'{"model": "tiny", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
    raw("invalid: text/plain", _BODY, content_type="text/plain"),
    raw("invalid: form", b"model=tiny&prompt=a", content_type="application/x-www-form-urlencoded"),
    raw("content-type with charset", _BODY, content_type="application/json; charset=utf-8"),
    raw("invalid: no content-type", _BODY, accept="*/*"),
    raw("invalid: model is a number", b'{"model": 5, "prompt": "a"}'),
    raw("model is empty", b'{"model": "", "prompt": "a", "max_tokens": 2, "temperature": 0}'),
    raw("invalid: surrogates", b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 2, "temperature": 0}'),
    Case(
        "body invalid: surrogate in the model",
        "/v1/completions",
        b'{"model": "\\ud800", "prompt": "a"}',
        headers=_JSON,
        wanted={"status": "unknown-model", "body.error": "unknown-model"},
    ),
    unparsed("invalid: model not UTF-8", b'{"model": "\xff", "prompt": "a"}'),
    unparsed("invalid: gzip", gzip.compress(_BODY), content_encoding="gzip", content_type="application/json"),
    Case(
        "body invalid: 11 MiB",
        "/v1/completions",
        b" " * (11 << 20),
        headers=_JSON,
        wanted={"status": "body-size", "body.error": "body-size"},
    ),
    raw("null byte", b'{"model": "tiny", "prompt": "a\\u0000b", "max_tokens": 2, "temperature": 0}'),
]

COMPLETIONS = [
    completion("invalid: unknown model", model="other", wanted={"body.error.message": "unknown-model"}),
    completion("invalid: unknown model, streamed", model="other", stream=True, wanted={"body.error.message": "unknown-model"}),
    completion(
        "invalid: unknown model and a bad field",
        model="other",
        max_tokens="many",
        wanted={"status": "unknown-model", "body.error": "unknown-model"},
    ),
    completion("invalid: no prompt", prompt=None),
    completion("invalid: empty prompt list", prompt=[]),
    completion("invalid: prompt of a wrong type", prompt={"a": 1}),
    completion("invalid: negative token id", prompt=[-5]),
    completion("invalid: token id outside the vocabulary", prompt=[1024]),
    completion("invalid: token id far outside", prompt=[2**40]),
    completion("invalid: mixed prompt list", prompt=["a", 5]),
    completion("invalid: too long prompt", prompt=[9] * 1100),
    completion("invalid: too long prompt, streamed", prompt=[9] * 1100, stream=True),
    completion("max_tokens beyond the model's length", prompt=[9] * 1000, max_tokens=100),
    completion("invalid: too long text", prompt="hello " * 3000),
    completion("invalid: negative max_tokens", max_tokens=-1),
    completion("invalid: max_tokens 0", max_tokens=0),
    completion("invalid: max_tokens text", max_tokens="many"),
    completion("invalid: max_tokens fraction", max_tokens=1.5),
    completion("invalid: max_tokens over the model", max_tokens=5000),
    completion("invalid: n 0", n=0),
    completion("invalid: huge n", n=100000, wanted=_MOST_CHOICES),
    completion("invalid: n greedy", n=2),
    completion("invalid: temperature negative", temperature=-1),
    completion("invalid: temperature text", temperature="hot"),
    completion("invalid: temperature huge", temperature=1e9, seed=1),
    completion("invalid: top_p 0", top_p=0, temperature=1.0),
    completion("invalid: top_p over 1", top_p=1.5, temperature=1.0),
    completion("invalid: top_k -5", top_k=-5, temperature=1.0),
    completion("invalid: min_p 2", min_p=2, temperature=1.0),
    completion("invalid: presence_penalty 3", presence_penalty=3),
    completion("invalid: frequency_penalty -3", frequency_penalty=-3),
    completion("invalid: repetition_penalty 0", repetition_penalty=0),
    completion("invalid: logprobs over the limit", logprobs=21),
    completion("invalid: logprobs negative", logprobs=-2),
    completion("invalid: prompt_logprobs over the limit", prompt_logprobs=21),
    completion("invalid: prompt_logprobs with stream", prompt_logprobs=1, stream=True),
    completion("invalid: seed too large", seed=2**70),
    completion("invalid: stop of numbers", stop=[1, 2]),
    completion("invalid: empty stop string", stop=[""]),
    completion("invalid: many stop strings", stop=["x"] * 200),
    completion("invalid: stop_token_ids text", stop_token_ids=["a"]),
    completion("invalid: min_tokens over max_tokens", min_tokens=50),
    completion("invalid: min_tokens negative", min_tokens=-1),
    completion("invalid: logit_bias of a word", logit_bias={"word": 1.0}),
    completion("invalid: logit_bias outside the vocabulary", logit_bias={"5000": 1.0}),
    completion("invalid: logit_bias list", logit_bias=[1]),
    completion("invalid: allowed_token_ids outside", allowed_token_ids=[5000]),
    completion("invalid: allowed_token_ids empty", allowed_token_ids=[]),
    completion("invalid: bad_words empty string", bad_words=[""]),
    completion("invalid: suffix", suffix="the end"),
    completion("best_of", best_of=3),
    completion("invalid: stream_options without stream", stream_options={"include_usage": True}),
    completion("invalid: stream_options text", stream=True, stream_options="all"),
    completion("invalid: stream_interval 0", stream=True, stream_interval=0),
    completion("priority without priority scheduling", priority=5),
    completion("invalid: truncate_prompt_tokens over the model", truncate_prompt_tokens=5000),
    completion("invalid: truncation_side", truncate_prompt_tokens=3, truncation_side="middle"),
    completion("invalid: echo with stream and prompt_logprobs", echo=True, stream=True, logprobs=1, prompt_logprobs=2),
    completion("invalid: prompt_embeds", prompt=None, prompt_embeds="AAAA"),
    completion("invalid: cache_salt empty", cache_salt=""),
    completion("invalid: thinking_token_budget", thinking_token_budget=5),
    completion("invalid: beam search over max_logprobs", use_beam_search=True, n=15),
    completion("invalid: structured_outputs regex", structured_outputs={"regex": "[a-"}),
    completion("invalid: structured_outputs regex, streamed", structured_outputs={"regex": "(("}, stream=True),
    completion("invalid: structured_outputs grammar", structured_outputs={"grammar": "root ::= ("}),
    completion("invalid: structured_outputs schema", structured_outputs={"json": {"type": "no_such_type"}}),
    completion("invalid: structured_outputs schema text", structured_outputs={"json": "{"}),
    completion("invalid: structured_outputs two kinds", structured_outputs={"regex": "a", "choice": ["a"]}),
    completion("invalid: structured_outputs no kind", structured_outputs={}),
    completion("invalid: structured_outputs empty choice", structured_outputs={"choice": []}),
    completion("invalid: structured_outputs structural_tag", structured_outputs={"structural_tag": "{}"}),
    completion("invalid: response_format type", response_format={"type": "no_such"}),
    completion("invalid: response_format without schema", response_format={"type": "json_schema"}),
    completion("kv_transfer_params", kv_transfer_params={"a": 1}, wanted=_ENGINE_LIMITS),
    completion("invalid: repetition_detection", repetition_detection={"max_pattern_size": -1}),
    completion("invalid: request_id number", request_id=5),
    completion("request_id of 129 characters", request_id="x" * 129, wanted={"status": "request-id", "body": "request-id"}),
    completion("invalid: surrogate in stop", stop=["\ud800"], wanted=_UNENCODABLE),
    completion("invalid: surrogate in stop, streamed", stop=["\ud800"], stream=True, wanted=_UNENCODABLE_STREAMED),
    completion("invalid: surrogate in bad_words", bad_words=["\ud800"], wanted=_UNENCODABLE),
    completion("invalid: surrogate in vllm_xargs", vllm_xargs={"a": "\ud800"}, wanted=_UNENCODABLE),
    completion("invalid: surrogate in cache_salt", cache_salt="\ud800"),
    completion("invalid: surrogate in session_id", session_id="\ud800", wanted=_UNENCODABLE),
    completion("invalid: priority of 30 digits in the header", headers={"X-Vllm-Priority": "9" * 30}, wanted=_UNENCODABLE),
    completion("invalid: stop_token_ids of 30 digits", stop_token_ids=[10**30]),
    completion("invalid: several prompts, one bad", prompt=[[5], [99999]]),
]

CHAT = [
    chat("invalid: unknown model", model="other", wanted={"body.error.message": "unknown-model"}),
    chat("invalid: no messages", messages=None),
    chat("invalid: empty messages", messages=[]),
    chat("invalid: messages text", messages="hello"),
    chat("invalid: message without a role", messages=[{"content": "hello"}]),
    chat("invalid: role number", messages=[{"role": 5, "content": "hello"}]),
    chat("user without content", messages=[{"role": "user"}]),
    chat("invalid: content number", messages=[{"role": "user", "content": 5}]),
    chat("invalid: content part type", messages=[{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]),
    chat(
        "invalid: image for a text model",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
    ),
    chat("tool message without a call", messages=[{"role": "tool", "content": "x"}]),
    chat("invalid: max_tokens negative", max_tokens=-1),
    chat("invalid: max_completion_tokens 0", max_completion_tokens=0),
    chat("invalid: max_completion_tokens over the model", max_tokens=None, max_completion_tokens=5000),
    chat("invalid: too long", messages=[{"role": "user", "content": "hello " * 3000}]),
    chat("invalid: n 0", n=0),
    chat("invalid: huge n", n=100000, wanted=_MOST_CHOICES),
    chat("invalid: top_logprobs without logprobs", top_logprobs=2),
    chat("invalid: top_logprobs over the limit", logprobs=True, top_logprobs=21),
    chat("invalid: logprobs number", logprobs=5),
    chat("invalid: temperature", temperature=-0.5),
    chat("invalid: tools empty", tools=[]),
    chat("invalid: tools text", tools="weather"),
    chat("invalid: tool without a function", tools=[{"type": "function"}]),
    chat("invalid: tool_choice without tools", tool_choice="required"),
    chat("invalid: tool_choice of no tool", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "no_such"}}),
    chat("invalid: tool_choice word", tools=[WEATHER], tool_choice="perhaps"),
    chat("invalid: continue and generation prompt", continue_final_message=True, add_generation_prompt=True),
    chat("invalid: continue without a message", messages=ASK[:0], continue_final_message=True, add_generation_prompt=False),
    chat("invalid: template of the request", chat_template="{{ 1 }}"),
    chat("invalid: chat_template_kwargs list", chat_template_kwargs=[1]),
    chat("invalid: chat_template in kwargs", chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    chat(
        "invalid: response_format schema",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}},
    ),
    chat("invalid: response_format grammar", response_format={"type": "grammar"}),
    chat("invalid: reasoning_effort", reasoning_effort="heroic"),
    chat("invalid: stream_options without stream", stream_options={"include_usage": True}),
    chat("invalid: structured_outputs regex, streamed", structured_outputs={"regex": "[a-"}, stream=True),
    chat("audio", modalities=["audio"]),
    chat("beam search streamed", use_beam_search=True, n=2, stream=True, max_tokens=3),
    chat("invalid: surrogate in stop", stop=["\ud800"], wanted=_UNENCODABLE),
    chat(
        "invalid: response_format with an integer of 30 digits",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "maximum": 10**30}}},
        wanted=_UNENCODABLE,
    ),
    chat("invalid: more messages than a body may hold", messages=[ASK[0]] * 10_001, wanted={"body.error": "body-lists"}),
    chat("invalid: many messages that are none", messages=[{}] * 201, wanted={"body.error.message": "first-errors"}),
    chat(
        "invalid: structured_outputs of text", structured_outputs="a", wanted={"status": "wrong-type", "body.error": "wrong-type"}
    ),
    chat("functions of old", functions=[{"name": "f"}], function_call="auto"),
]

CASES = [*BYTES, *COMPLETIONS, *CHAT]
