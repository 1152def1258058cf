"""`request_of` makes the request of each row. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from serve_app.batch.rows import InputRow

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""The values of `url` that a line in the form of OpenAI's Batch API may have."""
MAX_ID_CHARS = 512
_IDS = ("custom_id", "id")


@dataclass(frozen=True)
class Defaults:
    """The defaults of rows, which a row's own values override. ``parameters`` are fields of the body."""

    model: str
    chat: bool = True
    """Whether a prompt is the user's message of a chat."""
    system: str = ""
    prompt_field: str = "prompt"
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one row, which becomes one line of the output.

    If ``body`` is None, the row is bad, and ``problem`` says why. ``model`` is "" if the row names no model. Requests with the same ``key``
    and ``digest`` are the same; the key is the row's own id, or else ``line-<number>``.
    """

    key: str
    digest: str
    path: str
    body: bytes | None
    problem: str = ""
    model: str = ""


class _WrongRow(Exception):
    """A row is bad; the exception's text is the problem."""


def request_of(row: InputRow, defaults: Defaults) -> Request:
    """Return the row's request; a bad row is no exception, but a request with a problem."""
    key = f"line-{row.number}"
    try:
        if row.value is None:
            raise _WrongRow(row.problem)
        value = {defaults.prompt_field: row.value} if isinstance(row.value, str) else dict(row.value)
        key = _own_id(value) or key
        path, body = _of_openai(value, defaults) if "body" in value or "url" in value else _of_values(value, defaults)
        if body.pop("stream", False):
            raise _WrongRow("asks for a stream; a batch answers with whole texts")
        text = _json(body)
    except _WrongRow as exc:
        return Request(key, hashlib.sha256(str(exc).encode()).hexdigest(), "", None, str(exc))
    model = body["model"] if isinstance(body["model"], str) else ""
    return Request(key, hashlib.sha256(path.encode() + b"\0" + text).hexdigest(), path, text, model=model)


def request_of_example(number: int, example: object, defaults: Defaults) -> Request:
    """Return the request of an element of a pipeline: a text, a mapping, or a list of messages, which may be dataclasses."""
    if isinstance(example, str | dict):
        return request_of(InputRow(number, example), defaults)
    if isinstance(example, list | tuple):
        messages = [asdict(m) if is_dataclass(m) and not isinstance(m, type) else m for m in example]
        return request_of(InputRow(number, {"messages": messages}), defaults)
    kind = type(example).__name__
    return request_of(InputRow(number, None, f"is of the type {kind}, not a text, mapping or list of messages"), defaults)


def _json(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, sort_keys=True, allow_nan=False).encode()
    except (ValueError, TypeError) as exc:
        raise _WrongRow(f"holds a value that JSON has no form for: {exc}") from exc


def _own_id(value: dict[str, Any]) -> str:
    for name in _IDS:
        if (own := value.pop(name, None)) is not None:
            if not isinstance(own, str | int) or len(str(own)) > MAX_ID_CHARS:
                raise _WrongRow(f"has a {name} that is not a text of at most {MAX_ID_CHARS} characters")
            if any("\ud800" <= character <= "\udfff" for character in str(own)):
                raise _WrongRow(f"has a {name} with half a surrogate pair, which has no UTF-8")
            return str(own)
    return ""


def _of_openai(value: dict[str, Any], defaults: Defaults) -> tuple[str, dict[str, Any]]:
    path, body = value.get("url"), value.get("body")
    if path not in PATHS:
        raise _WrongRow(f"has the url {path!r:.80}, none of {', '.join(PATHS)}")
    if value.get("method", "POST") != "POST":
        raise _WrongRow(f"has the method {value['method']!r:.80}, not POST")
    if not isinstance(body, dict):
        raise _WrongRow("has a body that is not an object")
    return path, {"model": defaults.model, **body}


def _of_values(value: dict[str, Any], defaults: Defaults) -> tuple[str, dict[str, Any]]:
    own = {"model": defaults.model, **defaults.parameters}
    if "messages" in value:
        return PATHS[0], {**own, **value}
    if not isinstance(prompt := value.pop(defaults.prompt_field, None), str):
        raise _WrongRow(f"has neither messages nor a text as {defaults.prompt_field!r}")
    if not defaults.chat:
        return PATHS[1], {**own, "prompt": prompt, **value}
    system = [{"role": "system", "content": defaults.system}] if defaults.system else []
    return PATHS[0], {**own, "messages": [*system, {"role": "user", "content": prompt}], **value}
