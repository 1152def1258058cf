"""What a request says that decides before vLLM sees it: its model, whether it needs a store, its own id. Pure."""

import json
from typing import Any

import msgspec

from serve_app.errors import BadRequest, NotSupported

MAX_REQUEST_ID_CHARS = 128
"""An attempt's id on a link is the request's with suffixes of vLLM's and ours, together at most 256 (protocol/messages.py)."""

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
