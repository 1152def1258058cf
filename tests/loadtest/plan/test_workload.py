import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace

from loadtest.errors import UsageError
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.plan.workload import WORDS, answer_messages, body_of, fingerprint, path_of, splitmix64
from loadtest.records import ScheduledRequest
from loadtest.wire.sse import Call, Parsed

TEXT = {"prompt": "text", "name": "a"}


def scenario(cls: dict[str, Any], **values: Any) -> Scenario:
    arrival = {"law": "burst", "max_requests": 50}
    return parse_scenario({"name": "test", "seed": 7, "arrival": arrival, "requests": [{"name": "a", **cls}], **values})


def asked(number: int = 0, *, tokens: int = 8, blocks: tuple[int, ...] = ()) -> ScheduledRequest:
    return ScheduledRequest(number, 0.0, "a", tokens, 5, blocks=blocks)


def prompt(cls: dict[str, Any], request: ScheduledRequest, **values: Any) -> Any:
    return body_of(scenario(cls, **values), request, model="m")["prompt"]


def write_tokenizer(path: Path, words: tuple[str, ...]) -> str:
    """A tokenizer for which ``words`` are one token each and all others as many as they have letters."""
    letters = [prefix + chr(c) for c in range(ord("a"), ord("z") + 1) for prefix in ("", "##")]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(["[UNK]", *letters, *words]))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))
    return str(path)


def test_splitmix64_gives_the_published_numbers_of_seed_0() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(3, dtype=np.uint64)).tolist() == published


