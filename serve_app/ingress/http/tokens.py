"""Tokens of an OpenID Connect issuer (JWT): signature, time, issuer and audience are checked here, by PyJWT.

A check costs 100 to 200 us of the event loop. So what a verified token says is kept by the token's SHA-256 until the token expires; then
a further request with the token costs 1.5 us.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jwt
from jwt.types import Options

from serve_app.config import OidcSettings
from serve_app.core.token_claims import TokenRights, rights_of
from serve_app.errors import InvalidToken
from serve_app.ingress.http.issuer_keys import ALGORITHMS, IssuerKeys

LEEWAY_S = 30.0
"""Seconds by which the clocks of issuer and ingress may differ."""
MAX_KEPT = 1000
"""Verified tokens that are kept, at up to about 20 KiB each."""
MAX_TOKEN_BYTES = 16 << 10
"""Longest token. A token with 200 groups, Entra's limit, has 10 KiB."""

_REASONS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidAudienceError, "the token is for another audience than {audience!r}"),
    (jwt.InvalidIssuerError, "the token is of another issuer than {issuer}"),
    (jwt.InvalidSignatureError, "the signature of the token is not valid"),
    (jwt.InvalidAlgorithmError, "the token's algorithm is not that of its key"),
    (jwt.InvalidKeyError, "the token is signed with a key that is too short"),
    (jwt.MissingRequiredClaimError, "the token lacks one of the claims exp, iss and aud"),
)
_OPTIONS: Options = {"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True}


class _Verified(NamedTuple):
    rights: TokenRights
    ends_at: float
    num_withdrawals: int
    """`IssuerKeys.num_withdrawals` from before the key was looked up."""


def is_token(key: bytes) -> bool:
    """Return whether ``key`` has the form of a token: three parts with dots between."""
    return key.count(b".") == 2


class Tokens:
    """Verifies the tokens of the issuer that the settings name.

    Args:
        keys: The issuer's keys; by default those that it publishes.
        clock: Returns the seconds since 1970, by which a token is kept. PyJWT has its own clock.
    """

    def __init__(self, settings: OidcSettings, keys: IssuerKeys | None = None, clock: Callable[[], float] = time.time) -> None:
        self.keys = keys or IssuerKeys(settings)
        self._settings, self._clock = settings, clock
        self._kept: OrderedDict[bytes, _Verified] = OrderedDict()

    async def rights(self, token: bytes) -> TokenRights:
        """Return what the token says about its caller.

        Raises:
            InvalidToken: The token is forged, has expired, is for another server or is no token.
            NoTenant: The claim of the tenant has no text.
            IssuerAway: The issuer's keys are not known yet.
        """
        digest = hashlib.sha256(token).digest()
        known = self._kept.pop(digest, None)
        if known is not None and self._clock() < known.ends_at and known.num_withdrawals == self.keys.num_withdrawals:
            self._kept[digest] = known  # the latest
            return known.rights
        claims, num_withdrawals = await self._verify(token)
        rights = rights_of(claims, self._settings.tenant_claim)
        self._kept[digest] = _Verified(rights, int(claims["exp"]) + LEEWAY_S, num_withdrawals)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return rights

    async def _verify(self, token: bytes) -> tuple[dict[str, Any], int]:
        """Return the claims of the token, and `num_withdrawals` from before its key was looked up."""
        kid, num_withdrawals = _key_id(token), self.keys.num_withdrawals
        key = await self.keys.find(kid)
        try:
            claims = jwt.decode(
                token,
                key.public,
                algorithms=key.algorithms,
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options=_OPTIONS,
            )
        except jwt.PyJWTError as exc:
            raise InvalidToken(self._reason(exc)) from exc
        return claims, num_withdrawals

    def _reason(self, error: jwt.PyJWTError) -> str:
        words = next((text for kind, text in _REASONS if isinstance(error, kind)), "the token is malformed")
        return words.format(audience=self._settings.audience, issuer=self._settings.issuer)


def _key_id(token: bytes) -> str:
    """Return the id of the key by which the token is said to be signed.

    Raises:
        InvalidToken: The head of the token cannot be read, or names another algorithm or no key.
    """
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidToken(f"the token has {len(token)} bytes, limit {MAX_TOKEN_BYTES}")
    try:
        # The head alone: PyJWT would decode the other parts too, which are as long as the client likes.
        head = jwt.get_unverified_header(token.partition(b".")[0] + b"..")
    except jwt.PyJWTError as exc:
        raise InvalidToken("what was given is no API key of this server, and no token (JWT)") from exc
    if (algorithm := head.get("alg")) not in ALGORITHMS:
        raise InvalidToken(f"the token's algorithm {str(algorithm)[:20]!r} is none of {', '.join(ALGORITHMS)}")
    if not isinstance(kid := head.get("kid"), str):
        raise InvalidToken("the head of the token names no key (kid)")
    return kid
