"""These tests parse wires written by hand with `loadtest.wire.sse`; expected times and counts are counted by hand."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.wire.sse import BodyParser, Call, Form, Parsed, error_message

DONE = b"data: [DONE]\n\n"


def parse_stream(reads: Sequence[tuple[float, bytes]], *, form: Form = "sse", ended: bool = True) -> Parsed:
    """Parse a body at once: what each read held, with its time."""
    parser = BodyParser(form)
    for at_s, data in reads:
        parser.feed(at_s, data)
    return parser.finish(reads[-1][0] if reads else 0.0, ended=ended)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def completion(text: str, *, total: int | None = None, finish: str | None = None) -> bytes:
    usage = None if total is None else {"prompt_tokens": 7, "completion_tokens": total}
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage})


def usage_only(total: int) -> bytes:
    return event({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": total}})


def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return event({"id": "chat-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


@pytest.mark.parametrize("per_chunk", [1, 4, 16])
def test_known_chunk_times_and_counts_come_back(per_chunk: int) -> None:
    times = [0.1 + 0.02 * k for k in range(32 // per_chunk)]
    reads = [(t, completion("w" * per_chunk, total=(k + 1) * per_chunk)) for k, t in enumerate(times)]
    parsed = parse_stream([*reads, (0.9, usage_only(32)), (0.95, DONE)])
    assert parsed == Parsed(
        complete=True,
        done_s=0.95,
        first_s=times[0],
        last_s=times[-1],
        chunks=[(t, per_chunk) for t in times],
        prompt_tokens=7,
        output_tokens=32,
        text="w" * 32,
        server_id="cmpl-1",
    )


def test_two_events_in_one_read_are_one_chunk_and_counted_as_coalesced() -> None:
    parsed = parse_stream([(1.0, completion("a")), (2.0, completion("b") + completion("c") + completion("d")), (3.0, DONE)])
    assert (parsed.chunks, parsed.num_coalesced, parsed.text) == ([(1.0, 1), (2.0, 3)], 1, "abcd")


def test_the_last_token_with_usage_and_done_in_one_read_is_not_coalesced() -> None:
    parsed = parse_stream([(1.0, completion("a")), (2.0, completion("b", finish="length") + usage_only(2) + DONE)])
    assert (parsed.num_coalesced, parsed.chunks, parsed.done_s) == (0, [(1.0, 1), (2.0, 1)], 2.0)


def test_an_event_split_byte_by_byte_has_the_time_of_its_last_byte() -> None:
    wire = completion("é世🙂") + completion("b")
    end = len(completion("é世🙂")) - 1
    parsed = parse_stream([(float(i), wire[i : i + 1]) for i in range(len(wire))], ended=False)
    assert (parsed.chunks, parsed.text) == ([(float(end), 1), (float(len(wire) - 1), 1)], "é世🙂b")


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n", b"\r\r", b"\r\r\n", b"\n\r"])
def test_events_end_at_a_blank_line_of_any_kind(blank: bytes) -> None:
    wire = completion("a").removesuffix(b"\n\n") + blank + b"data:[DONE]" + blank
    parsed = parse_stream([(1.0, wire)])
    assert (parsed.text, parsed.complete) == ("a", True)


def test_an_event_of_a_server_that_writes_cr_alone_has_the_time_of_its_own_read() -> None:
    wires = [completion(text).replace(b"\n", b"\r") for text in "ab"]
    parsed = parse_stream([(1.0, wires[0]), (2.0, b""), (3.0, wires[1]), (4.0, DONE.replace(b"\n", b"\r"))])
    assert (parsed.chunks, parsed.text, parsed.complete, parsed.done_s) == ([(1.0, 1), (3.0, 1)], "ab", True, 4.0)


def test_a_crlf_that_is_cut_in_two_is_one_line_end() -> None:
    wire = completion("a").replace(b"\n", b"\r\n") + b'data: {"choices": [\r\ndata: {"text": "b"}]}\r\n\r\n' + DONE
    reads = [(float(i), wire[i : i + 1]) for i in range(len(wire))]
    assert parse_stream(reads).text == parse_stream([(1.0, wire)]).text == "ab"


def test_comments_fields_and_several_data_lines_are_read_as_the_standard_says() -> None:
    wire = b': ping\n\nevent: message\nid: 3\nretry: 10\ndata: {"choices": [\ndata: {"text": "a"}]}\n\n' + DONE
    parsed = parse_stream([(1.0, wire)])
    assert (parsed.text, parsed.error, parsed.complete) == ("a", "", True)


def test_a_stream_that_was_held_begins_with_its_first_token_and_no_comment() -> None:
    parsed = parse_stream([(5.0, b": waiting\n\n"), (10.0, b": waiting\n\n"), (12.0, b": waiting\n\n" + completion("a") + DONE)])
    assert (parsed.first_s, parsed.chunks, parsed.text, parsed.error) == (12.0, [(12.0, 1)], "a", "")


def test_reasoning_content_and_tool_calls_are_generated_and_roles_are_not() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"x":1}'}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "think"},
        {"reasoning": "ing"},
        {"content": "answer"},
        {"tool_calls": [call]},
        {"tool_calls": [more]},
    ]
    reads = [(float(i), chat(delta)) for i, delta in enumerate(deltas)]
    parsed = parse_stream([*reads, (6.0, chat({}, finish="tool_calls")), (7.0, usage_only(9) + DONE)])
    assert parsed.chunks == [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1)]
    assert (parsed.text, parsed.first_s, parsed.finish_reason) == ('thinkinganswerf{"x":1}', 1.0, "tool_calls")
    assert (parsed.output_tokens, parsed.server_id) == (9, "chat-1")


def test_what_a_client_sends_back_is_the_content_and_the_calls_each_joined_from_its_pieces() -> None:
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x"'}}
    second = {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    again = {"index": 0, "id": "c9", "function": {"name": "f", "arguments": ": 1}"}}  # as some servers continue a call
    deltas: list[dict[str, Any]] = [{"reasoning": "think"}, {"content": "an "}, {"content": "answer"}, {"tool_calls": [first]}]
    deltas += [{"tool_calls": [second, again]}, {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}]
    parsed = parse_stream([(1.0, b"".join(chat(delta) for delta in deltas) + chat({}, finish="tool_calls") + DONE)])
    assert (parsed.content, parsed.calls) == ("an answer", [Call("c1", "f", '{"x": 1}'), Call("c2", "g", "{}")])


def test_the_first_piece_of_a_call_is_a_first_token() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    parsed = parse_stream([*((float(i), chat(delta)) for i, delta in enumerate(deltas, 1)), (4.0, DONE)])
    assert (parsed.first_s, parsed.chunks, parsed.content) == (2.0, [(2.0, 1), (3.0, 1)], "")


def test_calls_of_a_whole_body_have_no_index_and_are_as_many_as_they_are() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}).encode()
    parsed = parse_stream([(1.0, body)], form="whole")
    assert (parsed.content, parsed.calls) == ("", [Call("a", "a", "{}"), Call("b", "b", "{}")])


def test_tokens_whose_text_is_held_back_count_at_the_first_payload_and_later_where_they_came() -> None:
    reads = [(1.0, completion("", total=1)), (2.0, completion("é", total=2)), (3.0, completion("", total=3, finish="stop"))]
    parsed = parse_stream([*reads, (4.0, DONE)])
    assert (parsed.first_s, parsed.chunks, parsed.last_s) == (2.0, [(2.0, 2), (3.0, 1)], 3.0)


def test_an_answer_of_special_tokens_alone_still_has_times() -> None:
    parsed = parse_stream([(1.0, completion("", total=1)), (2.0, completion("", total=2)), (3.0, DONE)])
    assert (parsed.first_s, parsed.chunks, parsed.text) == (1.0, [(1.0, 1), (2.0, 1)], "")


def test_a_total_that_comes_only_with_the_empty_last_event_is_not_laid_on_it() -> None:
    parsed = parse_stream(
        [(1.0, completion("ab")), (2.0, completion("cd")), (3.0, completion("", total=4, finish="stop") + DONE)]
    )
    assert (parsed.chunks, parsed.output_tokens) == ([(1.0, 1), (2.0, 1)], 4)


def test_the_text_is_that_of_the_first_choice() -> None:
    both = [{"index": 1, "text": "x"}, {"index": 0, "text": "a"}]
    assert parse_stream([(1.0, event({"choices": both}) + DONE)]).text == "a"


def test_one_event_with_all_tokens_counts_them_all() -> None:
    assert parse_stream([(1.0, completion("abcd", total=4, finish="length") + DONE)]).chunks == [(1.0, 4)]


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b'data: {"error": {"message": "engine died", "code": 500}}\n\n', "engine died"),
        (b'data: {"error": "engine died"}\n\n', "engine died"),
        (b'data: {"object": "error", "message": "engine died", "code": 500}\n\n', "engine died"),
        (b'event: error\ndata: {"detail": "engine died"}\n\n', "engine died"),
        (b'data: {"choices": 3}\n\n', 'Expected `array | null`, got `int` - at `$.choices`: {"choices": 3}'),
        (b"data: \xff\n\n", "JSON is malformed: invalid character (byte 1): \ufffd"),
    ],
)
def test_an_error_event_is_an_error_even_when_done_follows(wire: bytes, message: str) -> None:
    parsed = parse_stream([(1.0, completion("a")), (2.0, wire + DONE)])
    assert (parsed.text, parsed.error, parsed.chunks) == ("a", message, [(1.0, 1)])


def test_each_choice_has_a_continuous_usage_of_its_own() -> None:
    """With n: 2, vLLM streams an event for each choice with that choice's tokens so far, and the sum in the last usage."""

    def of_choice(index: int, text: str, total: int) -> bytes:
        usage = {"prompt_tokens": 7, "completion_tokens": total}
        return event({"choices": [{"index": index, "text": text}], "usage": usage})

    pieces = [(0, "a", 1), (1, "x", 1), (0, "bc", 3), (0, "d", 4), (1, "y", 2), (0, "e", 5), (1, "zz", 4)]
    reads = [(float(k), of_choice(*piece)) for k, piece in enumerate(pieces)]
    whole = parse_stream([*reads, (7.0, usage_only(9) + DONE)])
    assert (whole.error, whole.text, whole.output_tokens) == ("", "abcde", 9)
    assert whole.chunks == [(0.0, 1), (1.0, 1), (2.0, 2), (3.0, 1), (4.0, 1), (5.0, 1), (6.0, 2)]
    cut = parse_stream(reads[:4])
    assert (cut.error, cut.output_tokens, sum(num for _, num in cut.chunks)) == ("", 5, 5)
    fell = parse_stream([*reads[:4], (4.0, of_choice(0, "f", 3) + DONE)])
    assert fell.error == "usage.completion_tokens fell from 4 to 3"
    many = parse_stream([(float(k), of_choice(k, "a", 90_000_000)) for k in range(2)] + [(2.0, DONE)])
    assert (many.error, many.output_tokens) == ("usage.completion_tokens of all choices are more than 100000000", 90_000_000)


