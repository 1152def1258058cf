"""OpenAI's client for Python, with chat completions."""

import json
from collections.abc import Mapping
from typing import Any

from tests.clients.programs.loop import DESCRIPTION, NAME, RESULT, SCHEMA, Answer, Command, serve

TOOL = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}}


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer(_create(names, command, [_question(command)]).choices[0].message.content)


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    events = _create(names, command, [_question(command)], stream=True)
    return Answer("".join(event.choices[0].delta.content or "" for event in events))


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    messages = [_question(command)]
    given = {
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": NAME}},
        **_fields(command),
    }
    with names["client"].chat.completions.stream(**given) as events:
        message = events.get_final_completion().choices[0].message
    calls = [{"name": call.function.name, "arguments": json.loads(call.function.arguments)} for call in message.tool_calls]
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]
    asked = message.model_dump(include={"role", "content", "tool_calls"}, exclude={"tool_calls": {"__all__": {"index"}}})
    answer = _create(names, command, [*messages, asked, *results], tools=[TOOL])
    return Answer(answer.choices[0].message.content, calls)


def _create(names: Mapping[str, Any], command: Command, messages: list[Any], **fields: Any) -> Any:
    return names["client"].chat.completions.create(messages=messages, **_fields(command), **fields)


def _question(command: Command) -> dict[str, Any]:
    return {"role": "user", "content": command.prompt}


def _fields(command: Command) -> dict[str, Any]:
    return {"model": command.model, "temperature": 0, "max_tokens": command.max_tokens}


if __name__ == "__main__":
    serve(plain=plain, stream=stream, tools=tools)
