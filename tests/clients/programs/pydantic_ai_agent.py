"""An agent of pydantic-ai."""

import asyncio
from collections.abc import AsyncIterable, Mapping
from typing import Any

from pydantic_ai import Agent, Tool  # type: ignore[import-not-found]
from pydantic_ai.messages import ToolCallPart  # type: ignore[import-not-found]

from tests.clients.programs.loop import NAME, Answer, Command, get_weather, serve

RUNNER = asyncio.Runner()  # one event loop for all commands, as the client keeps its connections


def plain(names: Mapping[str, Any], command: Command) -> Answer:
    return Answer(RUNNER.run(Agent(names["model"], model_settings=_settings(command)).run(command.prompt)).output)


def stream(names: Mapping[str, Any], command: Command) -> Answer:
    async def ask() -> Answer:
        agent = Agent(names["model"], model_settings=_settings(command))
        async with agent.run_stream(command.prompt) as result:
            return Answer("".join([part async for part in result.stream_text(delta=True, debounce_by=None)]))

    return RUNNER.run(ask())


def tools(names: Mapping[str, Any], command: Command) -> Answer:
    """With a handler of events, the agent streams each of its requests."""

    async def read(_: Any, events: AsyncIterable[Any]) -> None:
        async for _event in events:
            pass

    def settings(context: Any) -> Any:
        named = {"type": "function", "function": {"name": NAME}}
        return {**_settings(command), "extra_body": {"tool_choice": named if context.run_step == 1 else "auto"}}

    agent = Agent(names["model"], tools=[Tool(get_weather, strict=True)], model_settings=settings)
    result = RUNNER.run(agent.run(command.prompt, event_stream_handler=read))
    made = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
    return Answer(result.output, [{"name": call.tool_name, "arguments": call.args_as_dict()} for call in made])


def _settings(command: Command) -> Any:
    return {"temperature": 0, "max_tokens": command.max_tokens}


if __name__ == "__main__":
    serve(plain=plain, stream=stream, tools=tools)
