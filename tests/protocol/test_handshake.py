import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.links.protocol.connection import IngressConnection, LinkState, ReplicaConnection
from serve_app.links.protocol.errors import (
    AuthenticationFailed,
    FingerprintMismatch,
    FrameTooLarge,
    MalformedMessage,
    PeerClosed,
    ProtocolError,
    SlotsExhausted,
    UnexpectedMessage,
    VersionMismatch,
    WrongModel,
)
from serve_app.links.protocol.frames import encode_frame
from serve_app.links.protocol.handshake import MAX_HANDSHAKE_FRAME_BYTES
from serve_app.links.protocol.messages import Add, Challenge, Goodbye, Hello, Message, Ping, Proof, encode_message
from tests.protocol.helpers import (
    CAPABILITIES,
    SHARED,
    assert_refused,
    assert_silent,
    frames_in,
    make_ingress,
    make_replica,
    open_pair,
    play,
)


def frame(message: Message) -> bytes:
    return encode_frame(encode_message(message))


def recorded_handshake() -> tuple[bytes, bytes, bytes]:
    """Return the frames of Hello, Challenge and Proof."""
    ingress, replica = make_ingress(), make_replica()
    hello = ingress.initiate()
    replica.receive_data(hello)
    challenge = replica.data_to_send()
    ingress.receive_data(challenge)
    return hello, challenge, ingress.data_to_send()


HELLO, CHALLENGE, PROOF = recorded_handshake()


def refusal(connection: IngressConnection | ReplicaConnection, wire: bytes) -> ProtocolError:
    connection.data_to_send()
    with pytest.raises(ProtocolError) as refused:
        connection.receive_data(wire)
    assert_refused(connection, refused.value)
    return refused.value


def initiated(**changes: Any) -> IngressConnection:
    ingress = make_ingress(**changes)
    ingress.initiate()
    return ingress


def greeted(**changes: Any) -> ReplicaConnection:
    replica = make_replica(**changes)
    replica.receive_data(HELLO)
    replica.data_to_send()
    return replica


def test_both_sides_know_each_other_once_the_link_is_open() -> None:
    ingress, replica = open_pair()
    assert replica.peer == Hello(1, "0.32.0", "ingress-1", "tiny", "f" * 64, b"i" * 32)
    assert ingress.peer is not None
    assert msgspec.structs.replace(ingress.peer, proof=b"") == Challenge(
        1, "0.32.0", "replica-1", "tiny", "f" * 64, b"r" * 32, b"", 8, False, CAPABILITIES
    )


def test_nothing_is_believed_before_the_proof() -> None:
    replica = greeted()
    assert (replica.state, replica.peer) == (LinkState.HANDSHAKE, None)


def test_the_proofs_are_hmac_sha256_over_role_and_both_frames() -> None:
    """Computed here as RFC 2104 defines HMAC, from two plain hashes."""
    unsigned = frame(msgspec.structs.replace(frames_in(CHALLENGE)[0], proof=b""))
    key = SHARED["token"].ljust(64, b"\0")

    def mac(role: bytes) -> bytes:
        inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + role + HELLO + unsigned).digest()
        return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()

    challenge, proof = frames_in(CHALLENGE + PROOF)
    assert isinstance(challenge, Challenge)
    assert challenge.proof == mac(b"serve-app replica 1\0")
    assert proof == Proof(mac(b"serve-app ingress 1\0"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vllm_version": "0.34.0"}, VersionMismatch(ours="0.34.0", theirs="0.32.0", what="vllm")),
        ({"model": "other"}, WrongModel(ours="other", theirs="tiny")),
        ({"fingerprint": "e" * 64}, FingerprintMismatch(model="tiny", ours="e" * 64, theirs="f" * 64)),
    ],
)
def test_the_replica_refuses_another_peer_with_the_reason_and_the_ingress_hears_it(
    changes: dict[str, Any], expected: ProtocolError
) -> None:
    replica, ingress = make_replica(**changes), make_ingress()
    with pytest.raises(type(expected)) as refused:
        replica.receive_data(ingress.initiate())
    assert repr(refused.value) == repr(expected)
    with pytest.raises(PeerClosed) as closed:
        ingress.receive_data(replica.data_to_send())
    assert (closed.value.peer_code, closed.value.reason) == (expected.code, str(expected))
    assert ingress.data_to_send() == b""
    assert_silent(ingress)
    assert_silent(replica)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("vllm_version", "0.34.0", VersionMismatch),
        ("model", "other", WrongModel),
        ("fingerprint", "e" * 64, FingerprintMismatch),
    ],
)
def test_the_ingress_refuses_a_replica_that_lets_a_mismatch_pass(field: str, value: str, expected: type[ProtocolError]) -> None:
    """The replica has the token and signs its identity, but does not check what the ingress expects."""
    ingress, replica = make_ingress(), make_replica(**{field: value})
    replica._check_peer = lambda peer: None  # type: ignore[method-assign]
    replica.receive_data(ingress.initiate())
    assert isinstance(refusal(ingress, replica.data_to_send()), expected)


