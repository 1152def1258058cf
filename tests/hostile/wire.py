"""This module sends bytes to an ingress over a socket, and reads how many answers they get and whether the connection stays usable."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

LIMIT_S = 60.0
"""By default, an input that has no end after this time is a failure."""
PROBE = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
CUT = -1
"""Stands in the place of a status for an answer that ends before its length."""


@dataclass(frozen=True)
class Input:
    """What a client sends, and the answers that it must get.

    Args:
        pieces: Sent one after another, each in a packet of its own.
        statuses: The statuses of all answers, in order.
        stays: Whether the connection is then still good for another request. If not, the ingress closes it.
        leaves: The client closes the connection after its last piece, and reads no answer.
    """

    name: str
    pieces: tuple[bytes, ...]
    statuses: tuple[int, ...] = ()
    stays: bool = False
    leaves: bool = False


async def answers(port: int, given: Input, *, limit_s: float = LIMIT_S) -> tuple[tuple[int, ...], bool]:
    """Send the input; return the statuses of all its answers, and whether the connection was still usable.

    A probe on the same connection comes behind the expected answers. Its answer must be the next one, so an answer to a hidden request
    would be seen.

    Raises:
        TimeoutError: The ingress neither answers nor closes the connection.
    """
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            with contextlib.suppress(ConnectionError):
                for piece in given.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01 if len(given.pieces) > 1 else 0)
            if given.leaves:
                return (), False
            received = bytearray()
            if given.stays:
                while sum(status != CUT for status in _statuses(received)) < len(given.statuses) and (
                    data := await _read(reader)
                ):
                    received += data
                writer.write(PROBE)
            while data := await _read(reader):
                received += data
        finally:
            writer.transport.abort()
    statuses = tuple(_statuses(received))
    return (statuses[:-1], True) if given.stays and statuses and statuses[-1] == 200 else (statuses, False)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""


def _statuses(received: bytearray) -> Iterator[int]:
    """Yield the status of each answer that is complete, without interim ones (1xx). Bytes that are no answer count as `CUT`."""
    left = bytes(received)
    while left:
        head, end, left = left.partition(b"\r\n\r\n")
        if not end or not head.startswith(b"HTTP/1."):
            yield CUT
            return
        status = int(head.split()[1])
        if status < 200:
            continue
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if (length := fields.get(b"content-length")) is not None:
            if len(left) < int(length):
                yield CUT
                return
            left = left[int(length) :]
        elif fields.get(b"transfer-encoding") == b"chunked":
            _, end, left = left.partition(b"0\r\n\r\n")
            if not end:
                yield CUT
                return
        else:
            left = b""
        yield status
