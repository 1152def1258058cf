"""`ToolCaller` writes the tool calls of a simulated model with `simulated.calls_tools`, so that tools can be tried without a trained model.

Pure. It reads the rendered prompt as engines do, in the form of Hermes and Qwen: tools as JSON between ``<tools>`` tags in the system turn,
turns between ``<|im_start|>`` and ``<|im_end|>``. A question of the user gets a call of the tool that shares most words with the question,
with arguments that fit the tool's schema. A tool's result gets an ordinary simulated answer. Equal prompts get equal calls.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.simulated.tokens import NO_EOS

TURN, ANSWER = "<|im_start|>", "<|im_start|>assistant\n"
_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
DEEPEST = 8
"""Arguments nested deeper than this are null; a schema may refer to itself."""
MOST = 200
"""Most values of a call, objects and lists included; the others are null. Ten properties that refer to their own object would have 10^8."""
MAX_WORD = 100
"""Characters of the longest text among the arguments."""


class ToolCaller:
    """Plans the tokens of tool calls. ``tokenizer``: a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def script(self, token_ids: Sequence[int], eos_token_id: int) -> list[int]:
        """Return the tokens that follow the sequence: the rest of a call and the end of sequence; nothing where no call is due.

        Args:
            token_ids: A prompt, and what was emitted before if the request resumes.
            eos_token_id: `NO_EOS` if the request ignores the end of sequence; random tokens then follow the call.
        """
        planned = call_at(self._tokenizer.decode(token_ids))
        if planned is None:
            return []
        call, begun = planned
        ids: list[int] = self._tokenizer.encode(call, add_special_tokens=False)
        ends = [] if eos_token_id == NO_EOS else [eos_token_id]
        done = bisect_left(range(len(ids) + 1), len(begun), key=lambda num: len(self._tokenizer.decode(ids[:num])))
        if list(token_ids[len(token_ids) - done :]) == ids[:done] and self._tokenizer.decode(ids[:done]) == begun:
            return [*ids[done:], *ends]
        return []  # the answer began otherwise, as where the client has written its first words


def call_at(text: str) -> tuple[str, str] | None:
    """Return the call that answers a rendered chat, and what of the answer the text has already; None where no call is due."""
    head, mark, begun = text.rpartition(ANSWER)
    role, _, question = head.rpartition(TURN)[2].partition("\n")
    if not mark or role != "user" or "<tool_response>" in question:
        return None
    asked = set(_words(question))
    tool = max(
        _tools(head),
        key=lambda tool: len(asked.intersection(_words(f"{tool['name']} {tool.get('description') or ''}"))),
        default=None,
    )
    if tool is None:
        return None
    schema = tool.get("parameters")
    arguments = _Arguments(schema, question).value(schema, DEEPEST) if isinstance(schema, Mapping) else {}
    call = json.dumps({"name": tool["name"], "arguments": arguments if isinstance(arguments, dict) else {}})
    return f"<tool_call>\n{call}\n</tool_call>", begun


def _tools(head: str) -> Iterator[dict[str, Any]]:
    """Yield the functions that the first ``<tools>`` of a prompt lists, one JSON object a line. What is no function is left out."""
    found = _TOOLS.search(head)
    for line in found[1].splitlines() if found else ():
        try:
            tool = json.loads(line)
        except (ValueError, RecursionError):
            continue
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]{3,}", text.lower())


@dataclass
class _Arguments:
    """The arguments of one call. ``root``: the schema in which references are looked up."""

    root: Mapping[str, Any]
    question: str
    num_left: int = MOST

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value that fits a JSON schema: its own example if it has one, else words and numbers of the question."""
        self.num_left -= 1
        if self.num_left < 0:
            return None
        schema = _resolved(schema, self.root)
        for key in ("const", "default"):
            if key in schema:
                return schema[key]
        for key in ("enum", "examples"):
            if isinstance(schema.get(key), list) and schema[key]:
                return schema[key][0]
        if not depth:
            return None
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.value(schema[key][0], depth - 1)
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind == "object" or "properties" in schema:
            properties, required = schema.get("properties"), schema.get("required")
            names = required if isinstance(required, list) else []
            known = properties if isinstance(properties, Mapping) else {}
            return {name: self.value(known.get(name), depth - 1) for name in names if isinstance(name, str)}
        if kind == "array":
            return [self.value(schema.get("items"), depth - 1)]
        return _scalar(kind, schema, self.question)


def _scalar(kind: Any, schema: Mapping[str, Any], question: str) -> Any:
    """Return a value of the type ``kind``; a text if that is no type of a single value."""
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    if kind in ("integer", "number"):
        asked, least = re.search(r"\d{1,9}", question), schema.get("minimum")
        return int(asked[0]) if asked else least if isinstance(least, int) else 1
    # Names, such as that of a city, begin with a capital; so does the question itself.
    names = re.findall(r"(?<=\s)[A-Z]\w+", question) or re.findall(r"\w+", question.partition("<|im_end|>")[0])
    limit = schema.get("maxLength")
    return (names[-1] if names else "text")[: limit if isinstance(limit, int) and limit >= 0 else MAX_WORD]


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference such as ``#/$defs/City`` names; an empty one for what is no schema."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(path := schema.get("$ref"), str):
            return schema
        schema = root
        for part in path.removeprefix("#/").split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}
