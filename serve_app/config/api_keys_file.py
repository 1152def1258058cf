"""The file with one API key a line (`ingress.api_keys_file`), which becomes a `Keyring`.

Each key is a tenant of its own without limits, named by the first 12 hex digits of its SHA-256. No error quotes a key.
"""

import dataclasses
import hashlib
import re
from pathlib import Path

from serve_app.config.files import read_regular_file
from serve_app.core.tenants import Key, Keyring, Tenant
from serve_app.errors import ConfigError

MIN_KEY_CHARS = 16
MAX_KEYS = 5_000
"""Most keys of a file. A request is compared with all of them, which takes 0.3 ms for 5,000; they take 1 s to read."""
MAX_BYTES = 4 << 20
"""The largest file of keys or of tenants. `MAX_KEYS` keys of tenants with all their fields have 1 MiB."""
SHA256_DIGITS = re.compile(r"[0-9a-fA-F]{64}")
CREATE_FILE_HINT = "create it on every node of the ingress, readable for the ingress's user"
FEWER_KEYS_HINT = "remove keys that have expired or were revoked: each request is compared with all keys"
"""Ways out in errors of this file and of the tenants file."""
_NAME_CHARS = 12  # enough to tell keys apart, too little to look one up by
_KEY = re.compile(r"[!-~]+")  # what a header can carry without quoting
_KEYS_FILE = "ingress.api_keys_file"
_HINT = "a line is a key, for example of `openssl rand -hex 32`, or sha256: and the 64 hex digits of one"


def read_api_keys(path: Path, *, shared: bool = False) -> Keyring:
    """Return the keys of a file with a key a line. Each is a tenant of its own.

    A line is a key of at least `MIN_KEY_CHARS` characters, or `sha256:` and the 64 hex digits of a key's SHA-256, or empty, or a comment
    that starts with `#`.

    Raises:
        ConfigError: The file cannot be read (`FileUnreadable`), or holds no key or more than `MAX_KEYS`, or has a line that is no key.
    """
    try:
        text = read_regular_file(path, MAX_BYTES)
    except ConfigError as exc:
        raise dataclasses.replace(exc, path=_KEYS_FILE, hint=exc.hint or CREATE_FILE_HINT) from exc
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    digests = {_digest_of_line(path, number, line): None for number, line in lines if line and not line.startswith("#")}
    if not digests:
        raise ConfigError(_KEYS_FILE, f"{path} holds no key", _HINT)
    if len(digests) > MAX_KEYS:
        raise ConfigError(_KEYS_FILE, f"{path} holds {len(digests)} keys, and the limit is {MAX_KEYS}", FEWER_KEYS_HINT)
    names = {digest.hex()[:_NAME_CHARS]: digest for digest in digests}
    return Keyring((Tenant(name, shares_prefix_cache=shared), [Key(name, digest)]) for name, digest in names.items())


def _digest_of_line(path: Path, number: int, line: str) -> bytes:
    if line.startswith("sha256:"):
        if not SHA256_DIGITS.fullmatch(digest := line.removeprefix("sha256:")):
            raise ConfigError(_KEYS_FILE, f"line {number} of {path} is no SHA-256", _HINT)
        return bytes.fromhex(digest)
    if len(line) < MIN_KEY_CHARS or not _KEY.fullmatch(line):
        problem = f"line {number} of {path} has {len(line)} characters; {MIN_KEY_CHARS} or more without spaces are needed"
        raise ConfigError(_KEYS_FILE, problem, _HINT)
    return hashlib.sha256(line.encode()).digest()
