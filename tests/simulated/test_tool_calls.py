"""A simulated model with `calls_tools` calls the tool that fits a question, continues a call it has begun, and survives any schema."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.simulated.sequences import SamplingRules, Sequences, slots_of
from serve_app.simulated.tokens import NO_EOS, TokenSource
from serve_app.simulated.tool_calls import MAX_VALUES, ToolCaller, call_at

EOS = 300
QUESTION = "What is the weather in Paris for 3 days?"


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def function(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool of whose parameters all are required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": f"Calls {name}.", "parameters": parameters}}


def rendered(*turns: tuple[str, str], tools: Sequence[Any], begun: str = "") -> str:
    system = "<|im_start|>system\n<tools>\n" + "\n".join(map(json.dumps, tools)) + "\n</tools><|im_end|>\n"
    asked = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{system}{asked}<|im_start|>assistant\n{begun}"


def called(tools: Sequence[Any], question: str = QUESTION) -> Any:
    planned = call_at(rendered(("user", question), tools=tools))
    assert planned is not None
    call, begun = planned
    assert begun == ""
    return json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))


def test_the_tool_that_fits_the_question_is_called_with_arguments_from_it() -> None:
    weather = function("get_weather", city={"type": "string"}, days={"type": "integer"})
    for tools in ([function("send_mail"), weather], [weather, function("send_mail")]):
        assert called(tools) == {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
    assert called([function("first"), function("second")], "Hello")["name"] == "first"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"enum": ["celsius", "kelvin"]}, "celsius"),
        ({"type": "string", "default": "now"}, "now"),
        ({"type": "string", "maxLength": 2}, "Pa"),
        ({"type": ["number", "null"]}, 3),
        ({"type": "boolean"}, True),
        ({"type": "array", "items": {"type": "string"}}, ["Paris"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {}}, "required": ["a"]}, {"a": None}),
    ],
)
def test_an_argument_fits_its_schema(schema: dict[str, Any], value: Any) -> None:
    assert called([function("tool", argument=schema)])["arguments"] == {"argument": value}


def test_a_schema_with_definitions_is_followed_and_one_that_contains_itself_ends() -> None:
    tool = function("tool", city={"$ref": "#/$defs/City"})
    tool["function"]["parameters"]["$defs"] = {"City": {"type": "string", "const": "Oslo"}}
    assert called([tool])["arguments"] == {"city": "Oslo"}
    tool["function"]["parameters"]["$defs"] = {"City": {"type": "array", "items": {"$ref": "#/$defs/City"}}}
    assert json.dumps(called([tool])["arguments"]).startswith('{"city": [[[')


def test_the_values_of_a_schema_that_contains_itself_many_times_are_bounded() -> None:
    tool = function("tool", **{name: {"$ref": "#/$defs/All"} for name in "abcd"})
    parameters = tool["function"]["parameters"]
    parameters["$defs"] = {"All": {key: parameters[key] for key in ("type", "properties", "required")}}
    assert json.dumps(called([tool])["arguments"]).count(":") <= len("abcd") * MAX_VALUES


def test_a_tools_result_and_a_chat_without_tools_get_no_call() -> None:
    tools = [function("tool")]
    result = ("user", "<tool_response>\n17 degrees\n</tool_response>")
    assert call_at(rendered(("user", QUESTION), ("assistant", "<tool_call>..."), result, tools=tools)) is None
    assert call_at(rendered(("user", QUESTION), tools=[])) is None
    assert call_at("Once upon a time") is None


KEYS = [
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "anyOf",
    "$ref",
    "maxLength",
    "minimum",
    "function",
    "name",
    "parameters",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(parameters=json_values, other=json_values, question=st.text(max_size=20))
def test_no_schema_breaks_the_engine(parameters: Any, other: Any, question: str) -> None:
    tool = {"type": "function", "function": {"name": "tool", "parameters": parameters}}
    call_at(rendered(("user", question), tools=[other, tool]))


def test_a_resumed_call_continues_where_it_was_cut() -> None:
    caller, prompt = ToolCaller(Bytes()), list(rendered(("user", QUESTION), tools=[function("tool")]).encode())
    whole = caller.script(prompt, EOS)
    assert bytes(whole[:-1]).decode().startswith('<tool_call>\n{"name": "tool"')
    for cut in range(len(whole)):
        assert caller.script([*prompt, *whole[:cut]], EOS) == whole[cut:]
    assert caller.script(prompt, NO_EOS) == whole[:-1]
    assert caller.script([*prompt, *b"Well, "], EOS) == []


def test_a_script_is_followed_until_another_token_is_appended() -> None:
    source, sequences = TokenSource(np.arange(10, 200), np.array([], dtype=np.int64), eos_probability=0.0), Sequences(2)
    for name in "ab":
        sequences.add(name, state=1, length=3, num_prompt_tokens=3, rules=SamplingRules(), script=[7, 8, 9])
    slots = slots_of(sequences, ["a", "b"])
    assert sequences.sample(slots, source).tolist() == [7, 7]
    sequences.append(slots, np.array([7, 150]))
    first, other = sequences.sample(slots, source).tolist()
    assert (first, other in range(10, 200)) == (8, True)
    sequences.append(slots, np.array([8, other]))
    sequences.remove("a")
    assert sequences.scripts == {}
