"""`ShownAnswer` is the answer to one prompt while it arrives: its choices, and the figures below it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.ui.api import Delta, Event, Usage, Waiting


@dataclass
class ShownAnswer:
    """An answer while it arrives. Times are in seconds of one monotonic clock."""

    num_choices: int
    sent_at: float
    texts: list[str] = field(init=False)
    thoughts: list[str] = field(init=False)
    """By choice, a reasoning model's text before its answer. It is shown, but is not part of the conversation."""
    finished: dict[int, str] = field(default_factory=dict)
    """Choice -> why it ended."""
    first_at: float | None = None
    """When the first thought or text arrived."""
    last_at: float | None = None
    num_pieces: int = 0
    output_tokens: int | None = None
    """The service's count; None before the end of the stream."""
    is_waiting: bool = False

    def __post_init__(self) -> None:
        self.texts = [""] * self.num_choices
        self.thoughts = [""] * self.num_choices

    def add(self, event: Event, *, now: float) -> None:
        """Add the next event of the stream. Pieces of an unexpected choice are ignored."""
        self.is_waiting = isinstance(event, Waiting)
        match event:
            case Delta(choice, text, finish, thought) if 0 <= choice < self.num_choices:
                if text or thought:
                    self.first_at = now if self.first_at is None else self.first_at
                    self.last_at = now
                    self.num_pieces += 1
                    self.texts[choice] += text
                    self.thoughts[choice] += thought
                if finish is not None:
                    self.finished[choice] = finish
            case Usage(tokens):
                self.output_tokens = tokens

    def figures(self, *, now: float) -> str:
        """Return tokens, time to first token and tokens per second, in one line.

        Until the service sends the number of tokens, the number of pieces is shown with a ≈. Tokens per second are of all choices together,
        from the first token on.
        """
        if self.first_at is None or self.last_at is None:
            return f"{'waiting for a replica' if self.is_waiting else 'sent'} · {now - self.sent_at:.1f} s"
        tokens = self.num_pieces if self.output_tokens is None else self.output_tokens
        about = "≈ " if self.output_tokens is None else ""
        parts = [f"{about}{tokens} tokens", f"TTFT {self.first_at - self.sent_at:.2f} s"]
        later, span_s = tokens - self.num_choices, self.last_at - self.first_at
        if later > 0 and span_s > 0:
            parts.append(f"{about}{later / span_s:.1f} tokens/s")
        parts.append(f"{self.last_at - self.sent_at:.1f} s")
        if self.is_waiting:
            parts.append("waiting: the next token is late, or the request continues at another replica")
        return " · ".join([*parts, *self._ends()])

    def _ends(self) -> Sequence[str]:
        words = {"length": "ended at max_tokens"}
        return sorted({words[reason] for reason in self.finished.values() if reason in words})
