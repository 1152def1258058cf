"""A key names its tenant; the tenant has rights, limits and a cache salt of its own."""

import contextlib
import hashlib
import hmac
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.tenants import Caller, Key, Keyring, Tenant
from serve_app.errors import BadRequest, InvalidApiKey, MissingScope

NOW = 1000.0
RED, BLUE = Tenant("red"), Tenant("blue")


def key(name: str, **more: Any) -> Key:
    return Key(name, hashlib.sha256(name.encode()).digest(), **more)


def keyring() -> Keyring:
    old = key("r0", expires="1970-01-01", expires_at=NOW)
    return Keyring([(RED, [old, key("r1")]), (BLUE, [key("b1", revoked="1970-01-02"), key("b2", scopes=frozenset(["infer"]))])])


def test_a_key_names_its_tenant() -> None:
    assert keyring().caller(b"r1", NOW) == Caller(RED, key("r1"))
    assert keyring().caller(b"r0", NOW - 1).tenant is RED


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (b"r0", "the API key r0 has expired on 1970-01-01; ask the operator of this server for a new key"),
        (b"b1", "the API key b1 was revoked on 1970-01-02; ask the operator of this server for a new key"),
        (b"r", "the API key is not known; send the header"),
        (b"", "the API key is not known; send the header"),
        (b"R1", "the API key is not known; send the header"),
    ],
)
def test_only_who_has_a_key_learns_why_it_is_not_valid(shown: bytes, said: str) -> None:
    with pytest.raises(InvalidApiKey, match=f"^{said}"):
        keyring().caller(shown, NOW)


@pytest.mark.parametrize("shown", [b"r0", b"r1", b"b1", b"b2", b"unknown"])
def test_every_digest_is_compared_whichever_key_is_shown(shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    ours = keyring()

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with contextlib.suppress(InvalidApiKey):
        ours.caller(shown, NOW)
    assert compared == [key(name).digest for name in ("r0", "r1", "b1", "b2")]


def test_a_key_without_the_scope_is_refused_by_name() -> None:
    caller = keyring().caller(b"b2", NOW)
    caller.check_scope("infer")
    with pytest.raises(MissingScope, match="the API key b2 of the tenant 'blue' lacks the scope 'batch'"):
        caller.check_scope("batch")


def test_a_batch_goes_on_by_its_own_key_or_if_it_has_none_by_any_valid_one() -> None:
    caller_of = keyring().caller_of_batch
    assert caller_of("red", "r1", NOW) == caller_of("red", "", NOW) == Caller(RED, key("r1"))
    assert caller_of("red", "", NOW - 1) == Caller(RED, key("r0", expires="1970-01-01", expires_at=NOW))
    unknown = [("red", "r3"), ("blue", "r1"), ("green", ""), ("", "")]
    assert [caller_of(*each, NOW) for each in unknown] == [None] * len(unknown)
    for ended in [("red", "r0"), ("blue", "b1"), ("blue", "b2"), ("blue", "")]:
        with pytest.raises(InvalidApiKey, match=f"of the tenant '{ended[0]}' is no longer valid for batches"):
            caller_of(*ended, NOW)


salts = st.one_of(st.none(), st.text(max_size=3))
tenants = st.builds(Tenant, st.sampled_from(["a", "b", "shared"]), shares_prefix_cache=st.booleans())


@given(tenants, salts, tenants, salts)
def test_salts_are_equal_within_a_tenant_and_among_those_that_share_alone(
    one: Tenant, own: str | None, other: Tenant, others_own: str | None
) -> None:
    are_together = one.name == other.name or one.shares_prefix_cache
    is_equal = own == others_own and one.shares_prefix_cache == other.shares_prefix_cache and are_together
    assert (one.cache_salt(own) == other.cache_salt(others_own)) is is_equal


@given(tenants, salts)
def test_no_client_can_name_the_salt_of_another_tenant(victim: Tenant, own: str | None) -> None:
    salt = victim.cache_salt(own)
    assert salt is None or salt not in (Tenant("x").cache_salt(salt), Tenant("x", shares_prefix_cache=True).cache_salt(salt))


def test_the_choices_of_one_request_get_one_object_as_their_salt() -> None:
    assert RED.cache_salt("own") is Tenant("red").cache_salt("own")
    assert RED.cache_salt(None) is RED.cache_salt(None)
    assert Tenant("red", shares_prefix_cache=True).cache_salt(None) is None, "as without tenants"


def body(**fields: Any) -> Any:
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "use_beam_search")
    return SimpleNamespace(**dict.fromkeys(names) | fields)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_body_may_not_ask_for_more_than_the_tenant_gets(field: str) -> None:
    tenant = Tenant("team", max_tokens=10)
    tenant.check_asked(body(**{field: 10}))
    RED.check_asked(body(**{field: 10**9}))
    with pytest.raises(BadRequest, match=f"^{field}: is 11, and the tenant 'team' has max_tokens 10; ask for that or less$"):
        tenant.check_asked(body(**{field: 11}))


@pytest.mark.parametrize("value", [None, "11", 9.5, True])
def test_a_beam_search_has_to_say_how_long_it_is(value: Any) -> None:
    """Each step of a search is an engine request for one token, so that no bound of engine requests ends it."""
    tenant = Tenant("team", max_tokens=10)
    tenant.check_asked(body(max_tokens=value))
    tenant.check_asked(body(max_tokens=10, use_beam_search=True))
    problem = "is missing, which max_completion_tokens does not replace" if value is None else "is no whole number"
    said = f"^max_tokens: {problem}; a beam search of the tenant 'team' has to give a whole number of at most 10$"
    for other in (None, 5):
        with pytest.raises(BadRequest, match=said):
            tenant.check_asked(body(max_tokens=value, max_completion_tokens=other, use_beam_search=True))
    with pytest.raises(BadRequest, match="max_completion_tokens: is no whole number"):
        tenant.check_asked(body(max_tokens=1, max_completion_tokens="99", use_beam_search=True))


def test_an_answer_ends_at_the_first_bound() -> None:
    assert RED.max_output_tokens(100, None) is None
    assert RED.max_output_tokens(100, 7) == 7
    assert Tenant("t", max_tokens=5).max_output_tokens(100, 7) == 5
    assert Tenant("t", max_tokens=5).max_output_tokens(100, None) == 5
    assert Tenant("t", max_tokens=5, max_context=102).max_output_tokens(100, 7) == 2
    with pytest.raises(BadRequest, match=r"^prompt: has 102 tokens, and the tenant 't' has max_context 102, which an answer"):
        Tenant("t", max_context=102).max_output_tokens(102, 7)


def test_a_prompt_to_embed_may_fill_the_context() -> None:
    Tenant("t", max_context=102).check_prompt(102)
    with pytest.raises(BadRequest, match=r"^prompt: has 103 tokens, and the tenant 't' has max_context 102; shorten it$"):
        Tenant("t", max_context=102).check_prompt(103)
