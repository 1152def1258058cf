"""LlamaIndex's `OpenAILike`."""

from collections.abc import Mapping
from typing import Any

from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found]

from tests.clients.programs.loop import NAME, Answer, Command, get_weather, serve


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer(names["model"].chat([_question(command)], **_fields(command)).message.content)


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer("".join(part.delta or "" for part in names["model"].stream_chat([_question(command)], **_fields(command))))


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    model, messages, weather = names["model"], [_question(command)], FunctionTool.from_defaults(get_weather, name=NAME)
    given = {"chat_history": messages, "strict": True, "tool_choice": NAME}
    *_, last = model.stream_chat_with_tools([weather], **given, **_fields(command))
    made = model.get_tool_calls_from_response(last)
    results = [
        ChatMessage(role="tool", content=weather(**call.tool_kwargs).content, additional_kwargs={"tool_call_id": call.tool_id})
        for call in made
    ]
    history = [*messages, last.message, *results]
    answer = model.chat_with_tools([weather], chat_history=history, strict=True, **_fields(command))
    return Answer(answer.message.content, [{"name": call.tool_name, "arguments": call.tool_kwargs} for call in made])


def _question(command: Command) -> ChatMessage:
    return ChatMessage(role="user", content=command.prompt)


def _fields(command: Command) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": command.max_tokens}


if __name__ == "__main__":
    serve(plain=plain, stream=stream, tools=tools)
