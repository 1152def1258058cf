"""This module keeps a command running when its standard output or error can no longer be written.

The reader of a pipe may close it, as `head` does, or a disk may be full. Python would raise, Typer would exit with 1, which means that an
SLO was missed, and a load would be cut off. This module drops the output that cannot be written, and the command continues.
"""

import io
import sys
from typing import Any, TextIO


class Outputs:
    """The replacement of ``sys.stdout`` and ``sys.stderr`` for the rest of the process."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        sys.stdout, sys.stderr = self._instead_of(sys.stdout), self._instead_of(sys.stderr)

    def lost(self) -> str:
        """Return why output was lost that a reader wanted; empty if none was."""
        for stream in (sys.stdout, sys.stderr):
            if stream:
                stream.flush()
        return next((file.lost for file in self._files if file.lost), "")

    def _instead_of(self, stream: TextIO) -> TextIO:
        if not stream:  # None if it was closed before Python started
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
