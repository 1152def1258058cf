"""This module sends a request of the differential suite, keeps a server's answer, and finds differences between two answers.

An answer becomes one tree of plain data. What may differ between two runs of the same server is masked: ids, times, how many
prompt tokens were cached, and where a stream was cut into chunks (a slow reader gets several tokens in one).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = Any
"""A value that ``json.loads`` returns."""

MASKED_DIFFERENCES = frozenset({"fingerprint", "prefix-cache"})
"""Rows of docs/differences.md that `mask` hides in every answer."""

_HEX_ID = re.compile(r"[0-9a-f]{16,}")
_MASKED = {
    # Name of a field anywhere in an answer -> what is put in its place when it is not null.
    "created": "time",
    "created_at": "time",
    "completed_at": "time",
    "cached_tokens": "cached",
    "cache_write_tokens": "cached",
    "system_fingerprint": "fingerprint",
}
_GROWING = frozenset({"text", "content", "arguments", "reasoning", "refusal"})
_TOLERANCE = 1e-4
_FORBIDDEN = -9999.0  # vLLM's JSON for minus infinity
"""Tolerance of log probabilities, in nats: float32 sums depend on the batch in their last digits. Tokens never did."""


@dataclass(frozen=True)
class Case:
    """A request. ``wanted`` says where its answers differ on purpose: part of the tree -> id of a row in docs/differences.md."""

    name: str
    path: str
    body: Json | bytes = None
    """Sent as JSON; bytes as they are."""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    sampled: bool = False
    """Drawn without a seed: only the structure is compared."""
    alone: bool = False
    """Sent while nothing else runs: other requests of the batch would change vLLM's answer."""
    by_chunk: bool = False
    """A stream whose chunks do not depend on time: compared one by one."""
    with_headers: bool = False
    wanted: Mapping[str, str] = field(default_factory=dict)


def is_error(tree: Json) -> bool:
    """Return whether the answer refuses: by its status, or by an event of a stream that had begun."""
    events = tree.get("events")
    rest = events["rest"] if isinstance(events, dict) else []
    return tree["status"] >= 400 or any(isinstance(event, dict) and "error" in event for event in rest)


async def ask(client: httpx.AsyncClient, case: Case) -> Json:
    """Send the request and return the answer's tree."""
    headers = dict(case.headers)
    content = case.body
    if content is not None and not isinstance(content, bytes):
        content = json.dumps(content).encode()
        headers.setdefault("content-type", "application/json")
    response = await client.request(case.method, case.path, content=content, headers=headers)
    return tree_of(response, case)


def tree_of(response: httpx.Response, case: Case) -> Json:
    """Return status, content type and body; a stream folded as its kind allows."""
    kind = response.headers.get("content-type", "")
    tree: dict[str, Json] = {"status": response.status_code, "type": kind}
    if case.with_headers:
        tree["headers"] = dict.fromkeys(response.headers, "")
    if kind.startswith("text/event-stream"):
        events = parse_events(response.text)
        tree["events"] = events if case.by_chunk else fold(events)
    elif kind.startswith("application/json") and response.content:
        tree["body"] = response.json()
    else:
        tree["body"] = response.text
    masked = mask(tree)
    return structure(masked) if case.sampled else masked


