"""The claims of a token of OIDC name the tenant and the scopes of its caller. Pure: whoever calls this has verified the token.

One rule finds the tenant: a value of the configured claim equals the tenant's name. No error says which values do, because the names of
tenants are not for clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.tenants import OIDC, SCOPES, Caller, Key, Keyring, Scope
from serve_app.errors import NoTenant


@dataclass(frozen=True, slots=True)
class TokenRights:
    """What a verified token says about its caller. The tenants may change while the token is valid."""

    claim: str
    values: frozenset[str]
    """The values of the claim. One of them, and no other, has to be the name of a tenant."""
    scopes: frozenset[Scope]

    def caller(self, keys: Keyring) -> Caller:
        """Return the caller, given the tenants of now.

        Raises:
            NoTenant: The claim names no tenant, or more than one.
        """
        found = [tenant for value in self.values if (tenant := keys.tenant(value)) is not None]
        if not found:
            raise NoTenant(self.claim, "names no tenant of this server")
        if len(found) > 1:
            raise NoTenant(self.claim, f"names {len(found)} tenants of this server, and one is needed")
        return Caller(found[0], Key(OIDC, b"", self.scopes))


def rights_of(claims: Mapping[str, Any], tenant_claim: str) -> TokenRights:
    """Return the rights that the claims of a token give.

    Args:
        tenant_claim: Name of a claim, or a path: `realm.groups` is the claim `groups` in the claim `realm`. A claim of the whole name wins.
    Raises:
        NoTenant: The claim is missing, or is neither a text nor a list of texts.
    """
    value = _value(claims, tenant_claim)
    if value is None:
        raise NoTenant(tenant_claim, "is missing")
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise NoTenant(tenant_claim, "is neither a text nor a list of texts")
    return TokenRights(tenant_claim, frozenset(texts), _scopes(claims.get("scope")))


def caller_of_batch(keys: Keyring, tenant: str) -> Caller | None:
    """Return the caller by whom a stored batch, made with a token, may continue; None if its tenant is not known.

    The token itself is not kept, and would expire within minutes. So only the end of the tenant ends such a batch.
    """
    found = keys.tenant(tenant)
    return None if found is None else Caller(found, Key(OIDC, b""))


def _value(claims: Mapping[str, Any], path: str) -> Any:
    if path in claims:  # issuers name claims of their own by URLs, which have dots
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _scopes(scope: Any) -> frozenset[Scope]:
    """Return those of our scopes that the claim `scope` has, a text with blanks or a list; all of them if it has none."""
    words = scope.split() if isinstance(scope, str) else scope if isinstance(scope, list) else ()
    return frozenset(each for each in SCOPES if each in words) or frozenset(SCOPES)
