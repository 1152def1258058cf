from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.load import EngineLoad
from serve_app.links.protocol.connection import IngressConnection, LinkState, ReplicaConnection
from serve_app.links.protocol.errors import (
    CreditExceeded,
    DuplicateAttempt,
    FrameTooLarge,
    MalformedMessage,
    PeerClosed,
    UnexpectedMessage,
)
from serve_app.links.protocol.frames import encode_frame
from serve_app.links.protocol.messages import (
    Abort,
    Add,
    AddSuspect,
    CacheDigest,
    FreeKv,
    Goodbye,
    HandOver,
    Heartbeat,
    Message,
    Outputs,
    Ping,
    TrialBegins,
    TrialPassed,
    Wake,
    encode_message,
)
from tests.protocol import helpers
from tests.protocol.helpers import (
    MAX_FRAME_BYTES,
    assert_refused,
    assert_silent,
    cut_at,
    frames_in,
    make_ingress,
    make_replica,
    open_pair,
    outputs,
    play,
)

cuts = st.lists(st.integers(0, 2**20), max_size=12)


def wire_of(messages: list[Message]) -> bytes:
    return b"".join(encode_frame(encode_message(message)) for message in messages)


def replica_side() -> tuple[Callable[[], ReplicaConnection], bytes]:
    """Return a maker of replicas and the handshake bytes that open each of them."""
    ingress, replica = make_ingress(), make_replica(credit=64)
    hello = ingress.initiate()
    replica.receive_data(hello)
    ingress.receive_data(replica.data_to_send())
    return lambda: make_replica(credit=64), hello + ingress.data_to_send()


def ingress_side() -> tuple[Callable[[], IngressConnection], bytes]:
    replica = make_replica()
    replica.receive_data(make_ingress().initiate())

    def make() -> IngressConnection:
        ingress = make_ingress()
        ingress.initiate()
        return ingress

    return make, replica.data_to_send()


REPLICA, TO_REPLICA = replica_side()
INGRESS, TO_INGRESS = ingress_side()
distinct_adds = st.lists(helpers.messages_to_replica, max_size=8, unique_by=lambda m: getattr(m, "attempt_id", id(m)))


@given(conversation=distinct_adds, goodbye=st.lists(helpers.goodbyes, max_size=1), positions=cuts)
def test_any_chunking_gives_the_replica_the_same_messages(
    conversation: list[Message], goodbye: list[Message], positions: list[int]
) -> None:
    wire = TO_REPLICA + wire_of(conversation + goodbye)
    outcome = play(REPLICA(), cut_at(wire, positions), eof=True)
    assert outcome.messages == conversation
    assert outcome == play(REPLICA(), [wire], eof=True)
    assert outcome.error.startswith("PeerClosed") if goodbye else outcome.error == ""


@given(
    conversation=st.lists(helpers.messages_to_ingress, max_size=8),
    goodbye=st.lists(helpers.goodbyes, max_size=1),
    positions=cuts,
)
def test_any_chunking_gives_the_ingress_the_same_messages(
    conversation: list[Message], goodbye: list[Message], positions: list[int]
) -> None:
    wire = TO_INGRESS + wire_of(conversation + goodbye)
    outcome = play(INGRESS(), cut_at(wire, positions), eof=True)
    assert outcome.messages == conversation
    assert outcome == play(INGRESS(), [wire], eof=True)
    assert outcome.error.startswith("PeerClosed") if goodbye else outcome.error == ""


@st.composite
def damaged(draw: st.DrawFn, wire: bytes) -> bytes:
    """Return ``wire`` damaged: bits flipped, cut off, a part repeated or left out, or bytes inserted."""
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(wire))] * 2)))
    match draw(st.sampled_from(["flip", "truncate", "repeat", "omit", "insert"])):
        case "flip":
            changed = bytearray(wire)
            changed[min(start, len(wire) - 1)] ^= draw(st.integers(1, 255))
            return bytes(changed)
        case "truncate":
            return wire[:start]
        case "repeat":
            return wire[:end] + wire[start:]
        case "omit":
            return wire[:start] + wire[end:]
        case _:
            return wire[:start] + draw(st.binary(min_size=1, max_size=40)) + wire[start:]


