"""Gathering joins several writes of an answer into one: each write costs a system call here, and a read at the client.

Without it, vLLM and uvicorn write the head of a stream and its first event separately, and likewise the last events, ``[DONE]`` and the end
of the body.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Gathering:
    """A stand-in for the transport of uvicorn's ``cycle``, which holds all writes until `flush`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._data: list[bytes] = []
        stands_in: Any = self
        cycle.transport = stands_in

    @classmethod
    def of(cls, cycle: RequestResponseCycle | None) -> "Gathering | None":
        """Begin to gather. Return None if the server is not uvicorn, or if the writes are gathered already."""
        return None if cycle is None or isinstance(cycle.transport, cls) else cls(cycle)

    def write(self, data: bytes) -> None:
        self._data.append(data)

    def flush(self) -> None:
        """Write the gathered data, and give the cycle its transport back. A second call does nothing."""
        now: Any = self._cycle.transport
        if now is not self:
            return
        self._cycle.transport = self._transport
        if self._data and not self._transport.is_closing():
            self._transport.write(b"".join(self._data))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
