"""This module parses and checks the body of `POST /generate`: its parameters, and which of them may be combined. Pure.

The parameters are the fields of vLLM's SamplingParams, so a field that a newer vLLM adds is accepted here, too.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from vllm import envs
from vllm.sampling_params import SamplingParams

from serve_app.core.request_limits import INT64
from serve_app.errors import BadRequest
from serve_app.ingress.http.first_errors import MAX_GRAMMAR_CHARS, MAX_LENGTH_PENALTY, grammar_chars, json_validator

# The route sets these itself; other values would not give an answer that consists of text.
_RESERVED = frozenset({"output_kind", "skip_clone", "output_text_buffer_length", "detokenize", "skip_reading_prefix_cache"})
_USED_BY_BEAM_SEARCH = frozenset({"n", "max_tokens", "temperature", "ignore_eos", "skip_special_tokens"})

MAX_COLONS = 1000
"""A body with more colons than this is searched for an unknown field before pydantic validates it. Pydantic makes an error for each unknown
field, and 490,000 of them took 2 s of the event loop and 400 MB."""

_MAX_NAME_CHARS = 64
"""The part of an unknown field's name that the error quotes. The search for a similar name takes longer for a longer one."""

_SAMPLING_DEFAULTS: Mapping[str, Any] = {
    item.name: item.default
    for item in msgspec.structs.fields(SamplingParams)
    if not item.name.startswith("_") and item.name not in _RESERVED
}


class GenerateRequest(BaseModel):
    """The body of a request without the sampling parameters that only vLLM reads, which `_Body` adds."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """A text, or token ids."""
    model: str | None = None
    stream: bool = False
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=16, ge=1)
    """The most tokens of the answer; None for as many as the context has room for."""
    temperature: float = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    best_of: int | None = Field(default=None, ge=1)
    """The beam width; None for n."""
    length_penalty: float = Field(default=1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    """The exponent of a beam's length."""
    early_stopping: bool | Literal["never"] = False

    @property
    def width(self) -> int:
        return self.best_of or self.n

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters the client has set."""
        return {name: getattr(self, name) for name in self.model_fields_set if name in _SAMPLING_DEFAULTS}


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_MORE_FIELDS: dict[str, Any] = {
    name: (_HINTS[name], default) for name, default in _SAMPLING_DEFAULTS.items() if name not in GenerateRequest.model_fields
}
_Body = create_model("_Body", __base__=GenerateRequest, **_MORE_FIELDS)
_BODIES = json_validator(_Body)
_NAMES = msgspec.json.Decoder(
    msgspec.defstruct("_Names", [(name, msgspec.Raw, msgspec.Raw()) for name in _Body.model_fields], forbid_unknown_fields=True)
)
"""A decoder that parses no values, and stops at the first field that has none of these names."""
_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
"""The error of that decoder."""


def parse_body(raw: bytes, *, max_width: int) -> GenerateRequest:
    """Parse and check a body. The engine later checks values against its vocabulary and context length.

    Args:
        raw: JSON.
        max_width: Widest beam search allowed.
    Raises:
        BadRequest: The value of a parameter cannot be served, or cannot be combined with another.
        VLLMClientError: A validator of vLLM refuses a value.
    """
    if raw.count(b":") > MAX_COLONS and (unknown := _unknown_field(raw)) is not None:
        raise _unknown(unknown)
    try:
        body: GenerateRequest = _BODIES.validate_json(raw)
    except ValidationError as exc:
        raise _bad_request(exc) from exc
    for name, value in body:
        if isinstance(value, int) and value not in INT64:
            raise BadRequest(name, f"{value} does not fit into 64 bits")
    if (num_chars := grammar_chars(getattr(body, "structured_outputs", None))) > MAX_GRAMMAR_CHARS:
        raise BadRequest("structured_outputs", f"has {num_chars} characters, limit {MAX_GRAMMAR_CHARS}; send a smaller schema")
    if body.use_beam_search:
        _check_beam_search(body, max_width)
    else:
        _check_sampling(body)
    return body


def _check_sampling(body: GenerateRequest) -> None:
    for name in ("best_of", "length_penalty", "early_stopping"):
        value, default = getattr(body, name), GenerateRequest.model_fields[name].default
        if value != default and not (name == "best_of" and value == body.n):
            raise BadRequest(name, f"{value!r} is for beam search only; set use_beam_search or leave {name} out")
    if body.n > (limit := envs.VLLM_MAX_N_SEQUENCES):
        raise BadRequest("n", f"{body.n} answers, but the limit is {limit}; lower n")
    if body.n > 1 and body.temperature < 1e-5:
        problem = f"{body.n} answers at temperature {body.temperature:g} would all be the same"
        raise BadRequest("n", f"{problem}; raise temperature or set use_beam_search")


def _check_beam_search(body: GenerateRequest, max_width: int) -> None:
    if body.n > body.width:
        raise BadRequest("n", f"{body.n} answers, but best_of={body.width} beams; raise best_of or lower n")
    if body.width > max_width:
        name = "n" if body.best_of is None else "best_of"
        limit = f"the limit is {max_width} beams, half the engine's max_logprobs"
        raise BadRequest(name, f"{body.width} beams, but {limit}; lower {name} or raise max_logprobs")
    for name, value in body.sampling().items():
        neutral = (0, -1) if name == "top_k" else (_SAMPLING_DEFAULTS[name],)
        if name not in _USED_BY_BEAM_SEARCH and value not in neutral:
            raise BadRequest(name, f"{reprlib.repr(value)} would have no effect on a beam search; leave {name} out")


def _bad_request(error: ValidationError) -> BadRequest:
    errors = error.errors(include_url=False)
    first = errors[0]
    name = str(first["loc"][0]) if first["loc"] else "body"
    if first["type"] == "missing":
        return BadRequest(name, "is missing; it is the only parameter without a default")
    if first["type"] == "extra_forbidden":
        return _unknown(name)
    if name == "prompt":
        problem = "must be a text or a list of token ids, and not empty"
        return BadRequest(name, f"{problem}; got {reprlib.repr(first['input'])}")
    # Pydantic has one error for each type of a union: the client gets all of them.
    messages = dict.fromkeys(item["msg"] for item in errors if item["loc"][:1] == first["loc"][:1])
    return BadRequest(name, f"{' or '.join(messages)}; got {reprlib.repr(first['input'])}")


def _unknown_field(raw: bytes) -> str | None:
    """Return the name of an unknown field; None if there is none, or if the body is no JSON object."""
    try:
        _NAMES.decode(raw)
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        if (found := _UNKNOWN.fullmatch(str(exc))) is not None:
            return found[1]
    try:
        values = json.loads(raw)  # slower, and accepts NaN, as pydantic does
    except (ValueError, RecursionError):
        return None
    return next((name for name in values if name not in _Body.model_fields), None) if isinstance(values, dict) else None


def _unknown(name: str) -> BadRequest:
    name = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    close = difflib.get_close_matches(name, [*_Body.model_fields], n=1)
    hint = f"did you mean {close[0]}?" if close else "leave it out"
    return BadRequest(name, f"unknown parameter; {hint}")
