"""`rows` reads files that fit in no memory, and CSVs as other programs write them."""

from io import BufferedIOBase, BytesIO
from typing import BinaryIO, cast

import pytest

from serve_app.batch.rows import MAX_ROW_BYTES, InputRow, rows


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
    assert found == [InputRow(1, None, "is longer than 16 MiB", is_refused=True), InputRow(2, "a prompt")]
    assert file.largest == MAX_ROW_BYTES + 1


def test_a_column_without_a_name_is_left_out() -> None:
    by_pandas = BytesIO(b",id,prompt\n0,a,one\n1,b,two\n")
    assert list(rows(by_pandas, "csv")) == [InputRow(2, {"id": "a", "prompt": "one"}), InputRow(3, {"id": "b", "prompt": "two"})]


@pytest.mark.parametrize("record", [b"0,a,one,more", b"0,a"])
def test_a_record_with_another_number_of_columns_is_told(record: bytes) -> None:
    found = list(rows(BytesIO(b",id,prompt\n" + record + b"\n"), "csv"))
    assert found == [InputRow(2, None, "has another number of columns than the first line, which has 3")]
