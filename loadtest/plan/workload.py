"""The workload builds a request's path and JSON body, from scenario, seed and id alone.

Prompts are made of numbers from a counter (splitmix64 over a hash of their purpose), not drawn one after the other, so any worker can
make any prompt, in any order, in microseconds. The prompts of two requests differ after the prefix that their class shares.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.errors import UsageError
from loadtest.plan.prompts import prompts_digest, record_of
from loadtest.plan.request_class import RequestClass
from loadtest.plan.scenario import Scenario
from loadtest.records import ScheduledRequest
from loadtest.wire.sse import Call, Parsed
from loadtest.wording import shown

BLOCK_TOKENS = 512
"""Prompt tokens per id in `ScheduledRequest.blocks`, as in Mooncake's traces."""

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_COMMON = """
a about above across act add after again age ago air all along also always an and animal answer any are area arm around art as
ask at away back bad ball bank base be bed been before began best better between big bird black blood blue board boat body book
both box boy bring brother build but buy by call came can car care carry case catch center chance change check child church city
class clear close cold color come common could country course cover cross cry cut dark day dead deep did door down draw drive dry
each early earth east eat end even ever every eye face fact fall family far farm fast father feel few field fight fill film find
fine fire first fish five fly follow food foot for form found four free friend from front full game garden gave get girl give
glass go gold good got great green ground group grow had half hand happy hard has have he head hear heart help her here high him
his hold home horse hot hour house how hundred if in is it just keep kind know land large last late law lay lead learn leave left
"""
WORDS = tuple(_COMMON.split())
"""Common short words without marks: about one token each. With a tokenizer, `_words` keeps those that are exactly one token."""


def path_of(cls: RequestClass) -> str:
    """Return the path of the class's endpoint below the target's base URL."""
    return _PATHS[cls.endpoint]


Message = dict[str, Any]
Said = tuple[ScheduledRequest, Sequence[Message]]
"""A turn of a conversation, and the messages that its answer adds to the next turn: `answer_messages`."""
TOOL_RESULT = '{"result": "ok"}'
"""The invented result of every tool call: the kit runs no tools."""


def body_of(scenario: Scenario, request: ScheduledRequest, *, model: str, before: Sequence[Said] = ()) -> dict[str, Any]:
    """Return the JSON body; about 75 us for 512 tokens.

    ``before`` has the conversation's earlier turns; ``model`` is the model of classes that set none.
    ``input_tokens`` counts the prompt alone: the server adds tokens for the beginning of a text and for a chat template.
    """
    cls = next(c for c in scenario.requests if c.name == request.cls)
    body: dict[str, Any] = {"max_tokens": request.output_tokens, "temperature": cls.temperature, "stream": cls.stream}
    if cls.model or cls.endpoint != "generate":
        body["model"] = cls.model or model
    if cls.stream and cls.endpoint != "generate":
        more = {"continuous_usage_stats": True} if cls.usage == "continuous" else {}
        body["stream_options"] = {"include_usage": True, **more}
    if cls.ignore_eos:
        body |= {"ignore_eos": True, "min_tokens": request.output_tokens}
    if cls.prompt == "ids":
        first, last = cls.token_ids
        body["prompt"] = (_prompt(scenario.seed, cls, request, last - first + 1) + first).tolist()
    elif cls.prompts is not None and cls.endpoint != "chat":
        body["prompt"] = record_of(cls.prompts, seed=scenario.seed, cls=cls.name, first_id=request.id).turns[0]
    elif cls.endpoint == "chat":
        body["messages"] = _messages(scenario, cls, request, before)
    else:
        body["prompt"] = _text(scenario, _prompt(scenario.seed, cls, request, len(_words(scenario.tokenizer))))
    named = {"tools": list(cls.tools) or None, "tool_choice": cls.tool_choice, "response_format": cls.response_format}
    return body | {key: value for key, value in named.items() if value is not None} | cls.extra_body


def answer_messages(answer: Parsed) -> list[Message]:
    """Return the messages that a client of OpenAI's API keeps of an answer: the message without reasoning, and a result per call.

    A call that ``max_tokens`` cut off is left out: no client could run the call, and a server may refuse a history that has it.
    """
    calls = [call for call in answer.calls if _can_be_run(call)]
    if not calls:
        return [{"role": "assistant", "content": answer.content}]
    named = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    said = {"role": "assistant", "content": answer.content or None, "tool_calls": named}
    return [said, *({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT} for call in calls)]


def _can_be_run(call: Call) -> bool:
    """Whether a client could run the call: it has an id and a name, and its arguments are empty or a JSON object."""
    try:
        msgspec.json.decode(call.arguments or "{}", type=dict)
    except (msgspec.DecodeError, RecursionError):
        return False
    return bool(call.id and call.name)


