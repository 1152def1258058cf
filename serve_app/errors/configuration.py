"""These errors say that the configuration file is wrong, or asks for an address that is not free. They are never sent over HTTP."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class ConfigError(ServingError):
    """The configuration file cannot be used. ``path`` is the dotted path of the key, "" for the file as a whole."""

    code: ClassVar[str] = "config_error"
    path: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.problem}; {self.hint}" if self.hint else f"{where}{self.problem}"


@dataclass(eq=False)
class FileUnreadable(ConfigError):
    """The operating system does not let the file be read. This may end without a change of the file, as a lack of descriptors does."""

    code: ClassVar[str] = "file_unreadable"


@dataclass(eq=False)
class ListenFailed(ServingError):
    """An ingress or a replica cannot listen on its address; ``key`` is the setting of the port."""

    code: ClassVar[str] = "listen_failed"
    host: str
    port: int
    reason: str
    key: str = "ingress.port"

    def __str__(self) -> str:
        return f"cannot listen on {self.host}:{self.port}: {self.reason}; set {self.key} to a free port"