def assert_safe_end(make: Callable[[], IngressConnection | ReplicaConnection], wire: bytes, positions: list[int]) -> None:
    """Whatever bytes came: any chunking has the same outcome, the link ends closed, and a Goodbye is sent if and only if we refused."""
    connection = make()
    outcome = play(connection, cut_at(wire, positions), eof=True)
    assert outcome == play(make(), [wire], eof=True)
    assert outcome.state is LinkState.CLOSED
    goodbyes = [m for m in frames_in(outcome.sent) if isinstance(m, Goodbye)]
    if outcome.error and not outcome.error.startswith("PeerClosed"):
        assert len(goodbyes) == 1
        assert frames_in(outcome.sent)[-1:] == goodbyes
    else:
        assert goodbyes == []
    assert_silent(connection)


SAMPLE_TO_REPLICA = TO_REPLICA + wire_of(
    [
        Ping(),
        Add("r1@0", [b"prompt", b"tensor"], 0, b""),
        Abort(["r1@0"]),
        Add("r2@0", [b"p"], 0, b""),
        AddSuspect("r3@1", [b"p"], 0, b""),
        TrialPassed("r3@1"),
        HandOver(["r3@1"]),
        FreeKv(["r3@1"]),
        Wake(),
    ]
)
SAMPLE_TO_INGRESS = TO_INGRESS + wire_of(
    [
        Heartbeat(1, 1, 0, 0.25, False, 0.0, False),
        TrialBegins("r3@1"),
        CacheDigest(0, True, [1, -(2**63)], []),
        Outputs([b"o" * 40]),
        Goodbye("shutdown", "drained"),
    ]
)


@settings(max_examples=300)
@given(wire=damaged(SAMPLE_TO_REPLICA), positions=cuts)
def test_a_damaged_stream_to_the_replica_ends_in_a_documented_error(wire: bytes, positions: list[int]) -> None:
    assert_safe_end(REPLICA, wire, positions)


@settings(max_examples=300)
@given(wire=damaged(SAMPLE_TO_INGRESS), positions=cuts)
def test_a_damaged_stream_to_the_ingress_ends_in_a_documented_error(wire: bytes, positions: list[int]) -> None:
    assert_safe_end(INGRESS, wire, positions)


@given(opened=st.booleans(), noise=st.binary(max_size=80), positions=cuts)
def test_noise_ends_in_a_documented_error(opened: bool, noise: bytes, positions: list[int]) -> None:
    for make, handshake in ((REPLICA, TO_REPLICA), (INGRESS, TO_INGRESS)):
        for wire in (noise, encode_frame(noise)):
            assert_safe_end(make, (handshake if opened else b"") + wire, positions)


@given(conversation=st.lists(helpers.messages, min_size=1, max_size=6), opened=st.booleans(), positions=cuts)
def test_any_order_of_valid_messages_ends_in_a_documented_error(
    conversation: list[Message], opened: bool, positions: list[int]
) -> None:
    for make, handshake in ((REPLICA, TO_REPLICA), (INGRESS, TO_INGRESS)):
        assert_safe_end(make, (handshake if opened else b"") + wire_of(conversation), positions)


@given(message=helpers.messages_to_ingress)
def test_the_replica_refuses_what_only_a_replica_may_send(message: Message) -> None:
    _, replica = open_pair()
    with pytest.raises(UnexpectedMessage) as refused:
        replica.receive_data(wire_of([message]))
    assert_refused(replica, refused.value)


@given(message=helpers.messages_to_replica)
def test_the_ingress_refuses_what_only_an_ingress_may_send(message: Message) -> None:
    ingress, _ = open_pair()
    with pytest.raises(UnexpectedMessage) as refused:
        ingress.receive_data(wire_of([message]))
    assert_refused(ingress, refused.value)


