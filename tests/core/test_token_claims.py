"""A value of the token's claim is the tenant's name; other tenants' names are in no answer."""

from typing import Any

import pytest

from serve_app.core.tenants import OIDC, SCOPES, Caller, Key, Keyring, Tenant
from serve_app.core.token_claims import caller_of_batch, rights_of
from serve_app.errors import MissingScope, NoTenant

RED, BLUE, SEA = Tenant("red"), Tenant("blue"), Tenant("sea")
KEYS = Keyring([(RED, []), (BLUE, [Key("b1", b"")]), (SEA, [])])
BOTH = frozenset(SCOPES)


@pytest.mark.parametrize(
    ("claims", "claim"),
    [
        ({"tenant": "red"}, "tenant"),
        ({"groups": ["staff", "red"]}, "groups"),
        ({"groups": ["red", "red"]}, "groups"),
        ({"realm": {"groups": ["red"]}}, "realm.groups"),
        ({"realm.groups": "red", "realm": {"groups": "blue"}}, "realm.groups"),
        ({"https://example.com/tenant": "red"}, "https://example.com/tenant"),
    ],
)
def test_the_claim_names_the_tenant(claims: dict[str, Any], claim: str) -> None:
    assert rights_of(claims, claim).caller(KEYS) == Caller(RED, Key(OIDC, b"", BOTH))


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({}, "is missing"),
        ({"realm": "red"}, "is missing"),
        ({"realm": {"groups": None}}, "is missing"),
        ({"realm": {"groups": 7}}, "is neither a text nor a list of texts"),
        ({"realm": {"groups": {"red": True}}}, "is neither a text nor a list of texts"),
        ({"realm": {"groups": ["red", 7]}}, "is neither a text nor a list of texts"),
        ({"realm": {"groups": []}}, "names no tenant of this server"),
        ({"realm": {"groups": "Red"}}, "names no tenant of this server"),
        ({"realm": {"groups": "red blue"}}, "names no tenant of this server"),
        ({"realm": {"groups": ["red", "x", "blue"]}}, "names 2 tenants of this server, and one is needed"),
    ],
)
def test_a_token_that_does_not_name_one_tenant_is_refused_without_a_name(claims: dict[str, Any], said: str) -> None:
    with pytest.raises(NoTenant) as refused:
        rights_of(claims, "realm.groups").caller(KEYS)
    expected = f"the token's claim 'realm.groups' {said}; ask the operator of this server which value gives you access"
    assert str(refused.value) == expected
    assert not any(name in expected for name in ("'red'", "blue", "'sea'"))


@pytest.mark.parametrize(
    ("scope", "scopes"),
    [
        (None, BOTH),
        ("openid profile", BOTH),
        ("openid infer", {"infer"}),
        ("batch", {"batch"}),
        ("infer batch", BOTH),
        (["openid", "batch"], {"batch"}),
        ("inferno", BOTH),
        (7, BOTH),
    ],
)
def test_a_token_may_have_fewer_scopes(scope: Any, scopes: set[str]) -> None:
    caller = rights_of({"tenant": "red", "scope": scope}, "tenant").caller(KEYS)
    assert caller.key.scopes == scopes
    for missing in BOTH - scopes:
        with pytest.raises(
            MissingScope, match=f"^the token of the tenant 'red' lacks the scope '{missing}'; use a token that has"
        ):
            caller.check_scope(missing)


def test_a_batch_of_a_token_continues_as_long_as_its_tenant_is_there() -> None:
    assert caller_of_batch(KEYS, "red") == Caller(RED, Key(OIDC, b"", BOTH))
    assert caller_of_batch(KEYS, "green") is None
