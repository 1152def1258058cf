"""This script runs ``serve-app demo`` in a terminal and draws what it prints as an animated SVG: ``python -m tools.record_demo OUT.svg``.

Every character is the demo's own. Waits of more than `MAX_WAIT_S` are shortened to that, and those in which only a line of progress moves
to `MAX_PROGRESS_S`; the first line says so. The animation plays once and ends with the last screen.
"""

import argparse
import codecs
import fcntl
import html
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS, LINES = 100, 26
MAX_WAIT_S, MAX_PROGRESS_S = 1.0, 4.0
FONT_PX, LINE_PX, MARGIN_PX = 14, 19, 16
COLUMN_PX = 8.43
_FOREGROUND, _BACKGROUND = "#d7e0e6", "#10191d"
_COLOURS = {"1": "red", "2": "green", "3": "yellow", "4": "blue", "6": "cyan"}
_STYLES = {"1": "bold", "2": "dim"} | {f"{bright}{number}": colour for bright in "39" for number, colour in _COLOURS.items()}
"""SGR codes that the demo uses. Any other code is an error: the picture would differ from the terminal."""
_CSS = {
    "bold": "font-weight: bold",
    "dim": "opacity: .6",
    "red": "fill: #ff7b72",
    "green": "fill: #4ecb8d",
    "yellow": "fill: #e3b341",
    "blue": "fill: #79b8ff",
    "cyan": "fill: #56d4dd",
}
_TOKEN = re.compile(r"\x1b\[([\d;]*)m|(\r*\n)|(\r|\x1b\[2K|\x1b\[1A|\x1b\[\?25[hl])|([^\x1b\r\n]+)")
"""A style, the end of a line, a movement of the cursor such as a spinner's, or text."""
_BEGUN_CODE = re.compile(r"\x1b(\[[\d;?]*)?$")
"""A code whose rest comes with the next piece of output."""
Printed = tuple[float, str]
"""Seconds since the start, and what was printed then."""


@dataclass
class Piece:
    """Some characters of one line that appear at the same time in one style. ``until_s``: when they are erased; None for never."""

    at_s: float
    line: int
    column: int
    text: str
    styles: tuple[str, ...]
    until_s: float | None = None


def record(command: Sequence[str]) -> Iterator[Printed]:
    """Run a command in a terminal of `COLUMNS` x `LINES` and yield what it prints; raise `SystemExit` if it fails."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        os.execvp(command[0], list(command))
    begun, decoder, held = time.monotonic(), codecs.getincrementaldecoder("utf-8")("replace"), ""
    while data := _read(terminal):
        text = held + decoder.decode(data)
        begun_code = _BEGUN_CODE.search(text)
        held = begun_code[0] if begun_code else ""
        yield time.monotonic() - begun, text.removesuffix(held)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(f"error: {' '.join(command)} ended with exit status {code}: nothing was written")


def _read(terminal: int) -> bytes:
    """Return what was printed, nothing at the program's end."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the program has ended
        return b""


def shortened(printed: Iterable[Printed]) -> Iterator[Printed]:
    """Yield the same with waits of at most `MAX_WAIT_S`, and of at most `MAX_PROGRESS_S` while a line is only printed again and again."""
    before_s = now_s = progress_s = 0.0
    for at_s, text in printed:
        is_progress = "\x1b[2K" in text and "\n" not in text
        wait_s = min(at_s - before_s, MAX_WAIT_S, *([MAX_PROGRESS_S - progress_s] if is_progress else []))
        progress_s = progress_s + wait_s if is_progress else 0.0
        now_s, before_s = now_s + wait_s, at_s
        yield now_s, text


def laid_out(printed: Iterable[Printed]) -> list[Piece]:
    """Return the pieces in order of time, with long lines wrapped as a terminal does."""
    pieces, line, column, styles = list[Piece](), 0, 0, tuple[str, ...]()
    for at_s, text in printed:
        if unknown := _TOKEN.sub("", text):
            raise ValueError(f"a terminal would do something with {unknown!r} that this picture does not show")
        for sgr, newline, movement, plain in _TOKEN.findall(text):
            if newline:
                line, column = line + 1, 0
            elif movement == "\r":
                column = 0
            elif movement == "\x1b[1A":
                line -= 1
            elif movement == "\x1b[2K":
                for piece in pieces:
                    if piece.line == line and piece.until_s is None:
                        piece.until_s = at_s
            elif movement:
                pass  # the cursor is shown or hidden
            elif plain:
                while plain:
                    if column == COLUMNS:
                        line, column = line + 1, 0
                    part, plain = plain[: COLUMNS - column], plain[COLUMNS - column :]
                    pieces.append(Piece(at_s, line, column, part, styles))
                    column += len(part)
            else:
                for code in sgr.split(";"):
                    styles = () if code in ("", "0") else (*styles, _STYLES[code])
    return pieces


def svg(pieces: Sequence[Piece], title: str) -> str:
    """Return the animation."""

    def hide(until_s: float | None) -> str:
        return "" if until_s is None else f", hide 1ms {until_s:.2f}s forwards"

    width, height = COLUMNS * COLUMN_PX + 2 * MARGIN_PX, LINES * LINE_PX + 2 * MARGIN_PX
    drawn = "\n".join(
        f'<text class="{" ".join(("p", *piece.styles))}" x="{MARGIN_PX + piece.column * COLUMN_PX:.1f}" '
        f'y="{MARGIN_PX + (piece.line + 0.75) * LINE_PX:.1f}" textLength="{len(piece.text) * COLUMN_PX:.1f}" '
        f'style="animation: show 1ms {piece.at_s:.2f}s forwards{hide(piece.until_s)}">{html.escape(piece.text)}</text>'
        for piece in pieces
        if piece.text.strip() and piece.until_s != piece.at_s
    )
    end_s = pieces[-1].at_s + 0.1
    tops = {0.0: 0} | {piece.at_s: piece.line - LINES + 1 for piece in pieces if piece.line >= LINES}
    frames = " ".join(f"{100 * at_s / end_s:.3f}% {{ transform: translateY({-top * LINE_PX}px) }}" for at_s, top in tops.items())
    last = max(tops.values())
    styles = "\n".join(f".{name} {{ {css} }}" for name, css in _CSS.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{html.escape(title)}">
<style>
text {{ font: {FONT_PX}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: {_FOREGROUND}; white-space: pre }}
{styles}
.p {{ visibility: hidden }}
@keyframes show {{ to {{ visibility: visible }} }}
@keyframes hide {{ to {{ visibility: hidden }} }}
#screen {{ animation: scroll {end_s:.2f}s step-end forwards }}
@keyframes scroll {{ {frames} 100% {{ transform: translateY({-last * LINE_PX}px) }} }}
</style>
<rect width="100%" height="100%" rx="10" fill="{_BACKGROUND}"/>
<svg y="{MARGIN_PX / 2}" height="{height - MARGIN_PX}"><g id="screen" transform="translate(0 {-MARGIN_PX / 2})">
{drawn}
</g></svg>
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    limits = f"waits of more than {MAX_WAIT_S:g} s and progress of more than {MAX_PROGRESS_S:g} s are shortened"
    first: Printed = (0.0, f"\x1b[2m# recorded; {limits}\x1b[0m\n$ make demo\n")
    printed = [first, *record([str(Path(sys.executable).with_name("serve-app")), "demo"])]
    out.write_text(svg(laid_out(shortened(printed)), "make demo: an engine is killed under a stream, and the stream continues"))


if __name__ == "__main__":
    main()