def test_a_stream_cut_without_done_is_incomplete_and_what_follows_done_is_ignored() -> None:
    assert not parse_stream([(1.0, completion("a") + b"data: [DONE]\n")]).complete
    assert parse_stream([(1.0, DONE + completion("late"))]).text == ""
    assert parse_stream([]) == Parsed()


def test_lines_of_generate_hold_the_text_so_far() -> None:
    lines = [b'{"text": ["Hi a"]}\n', b'{"text": ["Hi ab"]}\n', b'{"text": ["Hi ab"]}\n{"text": ["Hi abc"]}']
    reads = [(float(i), line) for i, line in enumerate(lines)]
    parsed = parse_stream(reads, form="lines")
    assert (parsed.text, parsed.complete, parsed.chunks) == ("Hi abc", True, [(0.0, 1), (1.0, 1), (2.0, 1)])
    cut = parse_stream(reads, form="lines", ended=False)
    assert (cut.text, cut.complete) == ("Hi ab", False)
    assert parse_stream([(0.0, b'{"error": {"message": "boom"}}\n')], form="lines").error == "boom"


def test_a_whole_body_arrives_with_its_last_byte() -> None:
    body = json.dumps(
        {
            "id": "chat-2",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
        }
    ).encode()
    parsed = parse_stream([(1.0, body[:20]), (2.0, body[20:])], form="whole")
    assert (parsed.first_s, parsed.last_s, parsed.chunks, parsed.text) == (2.0, 2.0, [(2.0, 5)], "hello")
    assert parse_stream([(1.0, b'{"text": ["Hi there"]}')], form="whole").text == "Hi there"
    assert parse_stream([(1.0, b'{"status": "fine"}')], form="whole").error == 'neither choices nor text: {"status": "fine"}'
    assert not parse_stream([(1.0, body[:20])], form="whole", ended=False).complete


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "full"}}', "full"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>\n  <h1>502</h1>", "<html> <h1>502</h1>"),
        (b"[1]", "[1]"),
        (b"", ""),
    ],
)
def test_the_message_of_an_error_body(body: bytes, message: str) -> None:
    assert error_message(body) == message


