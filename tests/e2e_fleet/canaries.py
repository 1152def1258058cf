"""This module makes requests whose every text is a canary string, and searches files and answers for canaries.

A canary string is text that is in one place of one request and nowhere else. Where the string is found later shows what the fleet has
written down.
"""

import itertools
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e_fleet.operations import MODEL

CONTEXT_BYTES = 160
CHATS = "/v1/chat/completions/batch"
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate", "/tokenize", "/v1/embeddings")
MAX_MODEL_LEN = 2048


@dataclass
class Canaries:
    """``mark`` begins each canary of one test; ``places`` says where a canary was put; ``texts`` are texts that engines made."""

    mark: str = field(default_factory=lambda: f"canary{secrets.token_hex(4)}n")
    places: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def new(self, place: str) -> str:
        canary = f"{self.mark}{len(self.places):04}"
        self.places[canary] = place
        return canary

    def note_answer(self, place: str, text: str) -> None:
        """Note the longest plain part of an answer's text, if it is long enough to be found nowhere by chance."""
        longest = max(re.findall(r"[A-Za-z0-9 ]+", text), key=len, default="")
        if len(longest) >= 16:
            self.texts[longest[:32]] = f"the answer of {place}"

    def in_text(self, text: str) -> set[str]:
        """Return the canaries in a text."""
        return set(re.findall(rf"{self.mark}\d{{4}}", text))

    def in_files(self, folders: Iterable[Path]) -> list[str]:
        """Return, in words, each canary in a file below these folders."""
        return [found for path in files_below(folders) for found in self.in_bytes(path.read_bytes(), str(path))]

    def in_bytes(self, data: bytes, where: str) -> list[str]:
        found: dict[str, bytes] = {}
        for needle in (self.mark, *self.texts):
            for hit in re.finditer(re.escape(needle.encode()), data):
                name = data[hit.start() : hit.start() + len(self.mark) + 4].decode(errors="replace")
                around = data[max(0, hit.start() - CONTEXT_BYTES) : hit.end() + 20]
                found.setdefault(self.texts.get(needle) or self.places.get(name, name), around)
        return [f"{place}, in {where}: {around!r}" for place, around in found.items()]


def files_below(folders: Iterable[Path]) -> Iterator[Path]:
    for path in itertools.chain.from_iterable(folder.rglob("*") for folder in folders):
        if path.is_file() and not path.is_symlink():
            yield path


@dataclass(frozen=True)
class Request:
    """One HTTP request. ``content`` replaces ``body``."""

    name: str
    path: str
    body: Any = None
    content: bytes | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def good(canaries: Canaries) -> Iterator[Request]:
    """Yield a request for each route that the fleet serves, with a canary in each field that may have text."""
    new = canaries.new
    form = {"type": "json_schema", "json_schema": {"name": new("schema name"), "schema": schema(canaries)}}
    message = {"max_tokens": 4, "system": new("system"), "messages": said(new("message"))}
    prompts = [new("first prompt"), new("second prompt")]
    bodies = {
        "completion": ("/v1/completions", completion(canaries, "completion")),
        "two prompts": ("/v1/completions", completion(canaries, "two prompts", prompt=prompts, n=2)),
        "echo": ("/v1/completions", completion(canaries, "echo", echo=True, logprobs=1)),
        "chat": ("/v1/chat/completions", chat(canaries, "chat")),
        "tools": ("/v1/chat/completions", chat(canaries, "tools", **tools(canaries))),
        "schema": ("/v1/chat/completions", chat(canaries, "schema", response_format=form)),
        "chats": (CHATS, {"max_tokens": 4, "messages": [said(new("chat of a list"))]}),
        "responses": ("/v1/responses", {"input": new("input"), "instructions": new("instructions"), "max_output_tokens": 4}),
        "messages": ("/v1/messages", message),
        "count_tokens": ("/v1/messages/count_tokens", message),
        "tokenize": ("/tokenize", {"prompt": new("tokenized text")}),
        "generate": ("/generate", {"prompt": new("prompt of /generate"), "max_tokens": 4, "stop": [new("stop of /generate")]}),
        "beams": ("/generate", {"prompt": new("prompt of beams"), "max_tokens": 4, "n": 2, "use_beam_search": True}),
    }
    for name, (path, body) in bodies.items():
        yield Request(name, path, {"model": MODEL, **body})


