"""`UploadForm` returns the same form however its bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch.upload import MAX_FIELD_BYTES, UploadForm
from serve_app.errors import BadRequest, RequestTooLarge

TYPE = "multipart/form-data; boundary=xyz"


def part(head: str, content: bytes) -> bytes:
    return f"--xyz\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"


def form(content: bytes, name: str = "a.jsonl") -> bytes:
    return part('name="purpose"', b"batch") + part(f'name="file"; filename="{name}"', content) + b"--xyz--\r\n"


def read(body: bytes, cut: int = 1 << 20, *, max_bytes: int = 1 << 20, content_type: str = TYPE) -> tuple[UploadForm, bytes]:
    found = UploadForm(content_type, max_bytes=max_bytes)
    came = b"".join(found.receive(body[i : i + cut]) for i in range(0, len(body), cut))
    found.end()
    return found, came


@given(content=st.one_of(st.binary(max_size=300), st.text("\r\n-xyz", max_size=60).map(str.encode)), cut=st.integers(1, 50))
def test_any_cut_gives_the_same_file(content: bytes, cut: int) -> None:
    if b"\r\n--xyz" in b"\r\n" + content:
        return  # the boundary is not in the content of a form
    found, came = read(form(content), cut)
    assert (came, found.num_bytes, found.fields, found.file_name) == (content, len(content), {"purpose": "batch"}, "a.jsonl")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\\\files\\\\in.jsonl", "in.jsonl"),
        ("a\x00\x1bb", "ab"),
        ("/", "file"),
        ("ä.jsonl", "ä.jsonl"),
    ],
)
def test_a_name_is_the_last_part_of_a_path_and_can_be_printed(name: str, kept: str) -> None:
    assert read(form(b"x", name))[0].file_name == kept


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (form(b"x"), "application/json", "file: the content type is not multipart/form-data"),
        (form(b"x"), "multipart/form-data", "file: the content type is not multipart/form-data"),
        (form(b"x"), f"multipart/form-data; boundary={'x' * 300}", "file: the boundary of the form cannot be used: "),
        (form(b"x")[:-12], TYPE, "file: the form breaks off before its end"),
        (b"", TYPE, "file: the form breaks off before its end"),
        (b"no form", TYPE, "file: the form is broken"),
        (part('name="purpose"', b"batch") + b"--xyz--\r\n", TYPE, "file: is missing"),
        (form(b"x")[:-9] + part('name="file"; filename="b"', b"y"), TYPE, "file: is a file; send one"),
        (part('name="other"; filename="b"', b"y") + b"--xyz--\r\n", TYPE, "other: is a file; send one, as the field `file`"),
        (part('name="a"', b"x" * (MAX_FIELD_BYTES + 1)) + b"--xyz--\r\n", TYPE, "a: has more than 4096 bytes"),
        (b"".join(part(f'name="{i}"', b"") for i in range(17)) + b"--xyz--\r\n", TYPE, "16: is one field too many, limit 16"),
        (b"".join(part('name="a"', b"x" * 4000) for i in range(17)) + b"--xyz--\r\n", TYPE, "file: the form has more than 65536"),
    ],
)
def test_a_form_that_is_none_is_refused(body: bytes, content_type: str, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(body, content_type=content_type)
    assert str(refused.value).startswith(said)


def test_a_file_is_refused_with_the_first_byte_above_the_limit() -> None:
    assert read(form(b"x" * 100), max_bytes=100)[1] == b"x" * 100
    with pytest.raises(RequestTooLarge):
        read(form(b"x" * 101), max_bytes=100)
