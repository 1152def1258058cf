"""This module validates request bodies at a bounded cost, so that one client cannot stop the event loop for all others.

Pydantic reports each wrong element of each list, once for each type that the element might have had. `{"input": [{}, {}, ...]}` of 300 kB
to `/v1/responses` made millions of errors: the event loop stood still for minutes, and the kernel ended the ingress at 17 GB. Here the
validation of a list, set or mapping stops at its first wrong element. A small body is then validated a second time by pydantic's own
validator, so that the error lists everything that is wrong, as vLLM's does. Lists with too many objects are refused before the validation,
because a valid object of a union of many types costs up to 0.2 ms.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, SchemaValidator

MAX_VALUES = 200
"""The error of a body with at most this many values, nested values included, lists everything that is wrong. One value makes up to 230
errors."""

MAX_OBJECTS = 10_000
"""The most objects and lists inside of all lists of a body together: messages, their parts, tools, lists in schemas."""

MAX_ITEMS = 1000
"""The most items in the ``input`` of `/v1/responses`, each of which vLLM's model tries as many types: 0.06 ms of the event loop."""

MAX_SEQUENCES = 4096
"""The most engine requests that one body may become: its prompts times `n`. An engine request takes 0.2 ms of the event loop before it is
queued or refused."""

MAX_GRAMMAR_CHARS = 64 << 10
"""The most characters of a schema, regular expression, grammar or list of choices. vLLM reads it in the event loop before the engine
compiles it: 48 kB took 2 s, and the time grows with the size."""

MAX_TEMPLATE_KWARGS = 1000
"""The most keys of ``chat_template_kwargs``. Preparing 240,000 keys for the template took 2 s of the thread that renders all chats of the
model."""

MAX_LENGTH_PENALTY = 10
"""The largest exponent of a beam's length, up and down. Beyond it, length ** penalty leaves the range of a float: 500."""

_GRAMMARS = ("structured_outputs", "response_format", "text")
_CONTAINERS = frozenset({"list", "set", "frozenset", "tuple", "dict"})
_CONTAINED = frozenset({dict, list})
_NOT_SCHEMAS = frozenset({"metadata", "serialization", "default"})


class FirstErrors:
    """A stand-in for pydantic's `SchemaValidator` of a core schema.

    Args:
        complete: The validator that it replaces, which reports all errors.
    """

    def __init__(self, schema: Mapping[str, Any], complete: Any) -> None:
        self._stopping = _validator(schema)
        self._complete = complete

    def validate_python(self, value: Any, **options: Any) -> Any:
        """Do what pydantic's method of this name does.

        Raises:
            ValidationError: The value is not valid, or one of the limits above is exceeded.
        """
        if _objects_in_lists(value) > MAX_OBJECTS:
            raise _refusal("too_many_objects", f"The lists in it hold more than {MAX_OBJECTS} objects; send fewer in one request")
        if isinstance(value, dict):
            _check_fields(value)
        try:
            request = self._validate(value, options)
        except (AttributeError, KeyError, IndexError) as exc:  # vLLM would answer these by 500, and a TypeError by 400
            raise _refusal("wrong_type", f"A field is of a wrong type: {exc}") from exc
        if (num := _num_sequences(request)) > MAX_SEQUENCES:
            raise _refusal(
                "too_many_sequences", f"It asks for {num} sequences (prompts times n), limit {MAX_SEQUENCES}; divide it"
            )
        if _has_message_without_text(request):
            raise _refusal("no_text", "The content of an assistant's message in `input` must begin with a text")
        return request

    def _validate(self, value: Any, options: dict[str, Any]) -> Any:
        try:
            return self._stopping.validate_python(value, **options)
        except ValidationError:
            if _num_values(value, MAX_VALUES) > MAX_VALUES:
                raise
        return self._complete.validate_python(value, **options)


def of_model(model: type[BaseModel]) -> FirstErrors:
    """Return a validator for bodies of this model."""
    return FirstErrors(model.__pydantic_core_schema__, model.__pydantic_validator__)


def json_validator(model: type[BaseModel]) -> SchemaValidator:
    """Return a validator for ``validate_json`` that stops at the first wrong element of a list and reports no others."""
    return _validator(model.__pydantic_core_schema__)


def stop_at_first_errors(app: FastAPI) -> None:
    """Make all routes of ``app`` validate their bodies by `FirstErrors`. The field of each route is changed, its model is not."""
    for route in app.routes:
        field = getattr(route, "body_field", None)
        if field is None:
            continue
        adapter: TypeAdapter[Any] = field._type_adapter
        stands_in: Any = FirstErrors(adapter.core_schema, adapter.validator)
        adapter.validator = stands_in


def _validator(schema: Mapping[str, Any]) -> SchemaValidator:
    stopping: Any = _stopping(schema)
    # Pydantic's prebuilt validators of nested models report all errors.
    return SchemaValidator(stopping, _use_prebuilt=False)


