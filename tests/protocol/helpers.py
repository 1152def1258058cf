"""These helpers make pairs of connections with fixed nonces, so that a recorded side can be played again to a fresh other side."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from serve_app.links.protocol.connection import IngressConnection, LinkState, ReplicaConnection
from serve_app.links.protocol.errors import ProtocolError
from serve_app.links.protocol.frames import FrameDecoder, encode_frame
from serve_app.links.protocol.messages import (
    Abort,
    Add,
    AddSuspect,
    CacheDigest,
    Capabilities,
    Challenge,
    FreeKv,
    Goodbye,
    HandOver,
    Heartbeat,
    Hello,
    Message,
    Outputs,
    Ping,
    Proof,
    TrialBegins,
    TrialPassed,
    Wake,
    decode_message,
    encode_message,
)

MAX_FRAME_BYTES = 256 * 1024
CAPABILITIES = Capabilities(
    max_model_len=2048,
    block_size=128,
    num_kv_blocks=512,
    tasks=("generate",),
    weights="w" * 16,
)
SHARED: dict[str, Any] = {
    "model": "tiny",
    "fingerprint": "f" * 64,
    "vllm_version": "0.32.0",
    "token": b"correct horse battery staple",
    "max_frame_bytes": MAX_FRAME_BYTES,
}


def make_ingress(**changes: Any) -> IngressConnection:
    return IngressConnection(**{**SHARED, "ingress_id": "ingress-1", "nonce": b"i" * 32, **changes})


def make_replica(**changes: Any) -> ReplicaConnection:
    own = {
        "replica_id": "replica-1",
        "nonce": b"r" * 32,
        "credit": 8,
        "capabilities": CAPABILITIES,
    }
    return ReplicaConnection(**{**SHARED, **own, **changes})


def open_pair(**replica_changes: Any) -> tuple[IngressConnection, ReplicaConnection]:
    ingress, replica = make_ingress(), make_replica(**replica_changes)
    assert replica.receive_data(ingress.initiate()) == []
    assert ingress.receive_data(replica.data_to_send()) == []
    assert replica.receive_data(ingress.data_to_send()) == []
    assert (ingress.state, replica.state) == (LinkState.OPEN, LinkState.OPEN)
    return ingress, replica


def outputs(*buffers: bytes) -> bytes:
    """Return a step's frame, as the engine core makes it."""
    return encode_frame(encode_message(Outputs([*buffers])))


def frames_in(wire: bytes) -> list[Message]:
    return [decode_message(body) for body in FrameDecoder(MAX_FRAME_BYTES).receive_data(wire)]


@dataclass(frozen=True)
class Outcome:
    """The results of one side for a stream of bytes."""

    messages: list[Message]
    error: str
    sent: bytes
    state: LinkState


def play(connection: IngressConnection | ReplicaConnection, chunks: Iterable[bytes], *, eof: bool = False) -> Outcome:
    """Feed ``chunks``; any exception but a ProtocolError goes through and fails the test."""
    messages: list[Message] = []
    error, sent = "", b""
    try:
        for chunk in chunks:
            messages += connection.receive_data(chunk)
            sent += connection.data_to_send()
        if eof:
            connection.eof_received()
    except ProtocolError as exc:
        error = repr(exc)
        messages += connection.undelivered
    return Outcome(messages, error, sent + connection.data_to_send(), connection.state)


def cut_at(wire: bytes, positions: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for end in [*sorted(position % (len(wire) + 1) for position in positions), len(wire)]:
        yield wire[start:end]
        start = end


def assert_refused(connection: IngressConnection | ReplicaConnection, error: ProtocolError) -> None:
    """Assert that the link is closed, that the peer gets the reason once, and that nothing else is sent."""
    assert connection.state is LinkState.CLOSED
    assert frames_in(connection.data_to_send()) == [Goodbye(error.code, str(error)[:1000])]
    assert_silent(connection)


def assert_silent(connection: IngressConnection | ReplicaConnection) -> None:
    ingress, _ = open_pair()
    for wire in (outputs(b"x"), ingress.ping(), b"\xff" * 9):
        assert connection.receive_data(wire) == []
    connection.eof_received()
    assert connection.close("shutdown", "") == connection.data_to_send() == b""
    assert connection.state is LinkState.CLOSED


ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=256)
counts = st.integers(0, 2**63 - 1)
points = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
nonces = st.binary(min_size=32, max_size=32)
labels = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
buffers = st.lists(st.binary(max_size=64), min_size=1, max_size=4)
capabilities = st.builds(
    Capabilities,
    max_model_len=st.integers(1, 2**40),
    block_size=st.integers(1, 2**40),
    num_kv_blocks=counts,
    tasks=st.lists(labels, max_size=4).map(tuple),
    weights=labels,
    kv_transfer=st.text(max_size=8),
    kv_token_bytes=counts,
    host_kv_tokens=counts,
)
opening = {"protocol": counts, "vllm_version": labels, "model": ids, "fingerprint": ids, "nonce": nonces}
messages_to_replica = st.one_of(
    st.builds(Add, attempt_id=ids, buffers=buffers, num_emitted=counts, kv=st.binary(max_size=8)),
    st.builds(AddSuspect, attempt_id=ids, buffers=buffers, num_emitted=counts, kv=st.binary(max_size=8)),
    st.builds(TrialPassed, attempt_id=ids),
    st.builds(HandOver, attempt_ids=st.lists(ids, min_size=1, max_size=4)),
    st.builds(FreeKv, attempt_ids=st.lists(ids, min_size=1, max_size=4)),
    st.builds(Abort, attempt_ids=st.lists(ids, min_size=1, max_size=4)),
    st.builds(Ping),
    st.builds(Wake),
)
messages_to_ingress = st.one_of(
    st.builds(
        Heartbeat,
        step=counts,
        running=counts,
        waiting=counts,
        kv_usage=st.floats(0, 1),
        draining=st.booleans(),
        drain_left_s=st.floats(0, 1e9),
        sleeping=st.booleans(),
    ),
    st.builds(Outputs, buffers=buffers),
    st.builds(TrialBegins, attempt_id=ids),
    st.builds(CacheDigest, number=counts, anew=st.booleans(), added=points, removed=points),
)
messages_of_the_handshake = st.one_of(
    st.builds(Hello, ingress_id=ids, **opening),
    st.builds(
        Challenge,
        replica_id=ids,
        proof=nonces,
        credit=st.integers(1, 1_000_000),
        draining=st.booleans(),
        capabilities=capabilities,
        **opening,
    ),
    st.builds(Proof, proof=nonces),
)
goodbyes = st.builds(Goodbye, code=st.from_regex(r"[a-z][a-z0-9_]{0,63}", fullmatch=True), reason=ids)
messages = st.one_of(messages_to_replica, messages_to_ingress, messages_of_the_handshake, goodbyes)
