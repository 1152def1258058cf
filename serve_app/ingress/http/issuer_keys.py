"""The public keys by which an OpenID Connect issuer signs tokens: fetched in a thread, kept, and renewed.

The issuer being away changes nothing for known keys. A key that the issuer withdraws is forgotten with the next renewal.
"""

import asyncio
import json
import logging
import math
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
import jwt

from serve_app.books.series import gauge
from serve_app.config import OidcSettings
from serve_app.config.oidc import is_issuer_url
from serve_app.errors import InvalidToken, IssuerAway

logger = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
"""The algorithms that are accepted, all of them asymmetric. With HS256 a public key would be a secret that everyone knows."""
FETCH_ERRORS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)
"""What `fetch_keys` raises."""
RENEW_S = 300.0
ASK_AGAIN_S = 10.0
"""Seconds from one question to the issuer to the next: after a failure, and at most this often for a token of an unknown key."""

_ANSWERS = gauge("oidc_issuer_answers")
_ANSWER_S = 5.0
"""Seconds that one answer of the issuer may take. A token of an unknown key waits for two: the discovery document and the keys."""
_MAX_ANSWER_BYTES = 1 << 20
_BY_KIND = {("RSA", None): ("RS256", "PS256"), ("EC", "P-256"): ("ES256",), ("OKP", "Ed25519"): ("EdDSA",)}
"""Kind and curve of a key -> the algorithms that use it."""


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """A public key of the issuer, and the algorithms for which it may be used."""

    published: Mapping[str, Any]
    """The key as the issuer publishes it (JWK)."""
    public: Any
    algorithms: tuple[str, ...]


class IssuerKeys:
    """The keys of the issuer that the settings name. Call `watch` to renew them.

    Args:
        clock: Returns seconds that never go back.
    """

    def __init__(self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._known: Mapping[str, IssuerKey] = {}
        self._asked_at = -math.inf
        self._problem: str | None = None
        self._asking: asyncio.Task[None] | None = None
        self.num_withdrawals = 0
        """How often a key was gone, or was another one, after a renewal. What was verified before by any key has to be verified again."""

    async def find(self, kid: str) -> IssuerKey:
        """Return the key of this id. For an unknown id the issuer is asked, at most once in `ASK_AGAIN_S`.

        Raises:
            InvalidToken: The issuer has no such key.
            IssuerAway: No key is known at all.
        """
        if kid not in self._known:
            await self._renew(ASK_AGAIN_S)
        if (found := self._known.get(kid)) is not None:
            return found
        if not self._known:
            raise IssuerAway(retry_after_s=ASK_AGAIN_S)
        raise InvalidToken("the token is signed with a key that its issuer does not publish")

    async def watch(self) -> NoReturn:
        """Renew the keys, each `RENEW_S`, or each `ASK_AGAIN_S` while the issuer does not answer."""
        while True:
            await self._renew(0.0)
            await asyncio.sleep(RENEW_S if self._problem is None else ASK_AGAIN_S)

    async def _renew(self, pause_s: float) -> None:
        """Ask the issuer, unless it was asked in the last ``pause_s``. Requests that come meanwhile wait for this one answer."""
        if self._asking is None or self._asking.done():
            if self._clock() - self._asked_at < pause_s:
                return
            self._asked_at = self._clock()
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask), name="issuer keys")
        await asyncio.shield(self._asking)  # the request that began it may be cancelled, while others wait for the answer

    def _ask(self) -> None:
        """Fetch the keys. A problem is logged when it begins, and the keys stay as they were."""
        problem: str | None = None
        try:
            fetched = fetch_keys(self._settings)
        except FETCH_ERRORS as exc:
            problem = in_words(exc)
        except Exception:  # whatever it is, the next renewal may be right
            problem = "unexpected error"
            if self._problem is None:
                logger.exception("ingress.oidc: the keys of %s cannot be read", self._settings.issuer)
        else:
            before, self._known = self._known, fetched
            if any(kid not in fetched or fetched[kid].published != key.published for kid, key in before.items()):
                self.num_withdrawals += 1  # after the change: who reads this number first, and then a key, has no older key
            if fetched.keys() != before.keys():
                logger.info("ingress.oidc: %s has %d keys: %s", self._settings.issuer, len(fetched), ", ".join(fetched))
        if problem is not None and self._problem is None:
            said = "ingress.oidc: %s: %s; the %d keys fetched before stay in force"
            logger.error(said, self._settings.issuer, problem, len(self._known))
        elif problem is None and self._problem is not None:
            logger.info("ingress.oidc: %s answers again", self._settings.issuer)
        self._problem = problem
        _ANSWERS.labels(self._settings.issuer).set(problem is None)


