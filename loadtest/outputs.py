"""This module keeps a command running when its standard output or error can no longer be written.

A reader goes away, as `head` does, or a disk is full. Python would raise, Typer end with 1, which means that an SLO was missed, and a load
would end in its middle. Here, what cannot be written is dropped, and the command goes on.
"""

import io
import sys
from typing import Any, TextIO


class Outputs:
    """Takes the place of ``sys.stdout`` and ``sys.stderr``, for good."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        sys.stdout, sys.stderr = self._instead_of(sys.stdout), self._instead_of(sys.stderr)

    def lost(self) -> str:
        """Return why something was dropped that somebody wanted to read; empty if nothing was."""
        for stream in (sys.stdout, sys.stderr):
            if stream:
                stream.flush()
        return next((file.lost for file in self._files if file.lost), "")

    def _instead_of(self, stream: TextIO) -> TextIO:
        if not stream:  # None: it was closed before Python started
            return stream
        self._files.append(_File(stream.fileno(), "w", closefd=False))
        how: dict[str, Any] = {name: getattr(stream, name) for name in ("encoding", "errors")}
        return io.TextIOWrapper(io.BufferedWriter(self._files[-1]), line_buffering=True, **how)


class _File(io.FileIO):
    lost = ""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except OSError as exc:
            self.lost = exc.strerror or str(exc)
        return memoryview(data).nbytes