def _messages(scenario: Scenario, cls: RequestClass, request: ScheduledRequest, before: Sequence[Said]) -> list[Message]:
    if cls.prompts is not None:
        return _recorded(scenario.seed, cls.prompts, cls.name, request, before)
    span = len(_words(scenario.tokenizer))
    if cls.conversation is None:
        return [{"role": "user", "content": _text(scenario, _prompt(scenario.seed, cls, request, span))}]
    prefix = _numbers(scenario.seed, f"prefix/{cls.name}", cls.shared_prefix_tokens, span)
    messages: list[Message] = [{"role": "system", "content": _text(scenario, prefix)}] if prefix.size else []
    for turn, answered in (*before, (request, ())):
        said = _numbers(scenario.seed, f"request/{cls.name}/{turn.id}", turn.input_tokens, span)
        messages += [{"role": "user", "content": _text(scenario, said)}, *answered]
    return messages


def _recorded(seed: int, path: Path, cls: str, request: ScheduledRequest, before: Sequence[Said]) -> list[Message]:
    """Return the messages of a turn whose conversation is a record of a file of prompts."""
    first = before[0][0] if before else request
    record = record_of(path, seed=seed, cls=cls, first_id=first.id)
    messages: list[Message] = [{"role": "system", "content": record.system}] if record.system else []
    for text, (_, answered) in zip(record.turns, before, strict=False):
        messages += [{"role": "user", "content": text}, *answered]
    return [*messages, {"role": "user", "content": record.turns[len(before)]}]


def tokens_of(scenario: Scenario, text: str) -> int:
    """Return the number of a text's tokens by the scenario's tokenizer, or of its words if the scenario has none; at least 1."""
    if not scenario.tokenizer:
        return max(1, len(text.split()))
    return max(1, len(load_tokenizer(scenario.tokenizer).encode(text, add_special_tokens=False).ids))


def _text(scenario: Scenario, numbers: NDArray[np.int64]) -> str:
    words = _words(scenario.tokenizer)
    return " ".join([words[i] for i in numbers.tolist()])


def fingerprint(scenario: Scenario) -> str:
    """Return the SHA-256 of the inputs of request bodies that schedule.jsonl does not hold: seed, classes, the tokenizer's content.

    Raises:
        UsageError: The tokenizer cannot be read, or cannot be used for prompts of text.
    """
    tokenizer = ""
    if scenario.tokenizer and any(c.prompt == "text" and c.prompts is None for c in scenario.requests):
        tokenizer = hashlib.sha256("\n".join(_words(scenario.tokenizer)).encode()).hexdigest()
    classes = [c.model_dump(mode="json", exclude_defaults=True) for c in scenario.requests]
    for cls, values in zip(scenario.requests, classes, strict=True):
        if cls.prompts is not None:
            values["prompts"] = prompts_digest(cls.prompts)  # the file's records, whatever its path
    parts = {"seed": scenario.seed, "classes": classes, "tokenizer": tokenizer}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Return the `tokenizers.Tokenizer` of a tokenizer.json.

    Raises:
        UsageError: The file does not exist, or is no tokenizer.
    """
    from tokenizers import Tokenizer  # imported here: it takes 30 ms, and runs without a tokenizer do not need it

    if not Path(path).is_file():
        raise UsageError("tokenizer", f"{shown(path)} is no file; give the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as exc:  # the library raises no narrower type
        raise UsageError("tokenizer", f"{path}: {exc}") from exc


def splitmix64(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well-mixed number per counter. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014)."""
    mixed = (counters + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _prompt(seed: int, cls: RequestClass, request: ScheduledRequest, span: int) -> NDArray[np.int64]:
    """Return ``input_tokens`` numbers in [0, span): the class's prefix, the trace's blocks, then numbers of this request alone."""
    parts = [_numbers(seed, f"prefix/{cls.name}", min(cls.shared_prefix_tokens, request.input_tokens), span)]
    parts += [_numbers(seed, f"block/{block}", BLOCK_TOKENS, span) for block in request.blocks]
    own = request.input_tokens - sum(part.size for part in parts)
    parts.append(_numbers(seed, f"request/{cls.name}/{request.id}", max(own, 0), span))
    return np.concatenate(parts)[: request.input_tokens]


def _numbers(seed: int, name: str, num: int, span: int) -> NDArray[np.int64]:
    if not num:
        return np.empty(0, dtype=np.int64)
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    mixed = splitmix64(np.arange(num, dtype=np.uint64) + np.frombuffer(key, dtype="<u8"))
    return ((mixed >> np.uint64(32)) * np.uint64(span) >> np.uint64(32)).astype(np.int64)


@lru_cache
def _words(tokenizer_path: str) -> tuple[str, ...]:
    """Return the words of which any n, joined by spaces, are n tokens for this tokenizer; without a tokenizer, all words."""
    if not tokenizer_path:
        return WORDS
    tokenizer = load_tokenizer(tokenizer_path)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    words = tuple(word for word in WORDS if count(word) == 1 and count(f"{word} {word} {word}") == 3)
    if len(words) < 8 or count(" ".join(words)) != len(words):
        raise UsageError(
            "tokenizer", f"{tokenizer_path} has {len(words)} of the common words as one token; leave it out or use prompt: ids"
        )
    return words
