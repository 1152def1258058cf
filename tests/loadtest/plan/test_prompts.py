"""These tests check prompts of a file: the record of each request, the messages that are sent, and refusals."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from loadtest.errors import UsageError
from loadtest.plan.prompts import PromptRecord, prompts_digest, read_prompts
from loadtest.plan.request_class import RECORDED
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.plan.workload import answer_messages, body_of, fingerprint
from loadtest.wire.sse import Parsed

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "one two"},
            {"from": "gpt", "value": "x"},
            {"from": "human", "value": "three"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
    {"id": "c", "conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "four five six"}]},
]
RECORDS = (PromptRecord("", ("one two", "three")), PromptRecord("be brief", ("four five six",)))
MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "three"},
        ]
    },
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "four five six"}]},
]


def written(folder: Path, kind: str) -> Path:
    """Write the same records as a file of a kind."""
    path = folder / f"prompts.{kind.split('-')[0]}"
    match kind:
        case "json":
            path.write_text(json.dumps(SHAREGPT, indent=1))
        case "jsonl":
            path.write_text("\n".join(json.dumps(record) for record in MESSAGES))
        case "parquet":
            parquet.write_table(pa.Table.from_pylist(MESSAGES), path)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_each_kind_of_file_gives_the_same_records(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    assert read_prompts(path) == RECORDS
    assert prompts_digest(path) == prompts_digest(written(tmp_path, "json"))


def test_single_prompts_and_a_column_of_them(tmp_path: Path) -> None:
    lines, column = tmp_path / "lines.jsonl", tmp_path / "column.parquet"
    lines.write_text('{"prompt": "a"}\n"b"\n\n')
    parquet.write_table(pa.table({"prompt": ["a", "b"], "other": [1, 2]}), column)
    assert read_prompts(lines) == read_prompts(column) == (PromptRecord("", ("a",)), PromptRecord("", ("b",)))


def test_a_record_with_calls_of_tools_and_parts_of_text_counts_as_what_its_user_said(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": "three"},
    ]
    shared = [{"from": "human", "value": "one"}, {"from": "function_call", "value": {"name": "f"}}, {"from": "gpt"}]
    path = tmp_path / "tools.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in ({"messages": messages}, {"conversations": shared})))
    assert read_prompts(path) == (PromptRecord("be brief", ("one\ntwo", "three")), PromptRecord("", ("one",)))


@pytest.mark.parametrize(
    "before", [b"", b"\xef\xbb\xbf", b"\n", b"\xef\xbb\xbf \r\n" + b" " * 5000], ids=["none", "mark", "blank", "both"]
)
def test_a_list_may_be_one_long_line_behind_blanks_and_a_byte_order_mark(
    tmp_path: Path, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "compact.json"
    path.write_bytes(before + json.dumps(SHAREGPT).encode())
    monkeypatch.setattr("loadtest.inputs.MAX_LINE_CHARS", 100)
    assert read_prompts(path) == RECORDS


@pytest.mark.parametrize("content", ['["a", "b", "c"]', '"a"\n"b"\n"c"\n'])
def test_a_file_of_too_many_records_is_refused_and_not_cut(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.json"
    path.write_text(content)
    monkeypatch.setattr("loadtest.plan.prompts.MAX_RECORDS", 2)
    with pytest.raises(UsageError, match="has more than 2 records; cut it"):
        read_prompts(path)


def scenario(file: Path, cls: dict[str, Any], **arrival: Any) -> Scenario:
    law = arrival or {"law": "poisson", "rate": 20}
    requests = [{"name": "a", "prompt": "text", "prompts": file.name, **cls}]
    return parse_scenario({"name": "t", "seed": 3, "arrival": law, "duration_s": 10, "requests": requests}, folder=file.parent)


def test_a_request_is_as_long_as_its_record_and_sends_it(tmp_path: Path) -> None:
    made = scenario(written(tmp_path, "json"), {"output_tokens": {"mean": 5}})
    requests = make_schedule(made).requests
    sent = Counter((body_of(made, request, model="m")["prompt"], request.input_tokens) for request in requests)
    assert sent.keys() == {("one two", 2), ("four five six", 3)}
    assert min(sent.values()) > 0.3 * len(requests), "each record has its share"
    assert make_schedule(made).requests == requests


@pytest.mark.parametrize(
    "arrival", [{"law": "closed", "concurrency": 4, "max_requests": 300}, {"law": "burst", "max_requests": 300}]
)
def test_each_text_is_tokenized_once_however_many_requests_say_it(
    tmp_path: Path, arrival: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counter[str]()

    def tokens_of(_: Scenario, text: str) -> int:
        counted[text] += 1
        return len(text)

    monkeypatch.setattr("loadtest.plan.schedule.tokens_of", tokens_of)
    requests = make_schedule(scenario(written(tmp_path, "json"), {"output_tokens": {"mean": 5}}, **arrival)).requests
    assert len(requests) == 300
    assert counted == {"one two": 1, "four five six": 1}


def test_a_conversation_says_its_record_turn_by_turn_and_ends_with_it(tmp_path: Path) -> None:
    made = scenario(written(tmp_path, "jsonl"), {"endpoint": "chat", "conversation": {"turns": {"mean": 4}}})
    requests = make_schedule(made).requests
    assert [request.id for request in requests] == list(range(len(requests)))
    later = {request.after: request for request in requests if request.after is not None}
    told = Counter[str]()
    for first in (request for request in requests if request.after is None):
        messages = body_of(made, first, model="m")["messages"]
        told[messages[-1]["content"]] += 1
        if messages[-1]["content"] == "four five six":
            assert messages[0] == {"role": "system", "content": "be brief"}
            assert first.id not in later
        else:
            second = later[first.id]
            assert body_of(made, second, model="m", before=[(first, answer_messages(Parsed(content="yes")))])["messages"] == [
                {"role": "user", "content": "one two"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "three"},
            ]
            assert (second.input_tokens, second.id in later) == (1, False)
    assert len(requests) == told["four five six"] + 2 * told["one two"]


def test_what_the_file_says_is_part_of_the_fingerprint_and_where_it_lies_is_not(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    here, there = written(tmp_path, "json"), written(tmp_path / "other", "json")
    assert fingerprint(scenario(here, {})) == fingerprint(scenario(there, {}))
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(SHAREGPT[:1]))
    assert fingerprint(scenario(here, {})) != fingerprint(scenario(changed, {}))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('[{"conversations": [{"from": "human"}]}]', "record 1: must have conversations (from, value)"),
        ('{"text": "a"}\n', "record 1: must have conversations (from, value)"),
        ('{"messages": [{"role": "user"}]}\n', "what a user or a system says must be text"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n', "what a user or a system says must be text"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}\n', "says must be text"),
        ("[1, 2", "give a list of records, or one record a line"),
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', "wrong.json:3: "),
        ('{"messages": []}\n', "in none of its 1 records does a user say anything"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused_with_what_it_should_be(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        read_prompts(path)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("cls", "arrival", "problem"),
    [
        ({"prompt": "ids"}, {}, "prompts are text"),
        ({"input_tokens": {"mean": 5}}, {}, "input_tokens does nothing beside prompts"),
        ({}, {"law": "trace", "file": "t.csv"}, "arrival.law trace has lengths of its own"),
    ],
)
def test_what_contradicts_a_file_of_prompts_is_refused(
    tmp_path: Path, cls: dict[str, Any], arrival: dict[str, Any], problem: str
) -> None:
    arrival = arrival or {"law": "poisson", "rate": 1}
    values = {"name": "t", "arrival": arrival, "requests": [{"prompt": "text", "prompts": "p.json", **cls}]}
    with pytest.raises(UsageError) as raised:
        parse_scenario(values, folder=tmp_path)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "cls",
    [
        {"prompts": "p.json"},
        {"prompts": "p.json", "endpoint": "chat", "conversation": {}},
        {"endpoint": "chat", "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"endpoint": "chat", "response_format": {"type": "json_object"}, "ignore_eos": False},
        {"prompt": "ids", "shared_prefix_tokens": 16, "cancel_after_s": 1.0},
    ],
    ids=lambda cls: "-".join(cls),
)
def test_a_manifests_scenario_which_has_all_keys_is_read_as_it_was_written(tmp_path: Path, cls: dict[str, Any]) -> None:
    (tmp_path / "p.json").write_text('["a", "b"]')
    values = {"name": "t", "arrival": {"law": "poisson", "rate": 1}, "requests": [{"prompt": "text", **cls}]}
    scenario = parse_scenario(values, folder=tmp_path)
    assert parse_scenario(scenario.model_dump(mode="json"), context=RECORDED) == scenario


def test_a_pipe_to_which_nobody_writes_holds_no_prompts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: is a pipe, a socket or a device"):
        read_prompts(tmp_path / "pipe")
