"""The ingress's tenants come from a file, which is read again when it changes. A request's API key or token says whose request it is."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from serve_app.books.series import gauge
from serve_app.core import token_claims
from serve_app.core.tenants import OIDC, Caller, Keyring, Tenant
from serve_app.errors import ConfigError, FileUnreadable, InvalidApiKey
from serve_app.ingress.http.tokens import Tokens, is_token

logger = logging.getLogger(__name__)

IN_FORCE = gauge("tenants_file_in_force")
IN_FORCE.set(1)  # also without such a file

_LOOK_S = 1.0
_LATE_S = 30.0
"""Seconds after which an unfinished look at the file is reported: only a hung disk or network takes so long."""


def shown_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the header that shows the client's key, as OpenAI's clients send it. Anthropic's send the bare key as `X-Api-Key`."""
    bare: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            return value
        if name == b"x-api-key" and bare is None:
            bare = b"Bearer " + value
    return bare


def _shown(authorization: bytes | None) -> bytes:
    """Return the key or token in the header.

    Raises:
        InvalidApiKey: There is none.
    """
    if authorization is None:
        raise InvalidApiKey("no API key was given")
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        raise InvalidApiKey("the Authorization header is not of the scheme Bearer")
    return key.strip()


class Tenants:
    """The tenants of the file ``path``. Call `watch` to follow its changes. Any thread may ask for a caller.

    Args:
        path: The file.
        read: Reads the file, given the keys in force (None at the start); raises `ConfigError` if the file cannot be used.
        clock: Returns the seconds since 1970.
        tokens: Verifies tokens; None: only API keys identify callers.
    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Keyring | None], Keyring],
        clock: Callable[[], float] = time.time,
        tokens: Tokens | None = None,
    ) -> None:
        self._path, self._read, self._clock = path, read, clock
        self.tokens = tokens
        self._seen = self._stamp()
        self._unread = False
        """Whether the last reading failed because the system did not let the file be read."""
        self._keys = read(None)
        if self._keys.problem:
            logger.warning("%s", self._keys.problem)
        self.file_in_force = True
        """Whether all of the file counts. False: the changed file, or its lists of models with a mistake, were refused."""
        self.last_change: tuple[int, str] = (0, "")
        """When the file was changed last (nanoseconds since 1970; 0 if it is gone) and what that led to, as logged; (0, "") before."""
        self._warned: frozenset[str] = frozenset()
        self._warn_of_invalid()

    async def identify(self, authorization: bytes | None) -> Caller:
        """Check a request's Authorization header, which carries an API key or a token, and return who sent the request.

        Raises:
            InvalidApiKey: The header carries neither a valid key nor a token.
            InvalidToken: The token is not valid.
            NoTenant: The token does not name one tenant.
            IssuerAway: The issuer's keys are not known yet.
        """
        if self.tokens is not None and is_token(key := _shown(authorization)) and not self._keys.knows(key):
            return (await self.tokens.rights(key)).caller(self._keys)
        return self.check(authorization)

    def check(self, authorization: bytes | None) -> Caller:
        """Check a request's Authorization header, which carries an API key, and return who sent the request.

        Raises:
            InvalidApiKey: The header carries no valid key.
        """
        return self._keys.caller(_shown(authorization), self._clock())

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of this name as the file has it now."""
        return self._keys.tenant(name)

    def caller_of_batch(self, tenant: str, key_id: str) -> Caller | None:
        """Return the tenant and the key by which a stored batch may continue. See `Keyring.caller_of_batch`.

        A batch that was made with a token continues while tokens are accepted and its tenant is in the file.
        """
        if key_id == OIDC:
            return None if self.tokens is None else token_claims.caller_of_batch(self._keys, tenant)
        return self._keys.caller_of_batch(tenant, key_id, self._clock())

    async def watch(self) -> NoReturn:
        """Follow the changes of the file, each within `_LOOK_S` and the time to read it."""
        while True:
            await asyncio.sleep(_LOOK_S)
            late = asyncio.get_running_loop().call_later(_LATE_S, self._report_late)
            try:
                await asyncio.to_thread(self.follow_changes)  # 5,000 keys take 1 s to read, for which requests would stand still
            finally:
                late.cancel()

    def _report_late(self) -> None:
        said = f"{self._path} could not be read within {_LATE_S:g} s; the {len(self._keys)} API keys read before stay in force"
        logger.error("%s", said)
        self.last_change = self.last_change[0], said
        self._seen = (0, 0, 0)  # of no file, so that a later look reads the file, unless this one still ends
        self.file_in_force = False
        IN_FORCE.set(0)

    def follow_changes(self) -> None:
        """Read the file again if it has changed, or could not be read. A file that cannot be used is reported once, and the keys stay."""
        has_changed = (stamp := self._stamp()) != self._seen
        if not has_changed and not self._unread:
            return
        self._unread = False
        unexpected: Exception | None = None
        try:
            self._keys = self._read(self._keys)
        except ConfigError as exc:
            self._unread = isinstance(exc, FileUnreadable)
            level, said = logging.ERROR, f"{exc}; the {len(self._keys)} API keys read before stay in force"
        except Exception as exc:  # whatever it is, it must be seen: a key may have been revoked
            unexpected = exc
            level, said = logging.ERROR, f"{self._path} cannot be used; the {len(self._keys)} API keys read before stay in force"
        else:
            level, said = self._judged()
        self._seen = stamp  # before the next lines: `_report_late` in the event loop's thread may change these, too
        self.file_in_force = level == logging.INFO
        IN_FORCE.set(self.file_in_force)
        if has_changed or said != self.last_change[1]:
            self.last_change = stamp[0] if stamp else 0, said
            logger.log(level, "%s", said, exc_info=unexpected)
        self._warn_of_invalid()

    def _judged(self) -> tuple[int, str]:
        """Return the level and the text of the line about the keys that have just been read."""
        if not self._keys.problem:
            return logging.INFO, f"{self._path} has changed: {len(self._keys)} API keys are in force"
        kept = f"tenants with such models keep those they had; all else is in force, {len(self._keys)} API keys"
        return logging.WARNING, f"{self._keys.problem}; {kept}"

    def _warn_of_invalid(self) -> None:
        """Log each key that is no longer valid, unless the last reading of the file has logged it."""
        problems = list(self._keys.invalid(self._clock()))
        for problem in problems:
            if problem not in self._warned:
                logger.warning("%s: %s; its clients get 401", self._path, problem)
        self._warned = frozenset(problems)

    def _stamp(self) -> tuple[int, int, int] | None:
        # `stat` follows symbolic links: Kubernetes replaces a mounted Secret by pointing a link at another folder.
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size