SAMPLING = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "min_tokens": 5}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("cls", "path", "body"),
    [
        ({}, "/v1/completions", {"model": "m", "prompt": ..., **SAMPLING, **STREAM}),
        ({"stream": False}, "/v1/completions", {"model": "m", "prompt": ..., **SAMPLING, "stream": False}),
        (TEXT | {"endpoint": "chat"}, "/v1/chat/completions", {"model": "m", "messages": ..., **SAMPLING, **STREAM}),
        (TEXT | {"endpoint": "generate"}, "/generate", {"prompt": ..., **SAMPLING, "stream": True}),
        (
            TEXT | {"ignore_eos": False, "temperature": 0.7, "extra_body": {"max_tokens": 1, "top_k": 3}},
            "/v1/completions",
            {"model": "m", "prompt": ..., "max_tokens": 1, "temperature": 0.7, "top_k": 3, **STREAM},
        ),
        ({"model": "tuned"}, "/v1/completions", {"model": "tuned", "prompt": ..., **SAMPLING, **STREAM}),
        (
            TEXT | {"endpoint": "generate", "model": "tuned"},
            "/generate",
            {"model": "tuned", "prompt": ..., **SAMPLING, "stream": True},
        ),
        (
            TEXT | {"endpoint": "chat", "tools": [TOOL], "tool_choice": "auto", "extra_body": {"parallel_tool_calls": False}},
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": ...,
                "tools": [TOOL],
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                **SAMPLING,
                **STREAM,
            },
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": False},
            "/v1/completions",
            {
                "model": "m",
                "prompt": ...,
                "response_format": {"type": "json_object"},
                "max_tokens": 5,
                "temperature": 0.0,
                **STREAM,
            },
        ),
    ],
)
def test_each_endpoint_gets_the_fields_it_knows(cls: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    made = scenario(cls)
    given_body = body_of(made, asked(), model="m")
    assert {key: ... if key in ("prompt", "messages") else value for key, value in given_body.items()} == (
        {key: ... if key in ("prompt", "messages") else value for key, value in body.items()}
    )
    assert path_of(made.requests[0]) == path
    assert json.loads(json.dumps(given_body)) == given_body  # plain numbers, not numpy's


def test_usage_final_asks_by_the_one_field_that_every_server_knows() -> None:
    made = body_of(scenario({"usage": "final"}), asked(), model="m")
    assert made["stream_options"] == {"include_usage": True}


def test_a_chat_prompt_is_the_user_s_message() -> None:
    (message,) = body_of(scenario(TEXT | {"endpoint": "chat"}), asked(tokens=30), model="m")["messages"]
    assert message["role"] == "user"
    assert set(message["content"].split()) <= set(WORDS)
    assert message["content"].count(" ") == 29


@given(first=st.integers(0, 50), width=st.integers(0, 300), tokens=st.integers(1, 3000), number=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_token_ids_are_as_many_as_asked_and_in_range(first: int, width: int, tokens: int, number: int) -> None:
    ids = prompt({"token_ids": [first, first + width]}, asked(number, tokens=tokens))
    assert len(ids) == tokens
    assert first <= min(ids)
    assert max(ids) <= first + width


def test_a_prompt_depends_on_seed_class_and_id_only() -> None:
    ids = prompt({}, asked(3))
    assert prompt({"temperature": 1}, asked(3), workers=9, duration_s=99) == ids
    assert prompt({}, asked(3, tokens=5)) == ids[:5]
    assert prompt({}, asked(3), seed=8) != ids
    assert len({tuple(prompt({}, asked(number))) for number in range(500)}) == 500


def test_random_ids_use_their_whole_range_evenly() -> None:
    counts = np.bincount(prompt({"token_ids": [0, 9]}, asked(tokens=100_000)), minlength=10)
    assert counts.min() > 9600  # 10,000 each; the standard deviation is 95
    assert counts.max() < 10_400


def test_requests_share_their_class_s_prefix_and_nothing_more() -> None:
    one, two = (prompt({"shared_prefix_tokens": 6}, asked(number, tokens=40)) for number in (1, 2))
    assert one[:6] == two[:6]
    assert one[6:] != two[6:]
    assert prompt({"shared_prefix_tokens": 6}, asked(1, tokens=4)) == one[:4]


def test_equal_block_ids_are_equal_blocks_and_what_they_do_not_cover_is_the_request_s_own() -> None:
    one = prompt({}, asked(1, tokens=1500, blocks=(46, 47)))
    two = prompt({}, asked(2, tokens=1100, blocks=(46, 99)))
    three = prompt({}, asked(3, tokens=700, blocks=(46, 47)))
    assert [len(one), len(two), len(three)] == [1500, 1100, 700]
    assert one[:512] == two[:512]
    assert one[512:600] != two[512:600]
    assert one[1024:1100] != two[1024:1100]
    assert three == one[:700]


def test_text_is_exact_in_the_tokenizer_s_tokens(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", WORDS[::7])
    tokenizer = Tokenizer.from_file(path)
    for number in range(50):
        text = prompt(TEXT, asked(number, tokens=number + 1), tokenizer=path)
        assert len(tokenizer.encode(text).ids) == number + 1


def test_the_hash_of_the_workload_has_the_tokenizer_s_words_in_it_and_not_its_path(tmp_path: Path) -> None:
    few, same = (write_tokenizer(tmp_path / name, WORDS[::7]) for name in ("few.json", "same.json"))
    many = write_tokenizer(tmp_path / "many.json", WORDS)
    made = [make_schedule(scenario(TEXT, tokenizer=path)).sha256 for path in (few, same, many)]
    assert made[0] == made[1] != made[2]
    assert fingerprint(scenario({}, tokenizer=few)) == fingerprint(scenario({}))  # ids need none


def test_a_tokenizer_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    letters = write_tokenizer(tmp_path / "letters.json", ())
    for path, words in (
        ("/nowhere/t.json", "is no file"),
        (str(tmp_path / "broken.json"), "broken.json: "),
        (letters, "has 1 of the common"),
    ):
        with pytest.raises(UsageError) as caught:
            make_schedule(scenario(TEXT, tokenizer=path))
        assert caught.value.where == "tokenizer"
        assert words in caught.value.problem


def test_a_later_turn_is_sent_with_all_that_was_said_before_it() -> None:
    talk = {**TEXT, "endpoint": "chat", "shared_prefix_tokens": 4, "conversation": {}}
    arrival = {"law": "poisson", "rate": 1}
    made = parse_scenario({"name": "test", "seed": 7, "arrival": arrival, "requests": [talk]})
    first, second = asked(0, tokens=3), ScheduledRequest(9, None, "a", 5, 6, after=0)
    begin = body_of(made, first, model="m")["messages"]
    said = answer_messages(Parsed(text="thoughtsan answer", content="an answer"))
    then = body_of(made, second, model="m", before=[(first, said)])["messages"]
    assert [m["role"] for m in then] == ["system", "user", "assistant", "user"]
    assert then[:2] == begin
    assert then[2] == {"role": "assistant", "content": "an answer"}
    assert [len(m["content"].split()) for m in then] == [4, 3, 2, 5]


def test_calls_are_sent_back_as_calls_and_each_has_a_result() -> None:
    calls = [Call("c1", "get_weather", '{"city": "Paris"}'), Call("c2", "now", "")]
    assert answer_messages(Parsed(text="not this", content="", calls=calls)) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"result": "ok"}'},
        {"role": "tool", "tool_call_id": "c2", "content": '{"result": "ok"}'},
    ]


@pytest.mark.parametrize("arguments", ['{"city": "Par', "Paris", "[1]", "[" * 5000])
def test_a_call_that_no_client_could_run_is_left_out(arguments: str) -> None:
    cut, whole = Call("c1", "f", arguments), Call("c2", "g", "{}")
    assert answer_messages(Parsed(content="so far", calls=[cut])) == [{"role": "assistant", "content": "so far"}]
    assert [m.get("tool_call_id") for m in answer_messages(Parsed(calls=[cut, whole]))] == [None, "c2"]


def test_the_recorded_turns_of_a_conversation_have_the_calls_between_them(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": text} for text in ("one", "two")]}) + "\n"
    )
    talk = {**TEXT, "endpoint": "chat", "prompts": "talk.jsonl", "tools": [TOOL], "conversation": {}}
    values = {"name": "test", "arrival": {"law": "poisson", "rate": 1}, "requests": [talk]}
    made = parse_scenario(values, folder=tmp_path)
    said = answer_messages(Parsed(calls=[Call("c1", "get_weather", "{}")]))
    second = ScheduledRequest(9, None, "a", 5, 6, after=0)
    messages = body_of(made, second, model="m", before=[(asked(0), said)])["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "user"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one", "two"]
