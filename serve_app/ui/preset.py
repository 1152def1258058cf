"""`Preset` holds the controls of the chat page, the link that presets them, and the request that they make of a prompt. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_CHOICES = 4
"""Most answers side by side; there is no room for more."""

Message = dict[str, str]


class Preset(BaseModel):
    """The controls of the chat page. Their names are those of the link's parameters."""

    model_config = ConfigDict(frozen=True)

    mode: Literal["chat", "completion"] = "chat"
    model: str = ""
    system: str = ""
    prompt: str = ""
    temperature: float = Field(default=0.7, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=256, ge=1, le=32768)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str = ""
    """Text at which an answer ends; empty for none."""

    @classmethod
    def from_link(cls, parameters: Mapping[str, str]) -> tuple["Preset", list[str]]:
        """Return the controls of a link, and a sentence about each of its parameters that cannot be used."""
        known = {name: value for name, value in parameters.items() if name in cls.model_fields}
        problems = []
        try:
            return cls.model_validate(known), []
        except ValidationError as exc:
            for error in exc.errors():
                name = str(error["loc"][0])
                problems.append(f"The link's {name}={known.pop(name, '')} is not used: {error['msg'].lower()}.")
        return cls.model_validate(known), problems

    def link(self) -> str:
        """Return the query that presets these controls, without defaults and without the API key."""
        values = self.model_dump(exclude_defaults=True, exclude_none=True)
        return f"?{urlencode(values)}" if values else ""

    def refusal(self) -> str:
        """Return a sentence about why these controls cannot be sent; empty if they can."""
        if not self.prompt.strip():
            return "Type a prompt first."
        if self.n > 1 and self.temperature == 0:
            return "At temperature 0 all answers would be the same: set a temperature above 0, or ask for one answer."
        return ""

    def request(self, history: Sequence[Message]) -> tuple[str, dict[str, Any]]:
        """Return path and body that ask for the answer to ``prompt`` after ``history``; a completion has no history."""
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "n": self.n,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.stop:
            body["stop"] = [self.stop]
        if self.mode == "completion":
            return "/v1/completions", body | {"prompt": self.prompt}
        system = [{"role": "system", "content": self.system}] if self.system.strip() else []
        asked = {"role": "user", "content": self.prompt}
        return "/v1/chat/completions", body | {"messages": [*system, *history, asked]}
