from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.links.protocol.errors import MalformedMessage
from serve_app.links.protocol.messages import (
    MAX_KV_BYTES,
    MAX_POINTS_A_DIGEST,
    Abort,
    Add,
    AddSuspect,
    CacheDigest,
    Challenge,
    FreeKv,
    Goodbye,
    HandOver,
    Heartbeat,
    Hello,
    Message,
    Outputs,
    Proof,
    TrialBegins,
    TrialPassed,
    add_message,
    decode_message,
    encode_message,
    opening_version,
)
from tests.protocol import helpers
from tests.protocol.helpers import CAPABILITIES

HELLO = Hello(1, "0.32.0", "ingress-1", "tiny", "ff", b"i" * 32)
CHALLENGE = Challenge(1, "0.32.0", "replica-1", "tiny", "ff", b"r" * 32, b"p" * 32, 8, False, CAPABILITIES)
HEARTBEAT = Heartbeat(1, 2, 3, 0.5, True, 9.5, False)


@given(message=helpers.messages)
def test_every_message_survives_its_encoding(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(message=helpers.messages, extra=st.integers())
def test_a_missing_or_additional_field_is_refused(message: Message, extra: int) -> None:
    fields = msgspec.msgpack.decode(encode_message(message))
    for wrong in (fields[:-1], [*fields, extra % 2**63]):
        with pytest.raises(MalformedMessage):
            decode_message(msgspec.msgpack.encode(wrong))


@given(body=st.binary(max_size=200) | st.binary(max_size=40).map(lambda tail: b"\x93" + tail))
def test_any_bytes_are_a_message_or_malformed(body: bytes) -> None:
    try:
        decode_message(body)
    except MalformedMessage as exc:
        assert exc.problem  # noqa: PT017 - any outcome but these two fails
    opening_version(body)


@given(message=helpers.messages, data=st.data())
def test_a_flipped_bit_gives_a_message_or_malformed(message: Message, data: st.DataObject) -> None:
    body = bytearray(encode_message(message))
    position = data.draw(st.integers(0, 8 * len(body) - 1))
    body[position // 8] ^= 1 << position % 8
    try:
        decode_message(bytes(body))
    except MalformedMessage as exc:
        assert exc.problem  # noqa: PT017


def replaced(message: Message, **changes: Any) -> Message:
    return msgspec.structs.replace(message, **changes)


@pytest.mark.parametrize(
    "message",
    [
        replaced(HELLO, nonce=b"i" * 31),
        replaced(HELLO, nonce=b"i" * 33),
        replaced(HELLO, ingress_id="x" * 257),
        replaced(HELLO, ingress_id=""),
        replaced(HELLO, model="x" * 1025),
        replaced(HELLO, fingerprint="x" * 257),
        replaced(HELLO, vllm_version="x" * 65),
        replaced(HELLO, protocol=-1),
        replaced(CHALLENGE, proof=b""),
        replaced(CHALLENGE, credit=0),
        replaced(CHALLENGE, credit=1_000_001),
        replaced(CHALLENGE, capabilities=msgspec.structs.replace(CAPABILITIES, block_size=0)),
        replaced(CHALLENGE, capabilities=msgspec.structs.replace(CAPABILITIES, tasks=("generate",) * 65)),
        replaced(CHALLENGE, capabilities=msgspec.structs.replace(CAPABILITIES, num_kv_blocks=1 << 63)),
        replaced(CHALLENGE, capabilities=msgspec.structs.replace(CAPABILITIES, tasks=("x" * 65,))),
        Proof(b"p" * 31),
        replaced(HEARTBEAT, kv_usage=1.5),
        replaced(HEARTBEAT, kv_usage=-0.1),
        replaced(HEARTBEAT, kv_usage=float("nan")),
        replaced(HEARTBEAT, step=-1),
        replaced(HEARTBEAT, draining=1),
        replaced(HEARTBEAT, drain_left_s=-0.1),
        replaced(HEARTBEAT, drain_left_s=float("inf")),
        Add("", [b""], 0, b""),
        Add("x" * 257, [b""], 0, b""),
        Add("a", [], 0, b""),
        Add("a", [b""] * 4097, 0, b""),
        Add("a", [b""], -1, b""),
        Add("a", ["text"], 0, b""),  # type: ignore[list-item]
        AddSuspect("", [b""], 0, b""),
        AddSuspect("a", [], 0, b""),
        AddSuspect("a", [b""], -1, b""),
        TrialBegins(""),
        CacheDigest(-1, True, [], []),
        CacheDigest(0, False, [0] * (MAX_POINTS_A_DIGEST + 1), []),
        CacheDigest(0, False, [], [1 << 63]),
        TrialPassed("x" * 257),
        HandOver([]),
        FreeKv([]),
        FreeKv(["x" * 257]),
        Add("r@0", [b"x"], 0, b"k" * (MAX_KV_BYTES + 1)),
        Abort([]),
        Abort(["a"] * 10_001),
        Abort(["x" * 257]),
        Outputs([]),
        Outputs([b""] * 4097),
        Goodbye("", ""),
        Goodbye("Shutdown", ""),
        Goodbye("shut down", ""),
        Goodbye("shutdown\n", ""),
        Goodbye("s" * 65, ""),
        Goodbye("shutdown", "r" * 1001),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_a_message_over_a_limit_is_refused(message: Message) -> None:
    with pytest.raises(MalformedMessage):
        decode_message(encode_message(message))


@pytest.mark.parametrize(
    "body",
    [
        "",  # nothing
        "c1",  # the one byte MessagePack does not use
        "920a",  # ends early
        "910400",  # a Ping and a byte
        "910e",  # no such message
        "91cb3ff0000000000000",  # number 1.0
        "9304a161",
        "8004",  # a map
        "9207ddffffffff",  # 4 G buffers claimed: refused before memory is taken for them
        "920791c6ffffffff",  # a buffer of 4 GB claimed
        "9305a2fffe91c400",  # an id that is not UTF-8
        "91" * 5000,  # nested deeper than the stack
        "9207" + "91" * 5000,
        "92" + "91" * 5000,
    ],
)
def test_malformed_bytes_are_refused(body: str) -> None:
    with pytest.raises(MalformedMessage):
        decode_message(bytes.fromhex(body))
    assert opening_version(bytes.fromhex(body)) is None


@pytest.mark.parametrize(
    "message",
    [Add("\ud800", [b""], 0, b""), Heartbeat(1 << 70, 0, 0, 0.0, False, 0.0, False), Outputs([object()])],  # type: ignore[list-item]
)
def test_what_messagepack_cannot_carry_is_our_own_fault(message: Message) -> None:
    with pytest.raises(MalformedMessage):
        encode_message(message)


def test_all_kinds_of_buffers_are_written_alike() -> None:
    expected = encode_message(Add("a", [b"ab", b"cd", b"ef"], 0, b""))
    assert encode_message(add_message("a", [b"ab", bytearray(b"cd"), memoryview(b"ef")])) == expected


def test_messages_are_checked_when_made_for_sending() -> None:
    assert add_message("a", [b"x"]) == Add("a", [b"x"], 0, b"")
    assert add_message("a", [b"x"], 3, suspect=True) == AddSuspect("a", [b"x"], 3, b"")
    for attempt_id, buffers in (("", [b""]), ("x" * 257, [b""]), ("a", []), ("a", [b""] * 4097)):
        with pytest.raises(MalformedMessage):
            add_message(attempt_id, buffers)


def test_the_version_of_another_protocols_hello_can_be_read() -> None:
    assert opening_version(encode_message(HELLO)) == 1
    assert opening_version(msgspec.msgpack.encode([0, 7, {"new": "layout"}, 5])) == 7
    assert opening_version(msgspec.msgpack.encode([1, 8])) == 8
    assert opening_version(encode_message(Goodbye("shutdown", ""))) is None