def test_an_ingress_speaks_to_replicas_of_a_newer_vllm_that_was_tested_with_its_own_and_is_never_the_newer_one() -> None:
    ingress, replica = open_pair(vllm_version="0.33.0")
    assert (ingress.state, replica.state) == (LinkState.OPEN, LinkState.OPEN)
    error = refusal(make_replica(), make_ingress(vllm_version="0.33.0").initiate())
    assert repr(error) == repr(VersionMismatch(ours="0.32.0", theirs="0.33.0", what="vllm"))


@pytest.mark.parametrize("number", [0, 2, 2**40])
def test_another_protocol_version_is_named_even_with_unknown_fields(number: int) -> None:
    theirs = encode_frame(msgspec.msgpack.encode([0, number, {"layout": "unknown"}]))
    error = refusal(make_replica(), theirs)
    assert repr(error) == repr(VersionMismatch(ours="1", theirs=str(number), what="protocol"))
    theirs = encode_frame(msgspec.msgpack.encode([1, number]))
    assert isinstance(refusal(initiated(), theirs), VersionMismatch)


@pytest.mark.parametrize("token", [b"", b"Correct horse battery staple"])
def test_a_wrong_token_is_refused_by_the_ingress_before_it_proves_anything(token: bytes) -> None:
    ingress, replica = make_ingress(), make_replica(token=token)
    replica.receive_data(ingress.initiate())
    assert isinstance(refusal(ingress, replica.data_to_send()), AuthenticationFailed)


def test_a_wrong_token_is_refused_by_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make_replica()
    impostor = make_ingress(token=b"guessed")
    replica.receive_data(impostor.initiate())
    with monkeypatch.context() as patch:
        patch.setattr("serve_app.links.protocol.connection.check_proof", lambda *_: None)
        impostor.receive_data(replica.data_to_send())
    assert isinstance(refusal(replica, impostor.data_to_send()), AuthenticationFailed)


def test_a_recorded_hello_and_proof_do_not_open_a_second_link() -> None:
    replica = make_replica(nonce=b"R" * 32)
    replica.receive_data(HELLO)
    assert isinstance(refusal(replica, PROOF), AuthenticationFailed)


def test_a_recorded_challenge_does_not_convince_another_ingress() -> None:
    assert isinstance(refusal(initiated(nonce=b"I" * 32), CHALLENGE), AuthenticationFailed)


def test_a_proof_sent_back_to_its_maker_proves_nothing() -> None:
    [challenge] = frames_in(CHALLENGE)
    assert isinstance(challenge, Challenge)
    assert isinstance(refusal(greeted(), frame(Proof(challenge.proof))), AuthenticationFailed)


def test_a_replica_may_refuse_an_ingress_before_its_challenge_and_before_the_link_opens() -> None:
    asked: list[str] = []

    def refuse(ingress_id: str) -> None:
        asked.append(ingress_id)
        raise SlotsExhausted(2)

    assert isinstance(refusal(make_replica(admit=refuse), HELLO), SlotsExhausted)
    replica = greeted()
    replica.admit = refuse
    assert isinstance(refusal(replica, PROOF + frame(Add("a", [b"x"], 0, b""))), SlotsExhausted)
    assert (replica.peer, replica.attempts, asked) == (None, set(), ["ingress-1", "ingress-1"])
    assert isinstance(refusal(greeted(admit=asked.append), CHALLENGE), UnexpectedMessage)
    assert len(asked) == 3, "not asked again without a proof"


CHANGES = {
    "vllm_version": "0.32.1",
    "ingress_id": "ingress-2",
    "replica_id": "replica-2",
    "model": "other",
    "fingerprint": "e" * 64,
    "nonce": b"x" * 32,
    "proof": b"x" * 32,
    "credit": 9,
    "draining": True,
    "capabilities": msgspec.structs.replace(CAPABILITIES, block_size=64),
}


@pytest.mark.parametrize("name", [f for f in Hello.__struct_fields__ if f != "protocol"])
def test_a_hello_changed_in_flight_fails_even_where_the_replica_would_take_it(name: str) -> None:
    [hello] = frames_in(HELLO)
    changed = {name: CHANGES[name]}
    # The replica expects exactly the changed Hello, so that only the proof can show the change.
    replica = make_replica(**{k: v for k, v in changed.items() if k in ("model", "fingerprint", "vllm_version")})
    replica.receive_data(frame(msgspec.structs.replace(hello, **changed)))
    assert isinstance(refusal(initiated(), replica.data_to_send()), AuthenticationFailed)
    assert isinstance(refusal(replica, PROOF), AuthenticationFailed)


@pytest.mark.parametrize("name", [f for f in Challenge.__struct_fields__ if f != "protocol"])
def test_a_challenge_changed_in_flight_fails(name: str) -> None:
    [challenge] = frames_in(CHALLENGE)
    changed = frame(msgspec.structs.replace(challenge, **{name: CHANGES[name]}))
    assert isinstance(refusal(initiated(), changed), AuthenticationFailed)


