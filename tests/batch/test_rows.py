"""Rows of a file that no memory would hold."""

from io import BufferedIOBase
from typing import BinaryIO, cast

from serve_app.batch.rows import MAX_ROW_BYTES, Row, rows


class LongLine(BufferedIOBase):
    """A file whose first line has a gigabyte, and whose second one is a prompt. ``largest`` is the most that was asked for at once."""

    def __init__(self) -> None:
        self.left, self.largest = 1 << 30, 0
        self.then = [b"\n", b"a prompt\n"]
        self.block = b"x" * (MAX_ROW_BYTES + 1)

    def readline(self, size: int | None = -1, /) -> bytes:
        self.largest = max(self.largest, size or 0)
        assert size is not None
        assert size > 0, "a line of any length"
        if not self.left:
            return self.then.pop(0) if self.then else b""
        given = min(size, self.left)
        self.left -= given
        return self.block[:given]


def test_a_line_of_a_gigabyte_has_its_reason_and_is_never_in_memory_as_a_whole() -> None:
    file = LongLine()
    found = list(rows(cast(BinaryIO, file), "text"))
    assert found == [Row(1, None, "is longer than 16 MiB"), Row(2, "a prompt")]
    assert file.largest == MAX_ROW_BYTES + 1
