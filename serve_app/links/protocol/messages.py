"""The messages of a link become MessagePack arrays of the message's number and its fields in order.

Pure. Payloads of the engine (`Add.buffers`, `Outputs.buffers`) are vLLM's own encoding and opaque here. Limits are checked when a message
is decoded; docs/protocol.md lists them all.
"""

from collections.abc import Sequence
from typing import Annotated, cast

import msgspec
from msgspec import Meta, Struct

from serve_app.errors import EngineDied, EngineOutOfMemory, EngineSilent, EngineStopped, StepTooLong
from serve_app.links.protocol.errors import MalformedMessage

PROTOCOL_VERSION = 1
"""From the first release on, raised with any change of a message. The number and first field of Hello and Challenge, and all of Goodbye,
never change, so that two versions can still report to each other why they close the link."""

ENGINE_LOST = frozenset(kind.code for kind in (EngineDied, EngineOutOfMemory, EngineStopped, EngineSilent, StepTooLong))
"""Codes of a replica's Goodbye when its engine core has died or was killed; with any other code the engine lived."""

REFUSED = "refused "
"""Begins the stop reason of an attempt that a replica refuses for a value of its request: the name of the value, ": ", what is wrong."""

NONCE_BYTES = 32
MAX_ID_CHARS = 256
MAX_ATTEMPTS_PER_ABORT = 10_000
MAX_BUFFERS = 4096
MAX_REASON_CHARS = 1000
MAX_KV_BYTES = 1 << 20
MAX_POINTS_A_DIGEST = 10_000

# 256: a request id is the client's X-Request-Id (ingress: at most 128) with vLLM's and our suffixes.
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
# 1024: a model may be named by a path or a repository id; ids in the metrics are no longer.
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
# 64: "generate", "embed".
Label = Annotated[str, Meta(min_length=1, max_length=64)]
Version = Annotated[str, Meta(min_length=1, max_length=64)]
# 256: a SHA-512 in hexadecimal and a prefix fit; it is opaque here.
Fingerprint = Annotated[str, Meta(min_length=1, max_length=256)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
# The same length: HMAC-SHA256 gives 32 bytes.
Mac = Nonce
# 63 bits: fits a C long on both sides and thousands of years of steps.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
# 1 MiB: the numbers of 200,000 blocks of KV.
Kv = Annotated[bytes, Meta(max_length=MAX_KV_BYTES)]
# 10,000 points of 9 bytes, and as many in the other field: no single frame holds the link for long.
Points = Annotated[list[Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]], Meta(max_length=MAX_POINTS_A_DIGEST)]
# 4096: vLLM's encoder makes one more buffer per array of 256 bytes or more; logprobs of 1024 sequences make 3 each.
Buffers = Annotated[list[bytes], Meta(min_length=1, max_length=MAX_BUFFERS)]
BytesLike = bytes | bytearray | memoryview


class Capabilities(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The engine's properties that an ingress must know; tokens and blocks as vLLM counts them.

    Replicas with equal ``weights`` may continue each other's answers. ``seeds_by_position``: the noise of a seeded request is a function
    of seed and position, as in vLLM's V2 runner; the V1 runner's generator has a state, which only a replay reproduces. Replicas with equal
    ``kv_transfer``, not "", can read each other's KV, of which a token has ``kv_token_bytes``, 0 for unknown. ``host_kv_tokens``: tokens
    whose KV the replica's host keeps beside the engine's own cache.
    """

    max_model_len: Positive
    block_size: Positive
    num_kv_blocks: Count
    tasks: Annotated[tuple[Label, ...], Meta(max_length=64)]
    weights: Label
    seeds_by_position: bool = False
    kv_transfer: Annotated[str, Meta(max_length=256)] = ""
    kv_token_bytes: Count = 0
    host_kv_tokens: Count = 0


class Hello(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=0):
    """Ingress to replica, first: the ingress's identity, and the replica that it expects."""

    protocol: Count
    vllm_version: Version
    ingress_id: Id
    model: Name
    fingerprint: Fingerprint
    nonce: Nonce


class Challenge(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=1):
    """Replica to ingress: the replica's identity, with the proof that it has the token.

    ``credit`` is how many unfinished attempts the ingress may have on this link. ``draining``: send nothing new; the first Heartbeat would
    say so too late, because the ingress may send as soon as it has checked this message.
    """

    protocol: Count
    vllm_version: Version
    replica_id: Id
    model: Name
    fingerprint: Fingerprint
    nonce: Nonce
    proof: Mac
    credit: Annotated[int, Meta(ge=1, le=1_000_000)]
    draining: bool
    capabilities: Capabilities


class Proof(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=2):
    """Ingress to replica: the proof that the ingress has the token, too. The link is open."""

    proof: Mac


class Heartbeat(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=3):
    """Replica to ingress, periodically and at changes.

    ``step`` counts the engine's steps and must advance while it has work. ``draining``: send nothing new. ``drain_left_s``: seconds
    until this replica closes the link whatever it still holds, 0 while it is not draining. ``sleeping``: it drains because its engine
    sleeps, or is about to, and a `Wake` makes it take requests again.
    """

    step: Count
    running: Count
    waiting: Count
    kv_usage: Annotated[float, Meta(ge=0, le=1)]
    draining: bool
    # 1e9: 30 years; what matters is that it is finite.
    drain_left_s: Annotated[float, Meta(ge=0, le=1e9)]
    sleeping: bool


class Ping(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=4):
    """Ingress to replica, periodically: the ingress is alive. An ingress that falls silent loses its attempts."""


class Add(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=5):
    """Ingress to replica: start this attempt. ``buffers`` is vLLM's encoding of an ``EngineCoreRequest``.

    The last ``num_emitted`` ids of its prompt are the answer so far: the engine computes them as prompt, and a grammar accepts them.
    ``kv`` is MessagePack of the ``kv_transfer_params`` with which another replica handed the request over; b"" if none did.
    """

    attempt_id: Id
    buffers: Buffers
    num_emitted: Count
    kv: Kv


class Abort(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=6):
    """Ingress to replica: stop these attempts. Ids that the replica does not know (any more) are ignored."""

    # 10,000 ids of 256 characters are 2.6 MB: no single frame holds the link for long.
    attempt_ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_ATTEMPTS_PER_ABORT)]


