"""What a request says that decides before vLLM sees it: its model, whether it needs a store, its own id. Pure."""

import json
import re
from typing import Any

import msgspec

from serve_app.errors import BadRequest, NotSupported

MAX_REQUEST_ID_CHARS = 128
"""An attempt's id on a link is the request's with suffixes of vLLM's and ours, together at most 256 (protocol/messages.py)."""

MAX_VALUES = 500_000
"""Values between commas that a body may hold; of a model with a longer context, twice as many as that has tokens. Parsing and validation of
5 million token ids, which 10 MB have room for, took up to 1.8 s of the event loop, and a thread would hold the interpreter's lock."""

_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Possessive, and without need for the last quote, so that no body takes longer than its length."""

RESPONSES_STATE = "this server keeps no responses between requests"


class BodyFields(msgspec.Struct):
    """Of any type: a wrong one is vLLM's to report, by the front end of the model that is asked for."""

    model: Any = None
    request_id: Any = None
    stream: Any = None
    previous_response_id: Any = None
    background: Any = None


_decoder = msgspec.json.Decoder(BodyFields)


def parse_fields(body: bytes) -> BodyFields | None:
    """Return the fields; None for what vLLM cannot parse either, or is no object."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last by a body of 2000 brackets
        pass
    try:
        values = json.loads(body)  # vLLM's parser, slower: it also takes NaN, lone surrogates and a byte order mark
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    return BodyFields(**{name: values[name] for name in BodyFields.__struct_fields__ if name in values})


def check_num_values(body: bytes, max_model_len: int) -> None:
    """Refuse what would take long to parse, by a look at its commas that takes 1 ms for 10 MB, and 0.1 s where texts have many.

    Args:
        body: JSON, not parsed yet.
        max_model_len: The longest context of all models.
    Raises:
        BadRequest: The body holds more values than any prompt needs.
    """
    limit = max(MAX_VALUES, 2 * max_model_len)
    if body.count(b",") <= limit:
        return
    num = (body.count(b'"') - body.count(b'\\"')) // 2  # about as many texts, so that the search below never finds many
    if num <= limit:
        num = _TEXTS.sub(b"", body).count(b",")
    if num > limit:
        raise BadRequest(param="body", problem=f"holds {num} values, limit {limit}; divide it")


def refuse_stored_responses(fields: BodyFields) -> None:
    """Refuse what needs a store, of whatever type: vLLM reads "yes" and 1 as true.

    Raises:
        NotSupported: A field of the Responses API that needs a store.
    """
    if fields.previous_response_id is not None:
        raise NotSupported(feature="previous_response_id", hint=f"{RESPONSES_STATE}; send the whole input")
    if fields.background is not None and fields.background is not False:
        raise NotSupported(feature="background", hint=f"{RESPONSES_STATE}; leave it out and stream")


def check_request_id(param: str, value: Any) -> None:
    """vLLM makes the client's id part of its own, and that goes into logs, headers and over the links.

    Args:
        param: Where it was: "request_id" in the body, "X-Request-Id" in the head.
        value: What is no text is left to vLLM's validation.
    Raises:
        BadRequest: It is too long, or has characters that cannot be printed.
    """
    if not isinstance(value, str):
        return
    if len(value) > MAX_REQUEST_ID_CHARS:
        raise BadRequest(param=param, problem=f"has {len(value)} characters, limit {MAX_REQUEST_ID_CHARS}")
    if not value.isprintable():
        raise BadRequest(param=param, problem="has characters that cannot be printed")
