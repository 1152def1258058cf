"""This module reads the few fields of a body on which the ingress acts before vLLM sees the request: model, id, store, length. Pure."""

import contextlib
import json
import re
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from serve_app.errors import BadRequest, NotSupported

MAX_REQUEST_ID_CHARS = 128
"""The id of an attempt on a link is this id with suffixes of vLLM's and ours, together at most 256 characters (protocol/messages.py)."""

MAX_VALUES = 500_000
"""The most values between commas in a body; for a model with a long context, twice the context's tokens if that is more. 10 MB have room
for 5 million token ids, whose parsing and validation took up to 1.8 s of the event loop. A thread would hold the interpreter's lock
meanwhile."""

MAX_KEYS = 50_000
"""The most keys in a body, all objects together: 50,000 take 0.1 s of the event loop, and 10 MB have room for a million."""

_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Matches a JSON string. The quantifiers are possessive and the last quote is optional, so the time is linear in the length of the body."""

RESPONSES_STATE = "this server keeps no responses between requests"


class BodyFields(msgspec.Struct):
    """The fields may have any type: vLLM reports a wrong type, through the front end of the model that the body names.

    Numbers and truth values that vLLM reads from other types are what vLLM reads: "20" and 20.0 are 20, and "false" is False.
    """

    model: Any = None
    request_id: Any = None
    stream: Any = None
    previous_response_id: Any = None
    background: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    use_beam_search: Any = None


_decoder = msgspec.json.Decoder(BodyFields)
_NUMBER, _TRUTH = TypeAdapter(int), TypeAdapter(bool)
_KINDS: dict[str, tuple[type, TypeAdapter[Any]]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (int, _NUMBER)),
    **dict.fromkeys(("stream", "use_beam_search"), (bool, _TRUTH)),
}


def parse_fields(body: bytes) -> BodyFields | None:
    """Return the fields; None if the body is no JSON object, or if vLLM cannot parse it either."""
    if (fields := _fields_of(body)) is not None:
        for name, (kind, adapter) in _KINDS.items():
            if (value := getattr(fields, name)) is not None and type(value) is not kind:
                with contextlib.suppress(ValidationError):  # vLLM refuses the value
                    setattr(fields, name, adapter.validate_python(value))
    return fields


def _fields_of(body: bytes) -> BodyFields | None:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # RecursionError: a body of 2000 brackets
        pass
    try:
        values = json.loads(body)  # vLLM's parser is slower, and also accepts NaN, lone surrogates and a byte order mark
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    return BodyFields(**{name: values[name] for name in BodyFields.__struct_fields__ if name in values})


def check_num_values(body: bytes, max_model_len: int) -> None:
    """Refuse a body that would take long to parse, by counting commas and colons: 2 ms for 10 MB, 0.1 s where the texts contain many.

    Args:
        body: JSON, not parsed yet.
        max_model_len: The longest context of all models.
    Raises:
        BadRequest: The body holds more values than any prompt needs.
    """
    # vLLM's parser also takes UTF-16 and UTF-32, in whose bytes an escaped quote looks like the end of a text.
    if (encoding := json.detect_encoding(body)) not in ("utf-8", "utf-8-sig"):
        body = body.decode(encoding, "replace").encode("utf-8", "replace")
    limits = {b",": ("values", max(MAX_VALUES, 2 * max_model_len)), b":": ("keys", MAX_KEYS)}
    if all(body.count(mark) <= limit for mark, (_, limit) in limits.items()):
        return
    if (num := body.count(b'":') - body.count(b'\\":')) > MAX_KEYS:  # without blanks before the colons, as most clients write
        raise BadRequest(param="body", problem=f"holds {num} keys, limit {MAX_KEYS}; divide it")
    num_texts = (body.count(b'"') - body.count(b'\\"')) // 2  # approximately; few texts keep the search below fast
    bare = body if num_texts > limits[b","][1] else _TEXTS.sub(b"", body)
    for mark, (what, limit) in limits.items():
        if (num := bare.count(mark)) > limit:
            raise BadRequest(param="body", problem=f"holds {num} {what}, limit {limit}; divide it")


def refuse_stored_responses(fields: BodyFields) -> None:
    """Refuse a request that needs a store. Values of every type count, because vLLM reads "yes" and 1 as true.

    Raises:
        NotSupported: The body has a field of the Responses API that needs a store.
    """
    if fields.previous_response_id is not None:
        raise NotSupported(feature="previous_response_id", hint=f"{RESPONSES_STATE}; send the whole input")
    if fields.background is not None and fields.background is not False:
        raise NotSupported(feature="background", hint=f"{RESPONSES_STATE}; leave it out and stream")


def check_request_id(param: str, value: Any) -> None:
    """Check the client's id of a request. vLLM makes it part of its own id, which goes into logs and headers and over the links.

    Args:
        param: Where the id was: "request_id" in the body, "X-Request-Id" in the head.
        value: The id. A value that is no text is left to vLLM's validation.
    Raises:
        BadRequest: The id is too long, or has characters that cannot be printed.
    """
    if not isinstance(value, str):
        return
    if len(value) > MAX_REQUEST_ID_CHARS:
        raise BadRequest(param=param, problem=f"has {len(value)} characters, limit {MAX_REQUEST_ID_CHARS}")
    if not value.isprintable():
        raise BadRequest(param=param, problem="has characters that cannot be printed")
