"""A frame is a 4-byte big-endian length, then that many bytes. Links between ingress and replica use frames, and so does an engine's pipe.

Pure: no IO. This module does not look into a frame.
"""

from serve_app.links.protocol.errors import FrameTooLarge

HEADER_BYTES = 4
"""The length of 4 GiB would fit. Links allow 64 MiB by default; embedding batches and requests with images are smaller."""


def encode_frame(body: bytes) -> bytes:
    """Return ``body`` as one frame.

    Raises:
        FrameTooLarge: The length does not fit the header.
    """
    size = len(body)
    if size >> 32:
        raise FrameTooLarge(size_bytes=size, limit_bytes=(1 << 32) - 1)
    return size.to_bytes(HEADER_BYTES, "big") + body


class FrameDecoder:
    """Cuts a byte stream into frames. Holds at most one unfinished frame and the chunk that came last.

    ``max_frame_bytes`` limits a frame's body and may be changed between calls.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the bodies of the frames completed by ``data``. Cost: two copies per byte, however the stream is cut.

        Raises:
            FrameTooLarge: The next frame announces more than the limit, and is refused before its body comes. Frames before it are
                returned first; then each call raises, ``receive_data(b"")`` too.
        """
        buffer = self._buffer
        if buffer or not isinstance(data, bytes):
            buffer += data
            with memoryview(buffer) as view:
                frames, used = self._split(view)
            # One cut per call: a cut per frame would move the rest of a 1 MiB chunk once per small frame.
            del buffer[:used]
        else:  # the usual case on a quiet link: whole frames and nothing to keep
            frames, used = self._split(data)
            if used < len(data):
                buffer += memoryview(data)[used:]
        if not frames and len(buffer) >= HEADER_BYTES:
            size = int.from_bytes(buffer[:HEADER_BYTES], "big")
            if size > self.max_frame_bytes:
                raise FrameTooLarge(size_bytes=size, limit_bytes=self.max_frame_bytes)
        return frames

    def _split(self, data: bytes | memoryview) -> tuple[list[bytes], int]:
        """Return the complete frames at the start of ``data``, up to one over the limit, and the bytes they take."""
        frames: list[bytes] = []
        start, end = 0, len(data)
        while end - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            size = int.from_bytes(data[start:body], "big")
            if size > self.max_frame_bytes or end - body < size:
                break
            start = body + size
            frames.append(bytes(data[body:start]))
        return frames, start
