"""`Chat` is one conversation of the chat page, as the browser holds it. Pure."""

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from serve_app.ui.preset import Message

_TITLE_CHARS = 48


class Chat(BaseModel):
    """A conversation. An empty one has no id."""

    model_config = ConfigDict(frozen=True)

    id: str = ""
    title: str = ""
    turns: list[tuple[str, str]] = []
    """Each prompt with its answer. The last answer is the first of ``choices`` if there are any."""
    choices: list[str] = []
    """The answers to the last prompt, as long as another one may be chosen. The browser's storage does not keep them."""

    @classmethod
    def read(cls, value: Any) -> "Chat":
        """Return the chat in ``value``, which a browser sent; an empty chat if ``value`` has another form."""
        try:
            return cls.model_validate(value)
        except ValidationError:
            return cls()

    def messages(self) -> list[Message]:
        """Return the conversation as the API expects it."""
        roles = ("user", "assistant")
        return [{"role": role, "content": text} for turn in self.turns for role, text in zip(roles, turn, strict=True)]

    def before(self, turn: int) -> "Chat":
        """Return this chat without the turn with the index ``turn`` and the turns after it."""
        return self.model_copy(update={"turns": self.turns[:turn], "choices": []})

    def without(self, turn: int) -> "Chat":
        """Return this chat without the turn with the index ``turn``, a prompt and its answer."""
        turns = [*self.turns[:turn], *self.turns[turn + 1 :]]
        return self.model_copy(update={"title": _title(turns[0][0]) if turns else "", "turns": turns, "choices": []})

    def answered(self, prompt: str, choices: Sequence[str]) -> "Chat":
        """Return this chat with one more turn; its answer is the first choice."""
        turns = [*self.turns, (prompt, choices[0])]
        return Chat(id=self.id or uuid.uuid4().hex, title=_title(turns[0][0]), turns=turns, choices=list(choices))

    def with_choice(self, number: int) -> "Chat":
        """Return this chat with one of ``choices`` as its last answer."""
        prompt, _ = self.turns[-1]
        return self.before(len(self.turns) - 1).answered(prompt, [self.choices[number]])


def _title(prompt: str) -> str:
    text = " ".join(prompt.split())
    return text if len(text) <= _TITLE_CHARS else f"{text[: _TITLE_CHARS - 1]}…"
