"""`ConfigValues` reads values of a checkpoint's config.json, which may hold anything, and refuses what no checkpoint has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.errors import ConfigError

_DAMAGED = "the file is damaged, or of another kind of model: fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """The mapping of a config.json, or of a part of it. ``where`` is the path that errors begin with."""

    values: Mapping[str, Any]
    where: str

    def has(self, *names: str) -> bool:
        """Return whether one of the keys is there and not null."""
        return any(self.values.get(name) is not None for name in names)

    def whole(self, *names: str, most: int, least: int = 1, default: int | None = None) -> int:
        """Return the first of the keys that is there, a whole number from ``least`` to ``most``; ``default`` if none is there.

        Raises:
            ConfigError: The value is none, or no key is there and there is no default.
        """
        for name in names:
            if (value := self.values.get(name)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                problem = f"is {_short(value)}, and should be a whole number from {least} to {most}"
                raise ConfigError(self.key(name), problem, _DAMAGED)
            return value
        if default is None:
            hint = "the defaults of Transformers are not known here: write the key into a copy of the file"
            raise ConfigError(self.key(names[0]), "is missing", hint)
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a value that is true or false; anything else is a ConfigError."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(self.key(name), f"is {_short(value)}, and should be true or false", _DAMAGED)
        return value

    def text(self, *names: str) -> str:
        """Return the first of the keys that is there, in lower case; "" if none is. What is no text is a ConfigError."""
        for name in names:
            if (value := self.values.get(name)) is None:
                continue
            if not isinstance(value, str):
                raise ConfigError(self.key(name), f"is {_short(value)}, and should be a text", _DAMAGED)
            return value.lower()
        return ""

    def part(self, name: str) -> "ConfigValues | None":
        """Return a mapping inside; None if it is not there. What is no mapping is a ConfigError."""
        if (value := self.values.get(name)) is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(self.key(name), f"is {_short(value)}, and should be a mapping", _DAMAGED)
        return ConfigValues(value, self.key(name))

    def texts(self, name: str, length: int) -> Sequence[str] | None:
        """Return a list of ``length`` texts; None if it is not there. Anything else is a ConfigError."""
        if (value := self.values.get(name)) is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(each, str) for each in value):
            raise ConfigError(self.key(name), f"is {_short(value)}, and should be a list of {length} texts", _DAMAGED)
        return value

    def key(self, name: str) -> str:
        """Return the path of a key for errors: ``FILE: KEY``, and ``FILE: PART.KEY`` inside a part."""
        return f"{self.where}.{name}" if ": " in self.where else f"{self.where}: {name}"


def _short(value: object) -> str:
    """Return at most 40 characters of a value."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"  # Python refuses to print one of more than 4,300
    text = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__} of {len(value)} entries"
    return text if len(text) <= 40 else f"{text[:36]}..."