@given(
    data=st.data(),
    texts=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8),
    form=st.sampled_from(["sse", "lines"]),
)
def test_any_split_gives_the_same_text_tokens_and_order(data: st.DataObject, texts: list[str], form: Form) -> None:
    if form == "sse":
        kinds = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])
        ends = data.draw(st.lists(kinds, min_size=len(texts), max_size=len(texts)))
        pieces = [b": ping\n" + completion(text).removesuffix(b"\n\n") + end for text, end in zip(texts, ends, strict=True)]
        tail = DONE
    else:
        pieces = [json.dumps({"text": [sofar]}).encode() + b"\n" for sofar in accumulate(texts)]
        tail = b""
    wire = b"".join(pieces) + tail
    cuts = sorted({*data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=20)), len(wire)})
    reads = [(float(i), wire[start:end]) for i, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False))]
    parsed = parse_stream(reads, form=form)
    # The read that holds the byte that ends an event, of CRLF the CR: the first whose end is not before it.
    ends_at = (end - piece.endswith(b"\r\n") for end, piece in zip(accumulate(map(len, pieces)), pieces, strict=True))
    seen = Counter(float(bisect_left(cuts, end)) for end in ends_at)
    assert (parsed.text, parsed.chunks, parsed.complete) == ("".join(texts), sorted(seen.items()), True)
    assert parsed.num_coalesced == sum(count > 1 for count in seen.values())


@pytest.mark.parametrize(
    ("form", "body", "said"),
    [
        ("sse", DONE, "without a token"),
        ("sse", event({"choices": []}) + DONE, "without a token"),
        ("whole", b"", "without a token"),
        ("sse", completion("a", total=-5) + DONE, "completion_tokens"),
        ("sse", completion("a", total=10**12) + DONE, "completion_tokens"),
        ("sse", completion("a", total=4) + completion("b", total=1) + DONE, "fell from 4 to 1"),
        ("sse", b'data: {"id": ' + b"[" * 3000 + b"]" * 3000 + b"}\n\n" + DONE, "`id`|id"),
    ],
)
def test_what_no_server_should_send_is_an_error_of_the_stream(form: Form, body: bytes, said: str) -> None:
    parsed = parse_stream([(1.0, body)], form=form)
    assert any(part in parsed.error for part in said.split("|")), parsed.error


def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it() -> None:
    assert parse_stream([(1.0, b"\xef\xbb\xbf" + completion("a")), (2.0, DONE)]).text == "a"


def test_a_deeply_nested_error_body_is_shown_as_it_is() -> None:
    assert error_message(b"[" * 5000 + b"]" * 5000).startswith("[[[")
