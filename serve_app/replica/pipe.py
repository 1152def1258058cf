"""The pipe carries messages between a replica's supervisor and its engine core process, over one socket pair, in frames as on the wire.

The engine core writes complete wire frames (``StepOutputs.frame``), so that the supervisor passes a step's outputs on without looking
inside; this keeps its cost per token low. Both ends are our own code of one version; nothing is negotiated.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from serve_app.core.cached_points import Report
from serve_app.core.load import EngineLoad
from serve_app.core.step_costs import MeasuredCosts
from serve_app.host.foreign_errors import in_one_line
from serve_app.links.protocol.frames import FrameDecoder, encode_frame
from serve_app.links.protocol.messages import MAX_REASON_CHARS, Capabilities, readable
from serve_app.replica.cold_start import EnginePhases
from serve_app.replica.process_group import end_own_group

logger = logging.getLogger(__name__)


PROBE_SLOT = 1 << 16
"""The slot of the supervisor's own probe; those of links are below 1024."""
TRIALS_SLOT = PROBE_SLOT + 1
"""The slot of the question that ends the trial of an aborted suspect."""

GOLDEN_SLOT = PROBE_SLOT + 2
"""The slot of a golden prompt inside the engine core; its outputs never leave it as such."""
MEASURE_SLOT = PROBE_SLOT + 3
"""The slot of the batches by which an engine core measures itself; their outputs never leave it."""
HAND_OVER_SLOT = PROBE_SLOT + 4
"""The slot of a `HandOverInEngine` and of a `FreeKvInEngine`, whose answers are not used."""
SLEEP_SLOT = PROBE_SLOT + 5
"""The slot of a `FallAsleep` and of a `WakeUp`. The answer goes to the supervisor as `SleepChanged`."""

CACHE_SLOT = PROBE_SLOT + 6
"""The slot of a `CacheChanged`, which the engine's own loop puts among its outputs."""


class AddToEngine(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """``buffers``, ``num_emitted`` and ``kv`` are those of the link's ``Add``; outputs come back for ``slot``."""

    slot: int
    attempt_id: str
    buffers: list[bytes]
    num_emitted: int
    kv: bytes = b""


class AbortInEngine(msgspec.Struct, tag=2, array_like=True, frozen=True):
    attempt_ids: list[str]


class AskTrial(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Ask whether all earlier messages have been processed. An `Answered` for `TRIALS_SLOT` is the answer."""


class Ping(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Report that the supervisor still runs. ``probe``: make one token; the answer comes back for `PROBE_SLOT`."""

    probe: bool


class AskGolden(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Answer ``prompt`` greedily with at most ``max_tokens`` tokens; a `GoldenAnswer` follows. One at a time, before any attempt."""

    prompt: str
    max_tokens: int


class HandOverInEngine(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """End these attempts so that another replica can read their KV. Unknown ids are ignored."""

    attempt_ids: list[str]


class FreeKvInEngine(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Free the KV that is kept of these attempts, which no other replica reads. Ids of which none is kept are ignored."""

    attempt_ids: list[str]


class FallAsleep(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Free the GPU's memory as vLLM's sleep ``level`` does, when no request is left; a `SleepChanged` follows. Later attempts wait."""

    level: int


class WakeUp(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Take the GPU's memory again, with the weights, and run the attempts that wait; a `SleepChanged` follows.

    ``level`` is that of the sleep.
    """

    level: int


class EngineReady(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The engine can serve. ``fingerprint`` identifies the model's configuration and tokenizer."""

    vllm_version: str
    fingerprint: str
    capabilities: Capabilities
    max_num_seqs: int
    """The most requests that the engine runs at once."""
    phases: EnginePhases
    measured: MeasuredCosts | None = None
    """The costs of the engine's steps: `StepsMeasured` comes later, and the supervisor fills it in here. None if nothing was measured."""


class StepOutputs(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The outputs of one step for one ingress; ``frame`` is ready for its link. ``busy_s`` counts the seconds in steps since the engine's
    start. ``num_outputs`` is 0 if a step only reports the load, as in the middle of a prompt. ``kept``: those of the ``finished``
    attempts whose KV another replica is to read."""

    slot: int
    load: EngineLoad
    busy_s: float
    finished: list[str]
    frame: bytes
    num_outputs: int
    kept: list[str] = []


class Answered(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """The engine's own loop has answered the question of this slot: `AskTrial`, or a probe for which it makes no token."""

    slot: int


class GoldenAnswer(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The answer to a golden prompt. ``problem``: why there is no answer, "" if there is one."""

    text: str
    problem: str = ""


class StepsMeasured(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """The result of the engine core's measurement of itself; comes between `EngineReady` and the answer to the first probe."""

    measured: MeasuredCosts | None
    """None: too few batches could be timed, or the measurement failed."""


class SleepChanged(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """The engine has fallen asleep or woken up. ``problem``: why it could not, "" if it did."""

    problem: str = ""


class CacheChanged(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """Blocks were stored in a tier of the KV cache or removed from it, in this order. Only engines with several tiers report this."""

    reports: list[Report]


class EngineFailed(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The last message of an engine that could not start or cannot continue."""

    reason: str


ToEngine = AddToEngine | AbortInEngine | AskTrial | Ping | AskGolden | HandOverInEngine | FreeKvInEngine | FallAsleep | WakeUp
FromEngine = EngineReady | StepOutputs | Answered | GoldenAnswer | StepsMeasured | SleepChanged | CacheChanged | EngineFailed

to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()
_PEER = struct.Struct("3i")


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the message as one frame, at most 4 GiB."""
    return encode_frame(_encoder.encode(message))


def frame_decoder() -> FrameDecoder:
    """Return a decoder of frames as large as `encode` makes them: both ends are ours, so nothing is to be bounded."""
    return FrameDecoder((1 << 32) - 1)


class Peer(NamedTuple):
    """The process at the other end of a socket on this machine. ``pid`` is 0 for one of another container."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that made this pair of sockets; of a connection, the process that connected or the one that called ``listen``."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Peer(pid, uid)


def is_own(sock: socket.socket) -> bool:
    """Return whether the other end belongs to this user and container. Those of a pod may share abstract addresses and the uid."""
    peer = peer_of(sock)
    return peer.pid != 0 and peer.uid == os.getuid()


class EngineEnd:
    """The engine core's end of the pipe, for its main thread and its two IO threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.num_pings = 0
        """The supervisor's pings so far."""
        self._sock = sock
        self._lock = threading.Lock()

    def pinged(self) -> None:
        """Count a ping; only the thread that reads the pipe calls this."""
        self.num_pings += 1

    def send(self, message: FromEngine) -> None:
        with self._lock:
            self._sock.sendall(encode(message))

    def send_failure(self, exc: BaseException) -> None:
        """Report to the supervisor, if it still listens, why this process is about to end."""
        logger.error("engine core failed", exc_info=exc)
        with contextlib.suppress(OSError):
            self.send(EngineFailed(readable(in_one_line(exc), MAX_REASON_CHARS)))

    def run_thread(self, body: Callable[[], None]) -> None:
        """Run an IO thread's ``body``; if it fails, end the process.

        Without one of its IO threads an engine would answer nothing and still look alive, because the supervisor sends the heartbeats.
        """
        try:
            body()
        except BaseException as exc:
            self.send_failure(exc)
            end_own_group(1)
