"""The handshake checks and proves what both ends of a link need to know before the link is open. Pure; docs/protocol.md has the reasons.

The ``transcript`` covers all that was said: the frames of the Hello and of the Challenge without its proof.
"""

import hashlib
import hmac

import msgspec

from serve_app.links.protocol.errors import AuthenticationFailed, FingerprintMismatch, VersionMismatch, WrongModel
from serve_app.links.protocol.frames import encode_frame
from serve_app.links.protocol.messages import PROTOCOL_VERSION, Challenge, Hello, encode_message, opening_version
from serve_app.vllm_versions import may_speak

MAX_HANDSHAKE_FRAME_BYTES = 64 * 1024
"""The limit until the link is open. The longest Challenge has 23 KiB, and a peer without proof must not take 64 MiB of memory."""

REPLICA_ROLE = b"serve-app replica 1\0"
INGRESS_ROLE = b"serve-app ingress 1\0"


def check_protocol(body: bytes) -> None:
    """Refuse a peer of another version before its Hello or Challenge is decoded, because the fields may differ.

    Raises:
        VersionMismatch: The peer speaks another version of the protocol.
    """
    theirs = opening_version(body)
    if theirs is not None and theirs != PROTOCOL_VERSION:
        raise VersionMismatch(ours=str(PROTOCOL_VERSION), theirs=str(theirs), what="protocol")


def check_peer(peer: Hello | Challenge, *, vllm_version: str, model: str, fingerprint: str) -> None:
    """Compare the peer's model and versions with ours.

    Raises:
        VersionMismatch: The two versions of vLLM would not understand each other's structs.
        WrongModel, FingerprintMismatch: Token ids would not mean the same on both sides.
    """
    of_ingress, of_replica = (peer.vllm_version, vllm_version) if isinstance(peer, Hello) else (vllm_version, peer.vllm_version)
    if not may_speak(of_ingress, of_replica):
        raise VersionMismatch(ours=vllm_version, theirs=peer.vllm_version, what="vllm")
    if peer.model != model:
        raise WrongModel(ours=model, theirs=peer.model)
    if peer.fingerprint != fingerprint:
        raise FingerprintMismatch(model=model, ours=fingerprint, theirs=peer.fingerprint)


def transcript(hello: bytes, challenge: Challenge) -> bytes:
    """Return the bytes that both proofs sign: frames and not bodies, so that the length of each part is signed, too."""
    unsigned = encode_message(msgspec.structs.replace(challenge, proof=b""))
    return encode_frame(hello) + encode_frame(unsigned)


def proof(token: bytes, role: bytes, said: bytes) -> bytes:
    """Return the MAC of a transcript, 32 bytes."""
    return hmac.digest(token, role + said, hashlib.sha256)


def check_proof(theirs: bytes, ours: bytes, peer: str) -> None:
    """Compare in constant time.

    Raises:
        AuthenticationFailed: ``peer`` has another token, or the handshake was changed on its way.
    """
    if not hmac.compare_digest(theirs, ours):
        raise AuthenticationFailed(peer)