def _stopping(schema: Any) -> Any:
    """Return a copy of the core schema whose containers stop at their first wrong element."""
    if isinstance(schema, list | tuple):
        return type(schema)(_stopping(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # the fields of a model by their names
        return {name: _stopping(field) for name, field in schema.items()}
    copy = {key: part if key in _NOT_SCHEMAS else _stopping(part) for key, part in schema.items()}
    if kind in _CONTAINERS:
        copy["fail_fast"] = True
    return copy


def _check_fields(body: Mapping[str, Any]) -> None:
    """Refuse values that pass vLLM's validation but cost too much later, or fail later."""
    if (num_chars := _grammar_chars(body)) > MAX_GRAMMAR_CHARS:
        said = f"What constrains the answer has {num_chars} characters, limit {MAX_GRAMMAR_CHARS}; send a smaller schema"
        raise _refusal("grammar_too_large", said)
    items = body.get("input")
    if isinstance(items, list) and len(items) > MAX_ITEMS and any(isinstance(item, dict) for item in items):
        raise _refusal("too_many_items", f"input has {len(items)} items, limit {MAX_ITEMS}; leave out the oldest")
    if (num := len(_mapping(body.get("chat_template_kwargs")))) > MAX_TEMPLATE_KWARGS:
        raise _refusal("too_many_keys", f"chat_template_kwargs has {num} keys, limit {MAX_TEMPLATE_KWARGS}; send fewer")
    penalty = body.get("length_penalty")
    if isinstance(penalty, int | float) and not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        said = f"length_penalty is {penalty}, allowed are -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}"
        raise _refusal("length_penalty", said)
    if isinstance(words := body.get("bad_words"), list):
        try:
            "".join(word for word in words if isinstance(word, str)).encode()
        except UnicodeEncodeError as exc:
            half = exc.object[exc.start]
            raise _refusal("not_unicode", f"bad_words holds {half!r}, half a surrogate pair; leave it out") from exc


def _refusal(kind: str, message: str) -> ValidationError:
    error: Any = PydanticCustomError
    details = InitErrorDetails(type=error(kind, message), loc=(), input=None)
    return ValidationError.from_exception_data("request", [details])


def _objects_in_lists(value: Any) -> int:
    """Return how many objects and lists are inside of lists. A result above `MAX_OBJECTS` is a lower bound: counting stops there."""
    waiting, num = [value] if isinstance(value, dict | list) else [], 0
    while waiting and num <= MAX_OBJECTS:
        part = waiting.pop()
        values = part.values() if isinstance(part, dict) else part
        if _CONTAINED.isdisjoint(set(map(type, values))):  # 400,000 token ids take 8 ms, and one by one 0.1 s
            continue
        held = [each for each in values if isinstance(each, dict | list)]
        num += len(held) if isinstance(part, list) else 0
        waiting += held
    return num


def grammar_chars(grammar: Any) -> int:
    """Return the characters of a schema, regular expression, grammar or list of choices, as Python prints it; 0 for None."""
    return len(repr(grammar)) if grammar is not None else 0


def _grammar_chars(body: Mapping[str, Any]) -> int:
    """Return the characters of the longest grammar of a body. The schemas of its tools count as one grammar."""
    return max(*(grammar_chars(body.get(name)) for name in _GRAMMARS), sum(map(grammar_chars, _tool_schemas(body))))


def _tool_schemas(body: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the tools whose calls vLLM constrains by a grammar. Other tools only appear in the prompt."""
    choice, tools = body.get("tool_choice") or "auto", body.get("tools")
    if choice == "none" or not isinstance(tools, list):
        return
    options = choice if isinstance(choice, dict) else {}
    is_auto = choice == "auto" or options.get("mode") == "auto"
    named = _mapping(options.get("function")).get("name") or options.get("name")
    for tool in map(_mapping, tools):
        function = _mapping(tool.get("function")) or tool  # the Responses API has the fields in the tool itself
        if function.get("strict") if is_auto else named in (None, function.get("name")):
            yield function.get("parameters")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


_PROMPTS = ("prompt", "input")
"""Fields that hold one prompt, or a list of prompts (texts or token ids), each of which becomes an engine request."""
_TEXTS = ("documents", "queries", "items", "text_1", "text_2", "data_1", "data_2")
"""Fields of scores and rankings that may hold a list, each entry of which becomes an engine request."""


def _num_sequences(request: Any) -> int:
    """Return how many engine requests the lists of prompts become; 1 for one prompt, whose choices vLLM bounds."""
    num = max((len(entries) for name in _TEXTS if isinstance(entries := getattr(request, name, None), list)), default=1)
    for name, kinds in (*((name, str | list) for name in _PROMPTS), ("messages", list)):  # of a batch of chats, lists of messages
        prompts = getattr(request, name, None)
        if isinstance(prompts, list) and prompts and isinstance(prompts[0], kinds):
            num = max(num, len(prompts))
    return num * (getattr(request, "n", None) or 1) if num > 1 else 1


def _has_message_without_text(request: Any) -> bool:
    """Return whether an earlier answer in ``input`` begins with no text, such as a refusal. vLLM would answer by 500."""
    items = getattr(request, "input", None)
    if not isinstance(items, list):
        return False
    messages = [item for item in items if getattr(item, "type", None) == "message" and getattr(item, "role", None) == "assistant"]
    return any(
        isinstance(message.content, list) and not hasattr(next(iter(message.content), None), "text") for message in messages
    )


def _num_values(value: Any, limit: int) -> int:
    """Return how many values ``value`` holds, itself included; ``limit`` + 1 where there are more than ``limit``."""
    waiting, num = [value], 0
    while waiting and num <= limit:
        part = waiting.pop()
        num += 1
        if isinstance(part, dict | list):
            if len(part) > limit:
                return limit + 1
            waiting.extend(part.values() if isinstance(part, dict) else part)
    return num