def test_what_came_before_the_fault_can_still_be_used() -> None:
    ingress, replica = open_pair()
    wire = outputs(b"last") + replica.close("shutdown", "drained")
    with pytest.raises(PeerClosed) as closed:
        ingress.receive_data(wire)
    assert (closed.value.peer_code, closed.value.reason) == ("shutdown", "drained")
    assert ingress.undelivered == [Outputs([b"last"])]


def test_a_duplicate_add_is_refused() -> None:
    _, replica = open_pair()
    with pytest.raises(DuplicateAttempt) as refused:
        replica.receive_data(wire_of([Add("a", [b"x"], 0, b""), Add("a", [b"x"], 0, b"")]))
    assert refused.value.attempt_id == "a"
    assert replica.undelivered == [Add("a", [b"x"], 0, b"")]
    assert_refused(replica, refused.value)


def test_one_add_too_many_is_refused() -> None:
    _, replica = open_pair(credit=2)
    assert len(replica.receive_data(wire_of([Add("a", [b"x"], 0, b""), Add("b", [b"x"], 0, b"")]))) == 2
    with pytest.raises(CreditExceeded) as refused:
        replica.receive_data(wire_of([Add("c", [b"x"], 0, b"")]))
    assert refused.value.limit == 2
    assert_refused(replica, refused.value)


def test_a_finished_attempt_gives_its_credit_back() -> None:
    ingress, replica = open_pair(credit=1)
    replica.receive_data(ingress.send_add("a", [b"x"]))
    replica.attempt_finished("a")
    ingress.attempt_finished("a")
    ingress.attempt_finished("never added")
    assert replica.receive_data(ingress.send_add("b", [b"x"])) == [Add("b", [b"x"], 0, b"")]


def test_an_aborted_attempt_gives_its_credit_back_before_the_next_message_is_looked_at() -> None:
    ingress, replica = open_pair(credit=1)
    wire = ingress.send_add("a", [b"x"]) + ingress.send_abort(["a", "unknown"]) + ingress.send_add("b", [b"x"])
    assert replica.receive_data(wire) == [Add("a", [b"x"], 0, b""), Abort(["a", "unknown"]), Add("b", [b"x"], 0, b"")]
    assert ingress.attempts == replica.attempts == {"b"}


def test_the_ingress_refuses_its_own_faults_and_the_link_stays_open() -> None:
    ingress, replica = open_pair(credit=2)
    wire = ingress.send_add("a", [b"x"])
    with pytest.raises(DuplicateAttempt):
        ingress.send_add("a", [b"x"])
    with pytest.raises(FrameTooLarge):
        ingress.send_add("b", [b"x" * MAX_FRAME_BYTES])
    for attempt_id, buffers in (("", [b"x"]), ("b", []), ("\ud800", [b"x"])):
        with pytest.raises(MalformedMessage):
            ingress.send_add(attempt_id, buffers)
    with pytest.raises(MalformedMessage):
        ingress.close("not a code", "")
    wire += ingress.send_add("b", [b"x"])
    with pytest.raises(CreditExceeded):
        ingress.send_add("c", [b"x"])
    assert (ingress.state, ingress.attempts, ingress.data_to_send()) == (LinkState.OPEN, {"a", "b"}, b"")
    assert replica.receive_data(wire) == [Add("a", [b"x"], 0, b""), Add("b", [b"x"], 0, b"")]


def test_the_replica_refuses_its_own_faults_and_the_link_stays_open() -> None:
    ingress, replica = open_pair()
    with pytest.raises(MalformedMessage):
        replica.send_heartbeat(EngineLoad(1, kv_usage=1.5))
    assert ingress.receive_data(replica.send_trial_begins("a")) == [TrialBegins("a")]


def test_every_message_of_an_open_link_arrives() -> None:
    ingress, replica = open_pair()
    wire = ingress.ping() + ingress.send_add("a", [b"x", memoryview(b"y")])
    assert replica.receive_data(wire) == [Ping(), Add("a", [b"x", b"y"], 0, b"")]
    wire = replica.send_heartbeat(EngineLoad(5, 1, 2, 0.5), drain_left_s=7.5)
    wire += outputs(b"o") + replica.send_digest(3, False, (1, 2), (-3,))
    assert ingress.receive_data(wire) == [
        Heartbeat(5, 1, 2, 0.5, True, 7.5, False),
        Outputs([b"o"]),
        CacheDigest(3, False, [1, 2], [-3]),
    ]


