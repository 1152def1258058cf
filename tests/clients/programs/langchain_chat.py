"""LangChain's `ChatOpenAI`."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]

from tests.clients.programs.loop import NAME, Answer, Command, get_weather, serve


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer(_bound(names, command).invoke(command.prompt).content)


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer("".join(chunk.content for chunk in _bound(names, command).stream(command.prompt)))


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    weather = tool(get_weather)
    messages: list[Any] = [HumanMessage(command.prompt)]
    settings = {"temperature": 0, "max_tokens": command.max_tokens}
    asking = names["model"].bind_tools([weather], tool_choice=NAME, strict=True, **settings)
    message = reduce(add, asking.stream(messages))
    calls = [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls]
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
    answer = names["model"].bind_tools([weather], strict=True, **settings).invoke([*messages, message, *results])
    return Answer(answer.content, calls)


def _bound(names: Mapping[str, Any], command: Command) -> Any:
    return names["model"].bind(temperature=0, max_tokens=command.max_tokens)


if __name__ == "__main__":
    serve(plain=plain, stream=stream, tools=tools)