def refused(canaries: Canaries) -> Iterator[Request]:
    """Yield requests that are refused, or that may be, for what a canary is part of."""
    yield from _wrong_values(canaries)
    yield from _wrong_bodies(canaries)
    yield from _wrong_heads(canaries)


def _wrong_values(canaries: Canaries) -> Iterator[Request]:
    new = canaries.new
    for what, fields in _wrong_fields(canaries).items():
        yield Request(f"completion: {what}", "/v1/completions", completion(canaries, what) | fields)
    for what, fields in _wrong_fields(canaries).items():
        yield Request(f"chat: {what}", "/v1/chat/completions", chat(canaries, what) | fields)
    for what, fields in _wrong_fields(canaries).items():
        yield Request(f"generate: {what}", "/generate", {"model": MODEL, "prompt": new("prompt"), "max_tokens": 2} | fields)
    for what, fields in _wrong_fields(canaries).items():
        yield Request(
            f"responses: {what}", "/v1/responses", {"model": MODEL, "input": new("input"), "max_output_tokens": 2} | fields
        )


def _wrong_fields(canaries: Canaries) -> dict[str, dict[str, Any]]:
    """Return fields with a mistake each. Some routes do not have some of them, and others take them as they are."""
    new = canaries.new
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{" + new("broken arguments")}}
    grammars = {
        "regex": f"({new('regex')}",
        "grammar": f"root ::= {new('grammar')} (((",
        "json": {"type": new("schema type")},
        "choice": [new("choice"), 5],
    }
    return {
        **{f"a wrong {kind}": {"structured_outputs": {kind: grammar}} for kind, grammar in grammars.items()},
        "a schema that is no JSON": {"structured_outputs": {"json": "{" + new("schema text")}},
        "a text as max_tokens": {"max_tokens": new("max_tokens")},
        "a text as temperature": {"temperature": new("temperature")},
        "a text as priority": {"priority": new("priority")},
        "an object as stop": {"stop": {new("stop's key"): 1}},
        "a text as token id": {"logit_bias": {new("bias"): 1.0}},
        "a list as cache_salt": {"cache_salt": [new("wrong salt")]},
        "an empty cache_salt": {"cache_salt": "", "user": new("user")},
        "kv_transfer_params": {"kv_transfer_params": {new("kv key"): new("kv value")}},
        "vllm_xargs": {"vllm_xargs": {new("xargs key"): new("xargs value")}},
        "long bad_words": {"bad_words": [new("bad word") * 2000]},
        "an unknown model": {"model": new("model")},
        "an object as role and prompt": {
            "messages": said(new("content"), role={"a": new("role")}),
            "prompt": {"a": new("prompt")},
        },
        "too long": {
            "prompt": long(new("long prompt")),
            "messages": said(long(new("long chat"))),
            "input": long(new("long input")),
        },
        "an unknown format": {"response_format": {"type": new("format")}},
        "a template": {"chat_template": "{{ " + new("template") + " | nofilter }}"},
        "template arguments": {"chat_template_kwargs": {new("template key"): new("value"), "messages": new("template messages")}},
        "an object as a tool's name": {"tools": [{"type": "function", "function": {"name": {"a": new("wrong tool")}}}]},
        "an unknown tool": {**tools(canaries), "tool_choice": {"type": "function", "function": {"name": new("tool choice")}}},
        "broken arguments of a tool": {"messages": [{"role": "assistant", "tool_calls": [call]}]},
        "an image by URL": {"messages": said([image(f"http://{new('host')}.invalid/a.png")])},
        "an image as data": {"messages": said([image(f"data:image/png;base64,{new('image data')}")])},
        "a surrogate": {"prompt": new("surrogate") + "\ud800", "messages": said(new("surrogate") + "\ud800")},
    }


def _wrong_bodies(canaries: Canaries) -> Iterator[Request]:
    new = canaries.new
    for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", CHATS):
        names = ("input", "prompt", "messages", "tokens", "max_tokens", "system")
        yield Request(f"{path}: wrong types", path, {"model": MODEL, **{name: {"a": new(name)} for name in names}})
        texts = {"input": long(new("input")), "prompt": long(new("prompt")), "messages": said(long(new("chat")))}
        yield Request(f"{path}: too long", path, {"model": MODEL, "max_tokens": 1, **texts})
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/rerank"):
        texts = {"input": new("input"), "query": new("query"), "documents": [new("document")]}
        yield Request(f"{path}: not of this model", path, {"model": MODEL, **texts})
    for path in ROUTES:
        yield Request(f"{path}: no JSON", path, content=b'{"model": "tiny", "prompt": "%b' % new("broken JSON").encode())
        yield Request(f"{path}: no object", path, content=b'["%b"]' % new("a list").encode())
        yield Request(f"{path}: deep", path, content=b'{"prompt": "%b", "a": %b' % (new("deep").encode(), b"[" * 3000))
        yield Request(f"{path}: not UTF-8", path, content=b'{"model": "tiny", "prompt": "%b\xff"}' % new("no UTF-8").encode())


def _wrong_heads(canaries: Canaries) -> Iterator[Request]:
    new = canaries.new
    for path in ROUTES:
        for headers in (
            {"authorization": f"Bearer {new('wrong key')}"},
            {"authorization": "", "x-api-key": new("wrong x-api-key")},
        ):
            yield Request(f"{path}: wrong key", path, completion(canaries, "wrong key"), headers=headers)
    yield Request("a path", f"/v1/{new('path')}", {})
    yield Request("a query", f"/v1/completions?api_key={new('query')}", completion(canaries, "query"))
    for path in ("/v1/models/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/responses/{}"):
        yield Request(f"GET {path}", path.format(new(f"path below {path}")), method="GET")
    headers = {
        name: new(name) for name in ("traceparent", "idempotency-key", "cookie", "user-agent", "origin", "x-forwarded-for")
    }
    yield Request("headers", "/v1/completions", completion(canaries, "headers"), headers=headers)


def said(content: Any, role: Any = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def long(canary: str) -> str:
    """Return a text with more tokens than the model takes."""
    return f"{canary} " * MAX_MODEL_LEN


def completion(canaries: Canaries, name: str, **fields: Any) -> dict[str, Any]:
    """Return a completion with canaries in the fields of texts that engines get, too."""
    texts = {key: canaries.new(f"{key} of {name}") for key in ("prompt", "user", "cache_salt")}
    lists = {key: [canaries.new(f"{key} of {name}")] for key in ("stop", "bad_words")}
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, **texts, **lists, **fields}


def chat(canaries: Canaries, name: str, **fields: Any) -> dict[str, Any]:
    body = completion(canaries, name)
    body["messages"] = [
        {"role": "system", "content": canaries.new(f"system of {name}")},
        {"role": "user", "content": body.pop("prompt")},
    ]
    return {**body, "metadata": {"a": canaries.new(f"metadata of {name}")}, **fields}


def schema(canaries: Canaries) -> dict[str, Any]:
    return {
        "type": "object",
        "description": canaries.new("schema description"),
        "properties": {canaries.new("property"): {"enum": [canaries.new("enum")]}},
    }


def tools(canaries: Canaries) -> dict[str, Any]:
    """Return the fields of a chat that has a tool, an earlier call of the tool and its result."""
    function = {
        "name": canaries.new("tool's name"),
        "description": canaries.new("tool's description"),
        "parameters": schema(canaries),
    }
    call = {
        "id": canaries.new("call's id"),
        "type": "function",
        "function": {"name": "f", "arguments": f'{{"a": "{canaries.new("arguments")}"}}'},
    }
    messages = [
        {"role": "user", "content": canaries.new("chat with a tool")},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": canaries.new("tool's result")},
    ]
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "messages": messages}
