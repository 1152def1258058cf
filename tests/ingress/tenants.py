"""This module makes tenants from a file of keys, and from the text of a tenants file."""

import hashlib
from pathlib import Path

from serve_app.config import read_text
from serve_app.config.api_keys_file import read_api_keys
from serve_app.config.tenants_file import parse_tenants
from serve_app.core.tenants import Caller, Key, Tenant
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.http.tokens import Tokens


def of_keys(path: Path) -> Tenants:
    """Return the tenants of a file with a key a line."""
    return Tenants(path, lambda _: read_api_keys(path))


def of_file(
    path: Path, text: str, *, shared: bool = False, now: float = 1_800_000_000.0, tokens: Tokens | None = None
) -> Tenants:
    """Return the tenants of this text, written to ``path``. ``now``, by default 2027-01-15, is in seconds since 1970."""
    path.write_text(text)
    return Tenants(path, lambda _: parse_tenants(read_text(path)).keyring(shared=shared), lambda: now, tokens)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def caller(tenant: Tenant, key_id: str = "key-1") -> Caller:
    return Caller(tenant, Key(key_id, b""))
