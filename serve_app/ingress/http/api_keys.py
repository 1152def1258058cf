"""API keys come from a file, which is read again when it changes, and decide which clients may send requests.

Each line of the file is a key of at least `MIN_KEY_CHARS` characters, or `sha256:` and the 64 hex digits of a key's SHA-256, or empty, or
a comment that starts with `#`. Keys are held and compared as digests. The key of a request is compared with every digest, so that the time
of a comparison reveals nothing.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from serve_app.errors import ConfigError, InvalidApiKey

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAME_CHARS = 12  # enough to tell keys apart, too little to look one up by
_KEY = re.compile(r"[!-~]+")  # what a header can carry without quoting
_PATH = "ingress.api_keys_file"
_HINT = "a line is a key, for example of `openssl rand -hex 32`, or sha256: and the 64 hex digits of one"


def shown_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the header that shows the client's key, as OpenAI's clients send it. Anthropic's send the bare key as `X-Api-Key`."""
    bare: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            return value
        if name == b"x-api-key" and bare is None:
            bare = b"Bearer " + value
    return bare


class ApiKeys:
    """The keys in the file ``path``.

    Raises:
        ConfigError: The file cannot be read, or holds no key, or has a line that is no key. The error quotes no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self._digests = self._read()

    def check(self, authorization: bytes | None) -> str:
        """Check a request's Authorization header and return the name of its key: the first hex digits of the key's SHA-256.

        Raises:
            InvalidApiKey: The header carries no key that is in the file.
        """
        self._follow_changes()
        if authorization is None:
            raise InvalidApiKey("no API key was given")
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise InvalidApiKey("the Authorization header is not of the scheme Bearer")
        digest = hashlib.sha256(key.strip()).digest()
        if sum(hmac.compare_digest(digest, known) for known in self._digests) == 0:
            raise InvalidApiKey("the API key is not known")
        return digest.hex()[:_NAME_CHARS]

    def knows(self, name: str) -> bool:
        """Return whether a key of this name is in the file, or the name is empty: of a client from before there were keys."""
        self._follow_changes()
        return not name or any(digest.hex().startswith(name) for digest in self._digests)

    def _follow_changes(self) -> None:
        """Read the file again if it has changed. A file that cannot be used is reported once, and the keys stay as they were."""
        if (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp
        try:
            self._digests = self._read()
        except ConfigError as exc:
            logger.error("%s; the %d API keys read before stay in force", exc, len(self._digests))
        else:
            logger.info("%s has changed: %d API keys are in force", self._path, len(self._digests))

    def _stamp(self) -> tuple[int, int, int] | None:
        # `stat` follows symbolic links: Kubernetes replaces a mounted Secret by pointing a link at another folder.
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> tuple[bytes, ...]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else f"not UTF-8 at byte {exc.start}"
            raise ConfigError(_PATH, f"{self._path} cannot be read: {reason}", "create it on every node of the ingress") from exc
        digests = [
            self._digest(number, line.strip())
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not digests:
            raise ConfigError(_PATH, f"{self._path} holds no key", _HINT)
        return tuple(digests)

    def _digest(self, number: int, line: str) -> bytes:
        if line.startswith("sha256:"):
            if (match := _DIGEST.fullmatch(line)) is None:
                raise ConfigError(_PATH, f"line {number} of {self._path} is no SHA-256", _HINT)
            return bytes.fromhex(match[1])
        if len(line) < MIN_KEY_CHARS or not _KEY.fullmatch(line):
            problem = (
                f"line {number} of {self._path} has {len(line)} characters; {MIN_KEY_CHARS} or more without spaces are needed"
            )
            raise ConfigError(_PATH, problem, _HINT)
        return hashlib.sha256(line.encode()).digest()
