"""These rows of test_lint.py are about tenants in the values, and about tokens of an identity provider."""

from typing import Any

from tests.chart.lint_rows import Check
from tests.chart.render import at, merged, models

A, B = "a" * 64, "b" * 64
OIDC = at("config.ingress.oidc", {"issuer": "https://login.example.com", "audience": "serve-app", "tenant_claim": "groups"})
EGRESS = at("networkPolicies.extraEgress", [{"ports": [{"port": 443}]}])
CHAT = {"name": "chat", "model": "embedded:smollm2-135m-instruct"}
CANARY = CHAT | {"name": "chat-new", "canary": {"of": "chat"}}


def inline(**tenants: Any) -> dict[str, Any]:
    return at("tenants.inline", tenants)


def key(**others: str) -> dict[str, Any]:
    return inline(red={"keys": [{"id": "red-1", "sha256": A, **others}]})


TENANTS: list[Check] = [
    *[
        (
            f"the tenant {name}",
            inline(**{name: {}}),
            (f'tenant-name: tenants.inline has "{name}", which is no name of a tenant', "and not none or others"),
            inline(**{"team-b": {}}),
        )
        for name in ("Team_B", "others")
    ],
    *[
        (
            f"a key that {field} on {day}",
            key(**{field: day}),
            (f"tenant-day: tenants.inline.red.keys[0].{field} is {day}, which is no date: ", "as 2027-01-31"),
            key(**{field: "2028-02-29"}),
        )
        for field, day in (("expires", "next-year"), ("expires", "2027-02-29"), ("revoked", "2027-1-31"))
    ],
    (
        "an id of two keys",
        inline(blue={"keys": [{"id": "x", "sha256": A}]}, red={"keys": [{"id": "x", "sha256": B}]}),
        ("tenant-key-twice: tenants.inline.red.keys[0].id is that of tenants.inline.blue.keys[0], too",),
        inline(blue={"keys": [{"id": "x", "sha256": A}]}, red={"keys": [{"id": "y", "sha256": B}]}),
    ),
    (
        "a key of two tenants",
        inline(blue={"keys": [{"id": "x", "sha256": A}]}, red={"keys": [{"id": "y", "sha256": A.upper()}]}),
        ("tenant-key-twice: tenants.inline.red.keys[0].sha256 is that of tenants.inline.blue.keys[0], too",),
        inline(blue={"keys": [{"id": "x", "sha256": A}]}, red={"keys": [{"id": "y", "sha256": B}]}),
    ),
    *[
        (
            f"a tenant of the model {name}",
            merged(models(CHAT, CANARY), inline(red={"models": ["chat", name]})),
            (
                f"tenant-model-not-served: tenants.inline.red.models[1] is {name}, but config.models serves chat: ",
                "its aliases, adapters and canary",
            ),
            merged(models(CHAT, CANARY), inline(red={"models": ["chat"]})),
        )
        for name in ("embed", "chat-new")
    ],
    (
        "a tenant of a model that is no longer served",
        merged(models(CHAT, CHAT | {"name": "old", "served": False}), inline(red={"models": ["old"]})),
        ("tenants.inline.red.models[0] is old, but config.models serves chat: ",),
        merged(models(CHAT, CHAT | {"name": "old"}), inline(red={"models": ["old"]})),
    ),
    (
        "tokens that no tenant is there for",
        merged(OIDC, EGRESS),
        ("oidc-without-tenants: config.ingress.oidc.issuer is https://login.example.com, but ", "set one of them"),
        merged(OIDC, EGRESS, inline(red={})),
    ),
    *[
        (
            f"an issuer that no policy lets the ingress to, {way}",
            merged(OIDC, inline(red={})),
            (
                "issuer-out-of-reach: config.ingress.oidc.issuer is https://login.example.com, but networkPolicies.enabled is true",
            ),
            merged(OIDC, inline(red={}), opened),
        )
        for way, opened in (("with egress", EGRESS), ("without policies", at("networkPolicies.enabled", False)))
    ],
]
