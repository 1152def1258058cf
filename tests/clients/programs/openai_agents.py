"""An agent of OpenAI's Agents SDK, with chat completions or responses: the code of docs/api.md decides."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled  # type: ignore[import-not-found]

from tests.clients.programs.loop import NAME, Answer, Command, get_weather, serve

RUNNER = asyncio.Runner()  # one event loop for all commands, as the client keeps its connections


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer(RUNNER.run(Runner.run(_agent(names, command), command.prompt)).final_output)


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    async def ask() -> Answer:
        events = Runner.run_streamed(_agent(names, command), command.prompt).stream_events()
        data = [event.data async for event in events if event.type == "raw_response_event"]
        return Answer("".join(item.delta for item in data if item.type == "response.output_text.delta"))

    return RUNNER.run(ask())


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    """The agent takes ``tool_choice`` back after the first call."""

    async def ask() -> Any:
        result = Runner.run_streamed(_agent(names, command, tools=[function_tool(get_weather)], tool_choice=NAME), command.prompt)
        async for _ in result.stream_events():
            pass
        return result

    result = RUNNER.run(ask())
    made = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    return Answer(result.final_output, [{"name": call.name, "arguments": json.loads(call.arguments)} for call in made])


def _agent(names: Mapping[str, Any], command: Command, *, tools: Any = (), **settings: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": command.max_tokens, **settings}
    return Agent(name="weather", model=names["model"], tools=list(tools), model_settings=ModelSettings(**settings))


if __name__ == "__main__":
    set_tracing_disabled(True)  # else it reports to OpenAI
    serve(plain=plain, stream=stream, tools=tools)
