"""This module makes requests from docs/openapi.json with schemathesis: the same ones for the same seed and version.

Half of the requests follow the description, and half break it. A request that follows it names a served model and asks for few tokens,
so that it passes the checks at the door and reaches an engine.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tools.openapi import PAGE

KINDS = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
MAX_TOKENS = 4
MAX_GETS = 4
"""Requests of each kind to a route that takes nothing but a name."""
_LENGTHS = {"array": ("maxItems", 3), "string": ("maxLength", 40)}
_CONSTRAINED = {"enum", "const", "format", "pattern"}
_CHAT = [{"role": "user", "content": "hi"}]
PLAIN: Mapping[str, dict[str, Any]] = {
    "/generate": {"prompt": "hi", "max_tokens": MAX_TOKENS},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/chat/completions": {"messages": _CHAT, "max_completion_tokens": MAX_TOKENS},
    "/v1/chat/completions/batch": {"messages": [_CHAT], "max_completion_tokens": MAX_TOKENS},
    "/v1/completions": {"prompt": "hi", "max_tokens": MAX_TOKENS},
    "/v1/messages": {"messages": _CHAT, "max_tokens": MAX_TOKENS},
    "/v1/messages/count_tokens": {"messages": _CHAT},
    "/v1/responses": {"input": "hi", "max_output_tokens": MAX_TOKENS},
}
"""Fields with which a request to the route is answered."""
FEW = 3
"""Fields that every second request that follows the description adds to the plain ones. Among many random fields, one is refused."""


@dataclass(frozen=True)
class Request:
    """One request. ``follows`` is true if it follows the description."""

    name: str
    method: str
    path: str
    content_type: str
    body: bytes
    follows: bool


def described(count: int, *, model: str, vectors: str = "", without: Collection[str] = ()) -> list[Request]:
    """Return ``count`` requests to all routes of the description in turn.

    Args:
        count: How many requests. Too few do not reach every route.
        model: The model that requests name if they follow the description.
        vectors: The model that they name on the routes for vectors and scores. By default it is the same one.
        without: Fields of a body that are left out.
    """
    loaded: list[Any] = list(schemathesis.openapi.from_dict(_narrowed()).get_all_operations())
    operations = [result.ok() for result in loaded]
    per_kind = 1 + count // (2 * sum(operation.method == "post" for operation in operations))
    made: list[list[Request]] = []
    for operation in operations:
        num = per_kind if operation.method == "post" else MAX_GETS
        named = model if operation.path in PLAIN else vectors or model
        made += [list(_requests(operation, mode, num, named, frozenset(without))) for mode in KINDS]
    return list(islice((request for row in zip_longest(*made) for request in row if request is not None), count))


def _narrowed() -> dict[str, Any]:
    """Return the description with short lists and texts and without unknown fields, which take 9 of 10 s of the generation."""
    description: dict[str, Any] = json.loads(PAGE.read_text())
    waiting: list[Any] = [description]
    while waiting:
        part = waiting.pop()
        waiting += [each for each in (part.values() if isinstance(part, dict) else part) if isinstance(each, dict | list)]
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            continue
        if kind == "object" and "properties" in part:
            part["additionalProperties"] = False
        elif kind in _LENGTHS and not _CONSTRAINED & part.keys():
            part.setdefault(*_LENGTHS[kind])
    return description


def _requests(operation: Any, mode: GenerationMode, count: int, model: str, without: Collection[str]) -> Iterator[Request]:
    cases: list[Any] = []

    @seed(f"40 {operation.label}")  # else routes with the same schema would get the same requests
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        cases.append(case)

    try:
        collect()
    except Unsatisfiable:  # nothing in the request could be wrong
        return
    for number, case in enumerate(cases):
        follows = mode is GenerationMode.POSITIVE
        prepared = requests.Request(**case.as_transport_kwargs(base_url="http://ingress")).prepare()
        body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body or b""
        yield Request(
            name=f"{operation.label} {mode.name.lower()} {number}",
            method=str(prepared.method),
            path=prepared.path_url,
            content_type=prepared.headers.get("content-type", ""),
            body=_changed(body, operation.path, number, {"model": model} if follows else {}, without),
            follows=follows,
        )


def _changed(body: bytes, path: str, number: int, fixed: dict[str, Any], without: Collection[str]) -> bytes:
    """Return the body without certain fields. If any fields are ``fixed``, these and the number of tokens are set.

    Every second of these bodies, by their ``number``, has the plain fields and a few of its own.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return body
    if not isinstance(fields, dict):
        return body
    plain = PLAIN.get(path, {})
    if fixed and plain and number % 2:
        fields = dict([item for item in fields.items() if item[0] not in plain][:FEW]) | plain
    elif fixed:
        fields |= {name: value for name, value in plain.items() if value == MAX_TOKENS}
    return json.dumps({name: value for name, value in (fields | fixed).items() if name not in without}).encode()
