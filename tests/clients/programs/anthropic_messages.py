"""Anthropic's client for Python. Its methods have no parameter for the temperature, which vLLM takes all the same."""

from collections.abc import Mapping
from typing import Any

from tests.clients.programs.loop import DESCRIPTION, NAME, RESULT, SCHEMA, Answer, Command, serve

TOOL = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA, "strict": True}


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    message = names["client"].messages.create(messages=[_question(command)], **_fields(command))
    counted = names["client"].messages.count_tokens(model=command.model, messages=[_question(command)])
    assert counted.input_tokens == message.usage.input_tokens, (counted, message.usage)
    return Answer(_text(message))


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    with names["client"].messages.stream(messages=[_question(command)], **_fields(command)) as events:
        return Answer("".join(events.text_stream))


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    messages: list[Any] = [_question(command)]
    given = {"messages": messages, "tools": [TOOL], "tool_choice": {"type": "tool", "name": NAME}, **_fields(command)}
    with names["client"].messages.stream(**given) as events:
        message = events.get_final_message()
    made = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use", message
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": RESULT} for block in made]
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = names["client"].messages.create(messages=messages, tools=[TOOL], **_fields(command))
    return Answer(_text(answer), [{"name": block.name, "arguments": block.input} for block in made])


def _question(command: Command) -> dict[str, Any]:
    return {"role": "user", "content": command.prompt}


def _fields(command: Command) -> dict[str, Any]:
    return {"model": command.model, "max_tokens": command.max_tokens, "extra_body": {"temperature": 0}}


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


if __name__ == "__main__":
    serve(plain=plain, stream=stream, tools=tools)
