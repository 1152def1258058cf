import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.links.protocol.errors import FrameTooLarge
from serve_app.links.protocol.frames import FrameDecoder, encode_frame
from tests.protocol.helpers import cut_at


def test_a_frame_is_its_big_endian_length_and_its_body() -> None:
    assert encode_frame(b"abc") == bytes.fromhex("00000003 616263")
    assert encode_frame(b"") == bytes.fromhex("00000000")


@given(
    payloads=st.lists(st.binary(max_size=40)),
    cuts=st.lists(st.integers(0, 2000)),
    kind=st.sampled_from([bytes, bytearray, memoryview]),
)
def test_any_chunking_gives_the_same_frames(payloads: list[bytes], cuts: list[int], kind: type) -> None:
    wire = b"".join(encode_frame(p) for p in payloads)
    decoder = FrameDecoder(max_frame_bytes=40)
    assert [f for chunk in cut_at(wire, cuts) for f in decoder.receive_data(kind(chunk))] == payloads
    assert decoder.buffered_bytes == 0


def test_a_large_frame_in_small_chunks_and_small_frames_in_a_large_chunk_come_out_whole() -> None:
    decoder = FrameDecoder(max_frame_bytes=1 << 20)
    large = bytes(range(256)) * 4096
    wire = encode_frame(large)
    assert [f for i in range(0, len(wire), 1000) for f in decoder.receive_data(wire[i : i + 1000])] == [large]
    assert decoder.receive_data(encode_frame(b"ab") * 100_000) == [b"ab"] * 100_000


def test_an_oversize_frame_is_refused_at_its_length_and_ever_after() -> None:
    decoder = FrameDecoder(max_frame_bytes=40)
    with pytest.raises(FrameTooLarge) as refused:
        decoder.receive_data((41).to_bytes(4, "big"))
    assert (refused.value.size_bytes, refused.value.limit_bytes) == (41, 40)
    for data in (b"", b"x" * 41, encode_frame(b"ok")):
        with pytest.raises(FrameTooLarge):
            decoder.receive_data(data)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_frames_before_an_oversize_one_come_out_first(kind: type) -> None:
    decoder = FrameDecoder(max_frame_bytes=40)
    assert decoder.receive_data(kind(encode_frame(b"one") + encode_frame(b"two") + b"\xff" * 9)) == [b"one", b"two"]
    with pytest.raises(FrameTooLarge):
        decoder.receive_data(b"")


def test_a_raised_limit_lets_the_waiting_frame_through() -> None:
    decoder = FrameDecoder(max_frame_bytes=3)
    assert decoder.receive_data(encode_frame(b"one") + encode_frame(b"three")) == [b"one"]
    decoder.max_frame_bytes = 5
    assert decoder.receive_data(b"") == [b"three"]


def test_a_body_too_long_for_the_header_is_not_encoded() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 32

    with pytest.raises(FrameTooLarge):
        encode_frame(Huge())
