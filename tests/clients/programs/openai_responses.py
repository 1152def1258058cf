"""OpenAI's client for Python, with responses."""

import json
from collections.abc import Mapping
from typing import Any

from tests.clients.programs.loop import DESCRIPTION, NAME, RESULT, SCHEMA, Answer, Command, serve

TOOL = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer(names["client"].responses.create(input=command.prompt, **_fields(command)).output_text)


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    events = names["client"].responses.create(input=command.prompt, stream=True, **_fields(command))
    return Answer("".join(event.delta for event in events if event.type == "response.output_text.delta"))


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    question = {"role": "user", "content": command.prompt}
    given = {"input": [question], "tools": [TOOL], "tool_choice": {"type": "function", "name": NAME}, **_fields(command)}
    with names["client"].responses.stream(**given) as events:
        made = [item for item in events.get_final_response().output if item.type == "function_call"]
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in made]
    asked = [{"type": "function_call", "call_id": c.call_id, "name": c.name, "arguments": c.arguments} for c in made]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in made]
    answer = names["client"].responses.create(input=[question, *asked, *results], tools=[TOOL], **_fields(command))
    return Answer(answer.output_text, calls)


def _fields(command: Command) -> dict[str, Any]:
    return {"model": command.model, "temperature": 0, "max_output_tokens": command.max_tokens, "store": False}


if __name__ == "__main__":
    serve(plain=plain, stream=stream, tools=tools)
