"""These cases test Anthropic's Messages: /v1/messages and its /count_tokens."""

from typing import Any

from tests.e2e.answers import Case
from tests.e2e.fleet import MODEL

ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA, "strict": True}
LOOSE = {**WEATHER, "strict": False}
CALLED = [
    *ASK,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "call-1", "name": "get_weather", "input": {"unit": "celsius", "days": 1}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call-1", "content": "17 degrees"}]},
]
CLAUDE_CODE: dict[str, Any] = {
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": PARTS,
    "metadata": {"user_id": "user_1"},
    "tools": [LOOSE],
}


def message(name: str, path: str = "/v1/messages", **fields: Any) -> Case:
    """Return a greedy request of 12 tokens, changed by ``fields``; fields of ``Case`` are recognised by their names."""
    ours = {k: fields.pop(k) for k in ("sampled", "wanted", "headers") if k in fields}
    body = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0, **fields}
    return Case(f"messages {name}", path, body, **ours)


def both(name: str, **fields: Any) -> list[Case]:
    """The same request answered whole and streamed."""
    return [message(name, **fields), message(f"{name}, streamed", stream=True, **fields)]


def counted(name: str, **fields: Any) -> Case:
    return Case(f"messages counted: {name}", "/v1/messages/count_tokens", {"model": MODEL, "messages": ASK, **fields})


CASES = [
    *both("greedy"),
    *both("system", system="Be brief."),
    *both("as Claude Code asks", path="/v1/messages?beta=true", **CLAUDE_CODE),
    *both("stop_sequences", stop_sequences=["e", "a"], max_tokens=40),
    *both("a named tool", tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=80),
    *both("any tool, without its schema", tools=[LOOSE], tool_choice={"type": "any"}, max_tokens=400),
    *both("a named tool, without its schema", tools=[LOOSE], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=400),
    *both("the results of a call", messages=CALLED, tools=[WEATHER]),
    message("no tool", tools=[WEATHER], tool_choice={"type": "none"}),
    message("top_k and top_p", top_k=1, top_p=0.5, temperature=1.0),
    message("unseeded", temperature=1.0, sampled=True),
    message("adaptive thinking", thinking={"type": "adaptive"}),
    *both("invalid: a small budget of thinking", thinking={"type": "enabled", "budget_tokens": 8}),
    *both("invalid: max_tokens 0", max_tokens=0),
    message("invalid: no messages", messages=None),
    *both("invalid: too long", messages=[{"role": "user", "content": "word " * 2000}]),
    message("invalid: unknown model", model="claude", wanted={"body.error": "unknown-model"}),
    counted("greedy"),
    counted("as Claude Code asks", **CLAUDE_CODE),
    counted("invalid: no messages", messages=None),
]
