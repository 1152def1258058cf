"""These cases test what the OpenAI Python client makes of answers: objects, helpers for streams, and exceptions."""

from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.e2e.answers import Json
from tests.e2e.cases_chat import ASK, WEATHER, WEATHER_CALL
from tests.e2e.cases_completions import PROMPT, SCHEMA
from tests.e2e.fleet import MODEL

Ask = Callable[[OpenAI], Json]


class Place(BaseModel):
    city: str = Field(pattern="^[a-z]{1,8}$")  # else the grammar lets control characters in, which no parser takes
    count: int = Field(ge=0, le=99)


def list_models(client: OpenAI) -> Json:
    return [card.model_dump() for card in client.models.list()]


def complete(client: OpenAI) -> Json:
    return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1).model_dump()


def complete_streamed(client: OpenAI) -> Json:
    with client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True) as stream:
        return "".join(chunk.choices[0].text for chunk in stream)


def chat(client: OpenAI) -> Json:
    messages: Any = ASK
    return client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0).model_dump()


def chat_stream_helper(client: OpenAI) -> Json:
    return _streamed_to_the_end(client, {"structured_outputs": {"choice": ["yes", "no"]}})


def chat_with_tools_streamed(client: OpenAI) -> Json:
    return _streamed_to_the_end(client, {"structured_outputs": {"regex": WEATHER_CALL}, "tools": [WEATHER]})


def _streamed_to_the_end(client: OpenAI, extra_body: dict[str, Any]) -> Json:
    """Return the kinds of events and the final object; the helper refuses an answer cut by its length."""
    messages: Any = ASK
    with client.chat.completions.stream(
        model=MODEL, messages=messages, max_tokens=90, temperature=0, extra_body=extra_body
    ) as stream:
        kinds = {event.type for event in stream}
        return [sorted(kinds), stream.get_final_completion().model_dump()]


def parse_chat(client: OpenAI) -> Json:
    messages: Any = ASK
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        response_format=Place,
        max_tokens=80,
        temperature=0,
        frequency_penalty=2,  # else the blanks that the grammar allows may never end
    )
    return answer.model_dump(warnings=False)  # of the parsed object, whose type pydantic does not expect


def respond(client: OpenAI) -> Json:
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, temperature=0, store=False)
    return [answer.output_text, answer.model_dump(warnings=False)]


def respond_stream_helper(client: OpenAI) -> Json:
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=8, temperature=0) as stream:
        kinds = {event.type for event in stream}
        return [sorted(kinds), stream.get_final_response().output_text]


def structured_response(client: OpenAI) -> Json:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    return client.responses.create(model=MODEL, input="Where?", max_output_tokens=80, temperature=0, text=form).output_text


def raw_response(client: OpenAI) -> Json:
    answer = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0)
    return [answer.status_code, answer.parse().choices[0].text]


def unknown_model(client: OpenAI) -> Json:
    return _error(lambda: client.completions.create(model="other", prompt=PROMPT), text=False)


def too_long(client: OpenAI) -> Json:
    return _error(lambda: client.completions.create(model=MODEL, prompt=[9] * 1100))


def bad_value(client: OpenAI) -> Json:
    return _error(lambda: client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1))


def bad_grammar_streamed(client: OpenAI) -> Json:
    def read() -> None:
        extra = {"structured_outputs": {"regex": "(("}}
        for _ in client.completions.create(model=MODEL, prompt=PROMPT, stream=True, extra_body=extra):
            pass

    return _error(read)


def _error(call: Callable[[], object], *, text: bool = True) -> Json:
    """Return what a program can tell the error by; with ``text`` also its words."""
    try:
        call()
    except openai.APIError as exc:
        status = exc.status_code if isinstance(exc, openai.APIStatusError) else None
        return [type(exc).__name__, status, exc.code, exc.type, exc.param, exc.message if text else ""]
    raise AssertionError("no error")


CASES: list[Ask] = [
    list_models,
    complete,
    complete_streamed,
    chat,
    chat_stream_helper,
    chat_with_tools_streamed,
    parse_chat,
    respond,
    respond_stream_helper,
    structured_response,
    raw_response,
    unknown_model,
    too_long,
    bad_value,
    bad_grammar_streamed,
]
