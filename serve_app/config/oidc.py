"""`OidcSettings` names the issuer of tokens that identify callers beside API keys."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from serve_app.config.base import AbsolutePath, Section
from serve_app.config.checks import is_loopback, shown, wrong


def is_issuer_url(url: str) -> bool:
    """Return whether keys may come from the URL: by HTTPS, or by HTTP from this machine. Whoever changes them can forge tokens."""
    if re.search(r"\s", url):
        return False
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    return is_safe and has_port and bool(parts.hostname) and "@" not in parts.netloc and not parts.fragment


def _checked(url: str) -> str:
    if not is_issuer_url(url):
        raise wrong("", f"is {shown(url)}, and keys come by HTTPS alone", "write https:// and a host, without a user")
    return url


def _checked_issuer(url: str) -> str:
    if urlsplit(_checked(url)).query:
        raise wrong("", f"is {shown(url)}, and an issuer has no query", "copy the claim iss of a token")
    return url


class OidcSettings(Section):
    """Tokens (JWT) of an OpenID Connect issuer, by which callers of tenants are identified beside API keys: docs/tenants.md."""

    issuer: Annotated[str, AfterValidator(_checked_issuer)]
    """URL of the issuer, exactly as the claim `iss` of its tokens has it, a slash at the end included."""
    audience: str = Field(min_length=1)
    """What the claim `aud` of a token must be or contain, such as `serve-app`."""
    tenant_claim: str = Field(min_length=1)
    """The claim that names the tenant: a text, or a list of texts of which exactly one is a tenant's name. `realm.groups` is the claim
    `groups` in the claim `realm`."""
    jwks_url: Annotated[str, AfterValidator(_checked)] | None = None
    """URL of the issuer's keys. None: the one that its discovery document names (`/.well-known/openid-configuration`)."""
    ca_file: AbsolutePath | None = None
    """Certificate authorities (PEM) of the issuer's server; read again with each renewal of the keys. None: the public ones."""
