"""This module writes numbers and verdicts for the report and the terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from loadtest.errors import ExitCode

MAX_PROBLEM = 1000
"""Shown characters of a sentence in a manifest's ``problems``, which may quote a process's last output."""

NEVER_STARTED = "interrupted before the start; nothing was sent"
"""Text for a run that has an interruption, and neither an epoch nor problems."""


class VerdictWords(NamedTuple):
    code: ExitCode
    tone: str
    """Class in the page's style."""
    colour: str
    """Colour in the terminal."""
    word: str
    sentence: str


VERDICTS = {
    "pass": VerdictWords(ExitCode.PASS, "pass", "green", "PASS", "Pass: every limit of the SLO is kept"),
    "slo-missed": VerdictWords(ExitCode.SLO_MISSED, "fail", "red", "SLO MISSED", "SLO missed"),
    "undecided": VerdictWords(
        ExitCode.UNDECIDED, "undecided", "yellow", "UNDECIDED",
        "Undecided: this run cannot say whether the SLO is kept",
    ),
    "invalid": VerdictWords(ExitCode.INVALID, "invalid", "red", "INVALID", "INVALID: this run says nothing about the target"),
}  # fmt: skip
"""The words for each `Summary.verdict`."""


def shown(text: str, most: int = 200) -> str:
    """Return the text for a message: shortened to begin and end, with control characters as ``\\x1b``, which no terminal executes."""
    cut = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 3 :]}"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut)


def is_writable(text: str) -> bool:
    """Return whether the text can be encoded: JSON and YAML can contain half of a surrogate pair, UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def percentile(q: float) -> str:
    """Return text like ``p99`` or ``p99.9``, with nine digits at most."""
    return f"p{q * 100:.9g}"


def seconds(values: Sequence[float | None]) -> list[str]:
    """Return the values in the unit that fits the first value, or the largest if the first is 0; three digits at least, – for None.

    Only the first text names the unit.
    """
    finite = [abs(value) for value in values if value is not None and value < float("inf")]
    first = abs(values[0] or 0.0) or max(finite, default=0.0)
    unit, scale = ("s", 1.0) if first >= 10 else ("ms", 1e3) if first >= 1e-3 else ("µs", 1e6)
    digits = 0 if first * scale >= 100 else 1 if first * scale >= 10 else 2
    words = ["–" if value is None else "∞" if value == float("inf") else f"{value * scale:.{digits}f}" for value in values]
    return [f"{words[0]} {unit}", *words[1:]]


def share(value: float) -> str:
    """Return text like ``99.12 %``."""
    return f"{value * 100:.2f} %"


def ratio(value: float | None) -> str:
    """Return text like ``0.873``, or – for None."""
    return "–" if value is None else "∞" if value == float("inf") else f"{value:.3f}"