def test_a_suspect_counts_as_an_attempt_and_the_words_of_its_trial_arrive() -> None:
    ingress, replica = open_pair(credit=1)
    assert replica.receive_data(ingress.send_add("a", [b"x"], suspect=True)) == [AddSuspect("a", [b"x"], 0, b"")]
    assert ingress.attempts == replica.attempts == {"a"}
    with pytest.raises(CreditExceeded):
        ingress.send_add("b", [b"x"], suspect=True)
    with pytest.raises(DuplicateAttempt):
        ingress.send_add("a", [b"x"], suspect=True)
    assert ingress.receive_data(replica.send_trial_begins("a")) == [TrialBegins("a")]
    assert replica.receive_data(ingress.send_trial_passed("a")) == [TrialPassed("a")]
    assert ingress.attempts == replica.attempts == {"a"}


def test_an_attempt_that_is_handed_over_counts_until_its_last_output_and_its_kv_goes_with_the_next_add() -> None:
    ingress, replica = open_pair(credit=1)
    replica.receive_data(ingress.send_add("a", [b"x"]))
    assert replica.receive_data(ingress.send_hand_over("a")) == [HandOver(["a"])]
    assert ingress.attempts == replica.attempts == {"a"}
    for end in (ingress, replica):
        end.attempt_finished("a")
    assert replica.receive_data(ingress.send_add("b", [b"x"], 7, kv=b"k")) == [Add("b", [b"x"], 7, b"k")]
    assert replica.receive_data(ingress.send_free_kv("a")) == [FreeKv(["a"])]
    assert replica.receive_data(ingress.send_wake()) == [Wake()]


def test_a_long_abort_is_sent_in_parts_and_an_empty_one_not_at_all() -> None:
    ingress, replica = open_pair()
    ids = [f"{i}" for i in range(10_001)]
    assert replica.receive_data(ingress.send_abort(ids)) == [Abort(ids[:10_000]), Abort(ids[10_000:])]
    assert ingress.send_abort([]) == b""


def test_closing_says_why_once_and_nothing_is_sent_after_it() -> None:
    ingress, replica = open_pair()
    assert frames_in(replica.close("shutdown", "x\ud800" * 600)) == [Goodbye("shutdown", "x?" * 500)]
    with pytest.raises(UnexpectedMessage) as refused:
        replica.send_heartbeat(EngineLoad(1))
    assert (refused.value.message, refused.value.state) == ("Heartbeat", "closed")
    with pytest.raises(UnexpectedMessage):
        replica.close("shutdown", "") or replica.send_trial_begins("a")
    assert_silent(replica)
    ingress.close("shutdown", "")
    with pytest.raises(UnexpectedMessage):
        ingress.send_add("a", [b"x"])
    assert ingress.attempts == set()


def test_the_end_of_the_stream_between_frames_closes_quietly() -> None:
    for connection in open_pair():
        connection.eof_received()
        assert connection.data_to_send() == b""
        assert_silent(connection)


def test_the_end_of_the_stream_inside_a_frame_is_an_error() -> None:
    ingress, replica = open_pair()
    for connection, wire in ((replica, ingress.ping()), (ingress, outputs(b"x"))):
        assert connection.receive_data(wire[:-1]) == []
        with pytest.raises(MalformedMessage) as refused:
            connection.eof_received()
        assert_refused(connection, refused.value)


def test_a_frame_over_the_limit_of_the_link_is_refused_at_its_length() -> None:
    for connection in open_pair():
        with pytest.raises(FrameTooLarge) as refused:
            connection.receive_data((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert (refused.value.size_bytes, refused.value.limit_bytes) == (MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES)
        assert_refused(connection, refused.value)
