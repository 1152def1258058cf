"""These functions read the text of a file, and raise errors that name the file; `from_here` writes its name for people."""

import os
import stat
from pathlib import Path

from serve_app.errors import ConfigError, FileUnreadable

EXAMPLE = (Path(__file__).parents[1] / "examples" / "cpu.yaml").resolve()
"""The example for CPUs. `serve_app/examples` is a link to the folder `examples` in a checkout, and a copy in an installed package."""


def from_here(path: Path) -> str:
    """Return a path as a user of the working folder writes it: relative if it is below that folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def read_text(path: Path) -> str:
    """Return the content of a file; - is standard input.

    Raises:
        FileUnreadable: The system does not let the file be read.
        ConfigError: The file is not UTF-8.
    """
    try:
        return (Path("/dev/stdin") if str(path) == "-" else path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise _no_text(path, exc) from exc


def read_regular_file(path: Path, max_bytes: int) -> str:
    """Return the content of a regular file. A pipe, whose opening would wait for a writer, or a device that has no end is refused.

    Raises:
        FileUnreadable: The system does not let the file be read.
        ConfigError: The file is not regular, larger than ``max_bytes``, or not UTF-8.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("", f"{path} is not a regular file")
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ConfigError("", f"{path} has more than {max_bytes} bytes", "remove what does not belong in it")
        return content.decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise _no_text(path, exc) from exc


def _no_text(path: Path, cause: OSError | UnicodeDecodeError) -> ConfigError:
    if isinstance(cause, OSError):
        return FileUnreadable("", f"{path} cannot be read: {cause.strerror}")
    return ConfigError("", f"{path} cannot be read: not UTF-8 at byte {cause.start}")