def parse_events(text: str) -> list[Json]:
    """Return each SSE event as [name, data], data decoded where it is JSON."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):  # a comment: how long a stream was silent depends on the machine
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append([fields.get("event", ""), json.loads(data) if data.startswith("{") else data])
    return events


def fold(events: list[Json]) -> Json:
    """Return what a reader knows in the end, whatever the chunks were."""
    return _fold_typed(events) if any(name for name, _ in events) else _fold_choices(events)


def _fold_choices(events: list[Json]) -> Json:
    """Completions and chat: per choice the deltas put together, the last usage, and which keys chunks had."""
    folded: dict[str, Json] = {"choices": {}, "usage": None, "keys": set(), "usage_everywhere": True, "rest": []}
    for _, chunk in events:
        if not isinstance(chunk, dict) or "choices" not in chunk:
            folded["rest"].append(chunk)  # [DONE] or an error
            continue
        folded["keys"] |= set(chunk)
        folded["usage"] = chunk.get("usage") or folded["usage"]
        folded["usage_everywhere"] &= chunk.get("usage") is not None
        for name in ("prompt_token_ids", "system_fingerprint", "prompt_text"):
            folded[name] = folded.get(name) or chunk.get(name)
        for choice in chunk["choices"]:
            assert folded["choices"].get(choice["index"], {}).get("finish_reason") is None, "a chunk after the last one"
            _merge(folded["choices"].setdefault(choice["index"], {}), choice)
    return {**folded, "keys": sorted(folded["keys"])}


def _merge(into: dict[str, Json], delta: Mapping[str, Json]) -> None:
    """Add a delta as OpenAI clients do: texts and lists grow, tool calls by their index, of the rest the last non-null counts."""
    for key, value in delta.items():
        old = into.get(key)
        if key == "tool_calls" and value:
            calls = into[key] = old or {}
            for call in value:
                _merge(calls.setdefault(call["index"], {}), call)
        elif old is None:
            into[key] = _merged({}, value) if isinstance(value, dict) else value
        elif isinstance(value, dict):
            _merge(old, value)
        elif isinstance(value, list) or (isinstance(value, str) and key in _GROWING):
            into[key] = old + value
        elif value is not None:
            into[key] = value


def _merged(into: dict[str, Json], delta: Mapping[str, Json]) -> dict[str, Json]:
    _merge(into, delta)
    return into


def _fold_typed(events: list[Json]) -> Json:
    """Responses and Messages: the sequence of event types with runs of deltas put together; positions in the stream are left out."""
    folded: list[Json] = []
    for name, data in events:
        plain = {k: v for k, v in data.items() if k != "sequence_number"} if isinstance(data, dict) else data
        if name.endswith((".delta", "content_block_delta")) and folded and folded[-1][0] == name:
            into = folded[-1][1]
            _add_delta(into, plain["delta"])
            if into.get("logprobs"):
                into["logprobs"] += plain["logprobs"]
        else:
            folded.append([name, plain])
    return folded


def _add_delta(into: dict[str, Json], delta: Json) -> None:
    """Add a delta of Responses, which is a text, or one of Messages, which has a type and a text."""
    if isinstance(delta, str):
        into["delta"] += delta
        return
    for name, value in delta.items():
        into["delta"][name] = value if name == "type" else into["delta"].get(name, "") + value


def mask(tree: Json) -> Json:
    """Return the tree without ids, times, counts of cached tokens and top tokens that a grammar forbids. Keys become strings.

    Of the forbidden tokens, all of which have one log probability, any may be at the end of a list of top tokens.
    """
    if isinstance(tree, dict):
        return {str(k): _masked_field(str(k), v) for k, v in tree.items() if v != _FORBIDDEN}
    if isinstance(tree, list):
        return [mask(item) for item in tree if not (isinstance(item, dict) and item.get("logprob") == _FORBIDDEN)]
    return _HEX_ID.sub("<id>", tree) if isinstance(tree, str) else tree


def _masked_field(key: str, value: Json) -> Json:
    if key in _MASKED and value is not None:
        return f"<{_MASKED[key]}>"
    return mask(value)


def structure(tree: Json) -> Json:
    """Return the tree with the type in place of each value but the status; a list as the kinds of its items."""
    if isinstance(tree, dict):
        return {k: v if k == "status" else structure(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return sorted({json.dumps(structure(item), sort_keys=True) for item in tree})
    return type(tree).__name__


def differences(bare: Json, fleet: Json, path: str = "") -> dict[str, tuple[Json, Json]]:
    """Return the differences of the trees: dotted path -> (bare, fleet). A value that only one side has is None on the other."""
    if isinstance(bare, dict) and isinstance(fleet, dict):
        keys: Iterable[Any] = [*bare, *(k for k in fleet if k not in bare)]
        pairs = [(k, bare.get(k), fleet.get(k)) for k in keys]
        missing = {_join(path, k): (bare.get(k), fleet.get(k)) for k in keys if (k in bare) != (k in fleet)}
    elif isinstance(bare, list) and isinstance(fleet, list) and len(bare) == len(fleet):
        pairs = [(i, *both) for i, both in enumerate(zip(bare, fleet, strict=True))]
        missing = {}
    else:
        return {} if _equal(bare, fleet) else {path: (bare, fleet)}
    found = dict(missing)
    for key, left, right in pairs:
        if _join(path, key) not in missing:
            found.update(differences(left, right, _join(path, key)))
    return found


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _equal(bare: Json, fleet: Json) -> bool:
    if isinstance(bare, float) and isinstance(fleet, float):
        return math.isclose(bare, fleet, rel_tol=0, abs_tol=_TOLERANCE)
    return type(bare) is type(fleet) and bool(bare == fleet)
