import sys
import xml.etree.ElementTree as ET

import pytest

from tools.record_demo import COLUMNS, MAX_PROGRESS_S, MAX_WAIT_S, Piece, laid_out, record, shortened, svg


def test_pieces_stand_where_a_terminal_shows_them() -> None:
    printed = [(0.5, "one \x1b[1;32mtwo\x1b[0m\r\n"), (1.0, "x" * (COLUMNS + 2))]
    assert laid_out(printed) == [
        Piece(0.5, 0, 0, "one ", ()),
        Piece(0.5, 0, 4, "two", ("bold", "green")),
        Piece(1.0, 1, 0, "x" * COLUMNS, ()),
        Piece(1.0, 2, 0, "xx", ()),
    ]


def test_a_spinner_is_erased_when_the_terminal_erases_it() -> None:
    printed = [(0.0, "\x1b[?25lone"), (0.5, "\r\x1b[2Ktwo\n"), (1.0, "\r\x1b[1A\x1b[2K\x1b[?25hthree")]
    assert laid_out(printed) == [
        Piece(0.0, 0, 0, "one", (), 0.5),
        Piece(0.5, 0, 0, "two", (), 1.0),
        Piece(1.0, 0, 0, "three", ()),
    ]


@pytest.mark.parametrize("text", ["\x1b[5;7H", "\x1b[35mviolet"])
def test_what_the_picture_would_not_show_is_an_error(text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        laid_out([(0.0, text)])


def test_only_long_waits_are_shortened() -> None:
    assert list(shortened([(0.5, "a"), (60.0, "b"), (60.2, "c")])) == [
        (0.5, "a"),
        (0.5 + MAX_WAIT_S, "b"),
        (pytest.approx(0.7 + MAX_WAIT_S), "c"),
    ]


def test_a_line_of_progress_is_shown_for_some_seconds_and_then_as_it_was_last() -> None:
    frames = [(number / 10, f"\r\x1b[2K{number / 10:g} s") for number in range(1, 201)]
    played = list(shortened([(0.0, "load\n"), *frames, (20.1, "\r\x1b[2Kdone\n")]))
    assert [text for _, text in played] == ["load\n", *(text for _, text in frames), "\r\x1b[2Kdone\n"]
    assert played[-2][0] == pytest.approx(MAX_PROGRESS_S)
    assert played[-1][0] == pytest.approx(MAX_PROGRESS_S + 0.1)
    picture = svg(laid_out(played), "load")
    assert "1 s</text>" in picture
    assert "15 s</text>" not in picture, "of frames of the same instant only the last can be seen"
    assert "20 s</text>" in picture


def test_a_program_is_recorded_whole_and_in_colour() -> None:
    code = "print('\\x1b[1mgrüße\\x1b[0m\\n' * 2000, end='')"
    assert "".join(text for _, text in record([sys.executable, "-c", code])) == "\x1b[1mgrüße\x1b[0m\r\n" * 2000


def test_text_after_a_movement_of_the_cursor_is_recorded_at_the_end() -> None:
    code = "print('one\\r\\x1b[2Ktwo', end='')"
    assert "".join(text for _, text in record([sys.executable, "-c", code])) == "one\r\x1b[2Ktwo"


def test_a_program_that_fails_gives_no_picture() -> None:
    with pytest.raises(SystemExit, match="ended with exit status 3"):
        list(record([sys.executable, "-c", "raise SystemExit(3)"]))


def test_the_picture_is_well_formed_and_scrolls_to_the_last_line() -> None:
    picture = svg(laid_out([(number / 10, f"<{number}>\n") for number in range(50)]), "a & b")
    assert ET.fromstring(picture).get("aria-label") == "a & b"
    assert "&lt;49&gt;" in picture
    assert f"100% {{ transform: translateY({-24 * 19}px) }}" in picture