def in_words(error: Exception) -> str:
    """Return one of `FETCH_ERRORS` with the URL that was asked, if it is an error of the connection."""
    url = f"{error.request.url}: " if isinstance(error, httpx.RequestError) else ""
    return f"{url}{type(error).__name__}: {error}"


def fetch_keys(settings: OidcSettings) -> dict[str, IssuerKey]:
    """Return the issuer's usable keys by id, at least one. Blocks for up to two times `_ANSWER_S`.

    Raises:
        httpx.HTTPError: The issuer cannot be reached, or answers with an error.
        OSError: The file of authorities cannot be used.
        ValueError: The answer holds no such keys.
    """
    trusted: ssl.SSLContext | bool = True  # certifi's authorities, or those of the variable SSL_CERT_FILE
    if settings.ca_file is not None:
        trusted = ssl.create_default_context(cafile=settings.ca_file)
    with httpx.Client(verify=trusted, timeout=_ANSWER_S) as http:
        url = settings.jwks_url or _discovered(http, settings.issuer)
        return usable_keys(_get(http, url))


def _discovered(http: httpx.Client, issuer: str) -> str:
    """Return the URL of the keys as the issuer's discovery document names it."""
    document = _get(http, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if (named := document.get("issuer")) != issuer:
        raise ValueError(f"the discovery document is of {str(named)[:200]!r}, and not of {issuer!r}")
    if not isinstance(url := document.get("jwks_uri"), str) or not is_issuer_url(url):
        raise ValueError(f"the discovery document names {str(url)[:200]!r} as jwks_uri, and keys come by HTTPS alone")
    return url


def _get(http: httpx.Client, url: str) -> dict[str, Any]:
    """Return the JSON object at the URL, fetched within `_ANSWER_S`, without following a redirect."""
    until, body = time.monotonic() + _ANSWER_S, b""
    with http.stream("GET", url) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answers with status {response.status_code}")
        for part in response.iter_bytes():
            body += part
            if len(body) > _MAX_ANSWER_BYTES or time.monotonic() > until:
                raise ValueError(f"{url} sends more than {_MAX_ANSWER_BYTES} bytes, or takes longer than {_ANSWER_S:g} s")
    value = json.loads(body)
    if not isinstance(value, dict):
        raise ValueError(f"{url} does not answer with a JSON object")
    return value


def usable_keys(document: Mapping[str, Any]) -> dict[str, IssuerKey]:
    """Return the keys of a JWK set that sign tokens by one of `ALGORITHMS`, by their ids. Others are left out.

    Raises:
        ValueError: There is none.
    """
    listed = document.get("keys")
    found: dict[str, IssuerKey] = {}
    for published in listed if isinstance(listed, list) else ():
        if isinstance(published, dict) and (key := _usable(published)) is not None:
            found.setdefault(published["kid"], key)
    if not found:
        raise ValueError(f"the issuer publishes no key with an id (kid) for {', '.join(ALGORITHMS)}")
    return found


def _usable(published: dict[str, Any]) -> IssuerKey | None:
    kind, curve, algorithm = (published.get(name) for name in ("kty", "crv", "alg"))
    if not all(isinstance(each, str | None) for each in (kind, curve, algorithm)) or kind is None:
        return None
    usable = tuple(each for each in _BY_KIND.get((kind, curve), ()) if algorithm in (None, each))
    if not usable or not isinstance(published.get("kid"), str) or published.get("use", "sig") != "sig":
        return None
    try:
        # Without `d`: a private key that was published by mistake is read as its public part.
        public = jwt.PyJWK({name: value for name, value in published.items() if name != "d"}, usable[0]).key
    except jwt.PyJWTError:
        return None
    return IssuerKey(published, public, usable)