def test_no_flipped_bit_of_the_handshake_leaves_both_sides_open() -> None:
    for position in range(8 * len(HELLO)):
        replica, ingress = make_replica(), initiated()
        played = play(replica, [flipped(HELLO, position)])
        assert play(ingress, [played.sent]).state is not LinkState.OPEN, position
    for position in range(8 * len(CHALLENGE)):
        assert play(initiated(), [flipped(CHALLENGE, position)]).state is not LinkState.OPEN, position
    for position in range(8 * len(PROOF)):
        assert play(greeted(), [flipped(PROOF, position)]).state is not LinkState.OPEN, position


def flipped(wire: bytes, position: int) -> bytes:
    changed = bytearray(wire)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "message", [Ping(), Add("a", [b"x"], 0, b""), frames_in(CHALLENGE)[0], frames_in(PROOF)[0]], ids=lambda m: type(m).__name__
)
def test_the_replica_takes_nothing_but_a_hello_first(message: Message) -> None:
    assert repr(refusal(make_replica(), frame(message))) == repr(UnexpectedMessage(type(message).__name__, "handshake"))


def test_a_second_hello_is_refused_in_every_state() -> None:
    assert repr(refusal(greeted(), HELLO)) == repr(UnexpectedMessage("Hello", "handshake"))
    assert repr(refusal(open_pair()[1], HELLO)) == repr(UnexpectedMessage("Hello", "open"))


def test_a_second_proof_or_challenge_is_refused() -> None:
    ingress, replica = open_pair()
    assert repr(refusal(replica, PROOF)) == repr(UnexpectedMessage("Proof", "open"))
    assert repr(refusal(ingress, CHALLENGE)) == repr(UnexpectedMessage("Challenge", "open"))


def test_the_ingress_speaks_first() -> None:
    assert repr(refusal(make_ingress(), CHALLENGE)) == repr(UnexpectedMessage("Challenge", "handshake"))
    ingress = initiated()
    with pytest.raises(UnexpectedMessage):
        ingress.initiate()
    assert ingress.state is LinkState.HANDSHAKE


def test_nothing_is_sent_before_the_link_is_open() -> None:
    ingress, replica = initiated(), greeted()
    for send in (ingress.ping, lambda: ingress.send_add("a", [b"x"]), lambda: replica.send_trial_begins("a")):
        with pytest.raises(UnexpectedMessage):
            send()
    assert (ingress.attempts, ingress.state, replica.state) == (set(), LinkState.HANDSHAKE, LinkState.HANDSHAKE)


def test_a_large_frame_is_refused_until_the_peer_has_proved_itself() -> None:
    size = MAX_HANDSHAKE_FRAME_BYTES + 1
    for connection in (make_replica(), greeted(), initiated()):
        error = refusal(connection, size.to_bytes(4, "big"))
        assert repr(error) == repr(FrameTooLarge(size, MAX_HANDSHAKE_FRAME_BYTES))


def test_a_large_add_right_behind_the_proof_comes_through() -> None:
    replica, buffer = greeted(), b"x" * (MAX_HANDSHAKE_FRAME_BYTES + 1)
    assert replica.receive_data(PROOF + frame(Add("a", [buffer], 0, b""))) == [Add("a", [buffer], 0, b"")]


def test_what_is_sent_at_once_goes_out_behind_the_proof() -> None:
    ingress = initiated()
    ingress.receive_data(CHALLENGE)
    assert frames_in(ingress.ping()) == [*frames_in(PROOF), Ping()]
    assert ingress.data_to_send() == b""


def test_the_end_of_the_stream_during_the_handshake_is_an_error() -> None:
    for connection in (make_replica(), greeted(), make_ingress(), initiated()):
        with pytest.raises(MalformedMessage) as refused:
            connection.eof_received()
        assert_refused(connection, refused.value)


def test_a_goodbye_during_the_handshake_is_heard() -> None:
    for connection in (make_replica(), greeted(), initiated()):
        with pytest.raises(PeerClosed):
            connection.receive_data(frame(Goodbye("slots_exhausted", "all 64 ingress slots are taken")))
        assert connection.data_to_send() == b""
        assert_silent(connection)


@given(cut=st.integers(0, len(HELLO) - 1), junk=st.binary(max_size=64))
def test_a_truncated_hello_never_gets_an_answer(cut: int, junk: bytes) -> None:
    replica = make_replica()
    outcome = play(replica, [HELLO[:cut]], eof=True)
    assert outcome.error.startswith("MalformedMessage")
    [goodbye] = frames_in(outcome.sent)
    assert isinstance(goodbye, Goodbye)


def test_a_nonce_of_another_length_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="32 random bytes"):
        make_ingress(nonce=b"short")


def test_the_token_does_not_show() -> None:
    assert "horse" not in repr(make_ingress()) + repr(make_replica())
