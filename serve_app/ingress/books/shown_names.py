"""Shown names bound the labels of series: of thousands of tenants and API keys, only the first that come are named."""

from serve_app.core.tenants import Caller

MAX_TENANTS = 200
"""How many tenants get series of their own at an ingress: each has six for each model that it asks."""
MAX_SHOWN_KEYS = 1000
"""How many API keys get series of their own at an ingress: each has one for each outcome of its requests at each model."""
OTHERS = "others"
"""The label of all further tenants and keys. No tenant and no key may have this name."""


class ShownNames:
    """The first ``most`` names that come are shown, and all others share the name `OTHERS`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def shown(self, name: str) -> str:
        """Return the label for the name."""
        if name not in self._known and len(self._known) < self._most:
            self._known.add(name)
        return name if name in self._known else OTHERS


class CallerNames:
    """The labels of callers in series by tenant and key. A shown key has its tenant's name, and the other keys of a tenant share a series.

    Args:
        tenants: The names of tenants beside keys that are not shown.
    """

    def __init__(self, tenants: ShownNames, max_keys: int = MAX_SHOWN_KEYS) -> None:
        self._tenants, self._keys = tenants, ShownNames(max_keys)

    def labels(self, caller: Caller) -> tuple[str, str]:
        """Return the labels ``tenant`` and ``key``."""
        tenant, key = caller.tenant.name, caller.key.id
        if self._keys.shown(f"{tenant} {key}") == OTHERS:  # callers of all tenants with tokens have the key `oidc`
            return self._tenants.shown(tenant), OTHERS
        return tenant, key