class Outputs(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=7):
    """Replica to ingress, one per engine step: vLLM's encoding of an ``EngineCoreOutputs`` for this ingress."""

    buffers: Buffers


class AddSuspect(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=11):
    """Ingress to replica: as Add, but start the attempt only when no other suspect is on trial. Its request may have ended an engine."""

    attempt_id: Id
    buffers: Buffers
    num_emitted: Count
    kv: Kv


class TrialBegins(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=12):
    """Replica to ingress: the engine gets this suspect next. Sent before the engine gets it, so that a crash cannot hide it."""

    attempt_id: Id


class TrialPassed(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=13):
    """Ingress to replica: this suspect has had a new token; the next may begin. An unknown id is ignored."""

    attempt_id: Id


class HandOver(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=14):
    """Ingress to replica: end these attempts and keep their KV for another replica. The last output of each has the stop reason
    `core.hand_over.HANDED_OVER`, and ``kv_transfer_params`` if its KV is kept.

    An attempt that ends before that ends as it would have. Ids that the replica does not know (any more) are ignored.
    """

    attempt_ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_ATTEMPTS_PER_ABORT)]


class FreeKv(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=15):
    """Ingress to replica: no other replica reads the KV that is kept of these attempts, which were handed over.

    Ids of which no KV is kept (any more) are ignored.
    """

    attempt_ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_ATTEMPTS_PER_ABORT)]


class Wake(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=16):
    """Ingress to replica, each second while it lasts: requests wait for this replica, whose engine sleeps."""


class CacheDigest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=17):
    """Replica to ingress, if its engine has several tiers of KV: first points are removed from what it has cached, then added.

    A point is one of the hashes of `core.prompt_hashes.hash_points`. ``number`` counts the digests of a link from 0. ``anew``: all earlier
    points are removed.
    """

    number: Count
    anew: bool
    added: Points
    removed: Points


class Goodbye(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=10):
    """Either side, last: why the sender closes. ``code`` is that of a ProtocolError, or of the sender's own reason to stop."""

    code: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
    # 1000: one line for a log; it is the peer's text and not to be trusted.
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


Message = (
    Hello
    | Challenge
    | Proof
    | Heartbeat
    | Ping
    | Add
    | Abort
    | Outputs
    | Goodbye
    | AddSuspect
    | TrialBegins
    | TrialPassed
    | HandOver
    | FreeKv
    | Wake
    | CacheDigest
)


class _Opening(Struct, array_like=True):
    """The first two fields of Hello and Challenge, the same in every version of the protocol; more may follow."""

    number: Annotated[int, Meta(ge=0, le=1)]
    protocol: Count


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_opening_decoder = msgspec.msgpack.Decoder(_Opening)


def add_message(
    attempt_id: str, buffers: Sequence[BytesLike], num_emitted: int = 0, *, suspect: bool = False, kv: bytes = b""
) -> Add | AddSuspect:
    """Return a checked Add or AddSuspect; ``buffers`` are not copied.

    Raises:
        MalformedMessage: The peer would refuse it.
    """
    if not 0 < len(attempt_id) <= MAX_ID_CHARS:
        raise MalformedMessage(f"an attempt id of {len(attempt_id)} characters, limits 1 and {MAX_ID_CHARS}")
    if not 0 < len(buffers) <= MAX_BUFFERS:
        raise MalformedMessage(f"{len(buffers)} buffers, limits 1 and {MAX_BUFFERS}")
    if len(kv) > MAX_KV_BYTES:
        raise MalformedMessage(f"kv of {len(kv)} bytes, limit {MAX_KV_BYTES}")
    kind = AddSuspect if suspect else Add
    return kind(attempt_id, cast(list[bytes], list(buffers)), num_emitted, kv)  # MessagePack writes all three kinds alike


def readable(text: str, max_chars: int) -> str:
    """Return at most ``max_chars`` of ``text``, without characters that UTF-8 cannot carry: the text may quote half a peer's message."""
    return text[:max_chars].encode("utf-8", "replace").decode("utf-8")


def encode_message(message: Message) -> bytes:
    """Return the body of the frame that carries ``message``. Limits are not checked here.

    Raises:
        MalformedMessage: A field has a value that MessagePack cannot carry.
    """
    try:
        return _encoder.encode(message)
    except (ValueError, OverflowError, TypeError) as exc:  # a lone surrogate, 65 bits, a foreign type
        raise MalformedMessage(f"{type(message).__name__}: {exc}") from exc


def decode_message(body: bytes) -> Message:
    """Return the message in the body of a frame.

    Raises:
        MalformedMessage: The body is no message, or breaks a limit of its fields.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise MalformedMessage(str(exc)) from exc


def opening_version(body: bytes) -> int | None:
    """Return the protocol version of a Hello or Challenge of any version, None if it is neither."""
    try:
        return _opening_decoder.decode(body).protocol
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
