"""The issuer's keys are fetched, kept while it is away, renewed, and asked for at most once in ten seconds."""

import asyncio
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from serve_app.errors import InvalidToken, IssuerAway
from serve_app.ingress.http import issuer_keys
from serve_app.ingress.http.issuer_keys import IssuerKeys, fetch_keys, in_words, usable_keys
from serve_app.ingress.http.tokens import Tokens
from tests.doubles.certificates import make_tls
from tests.doubles.fleet import in_loop
from tests.ingress.issuer import DISCOVERY, KEYS, Issuer, ec_key, ed_key, issuing, published, rsa_key


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def answers(issuer: Issuer) -> float | None:
    return REGISTRY.get_sample_value("serve_app_oidc_issuer_answers", {"issuer": issuer.url})


async def outcome(keys: IssuerKeys, kid: str) -> str:
    try:
        await keys.find(kid)
    except (InvalidToken, IssuerAway) as exc:
        return exc.code
    return "found"


@in_loop
async def test_an_unknown_key_is_asked_for_at_most_once_in_ten_seconds(issuer: Issuer) -> None:
    keys = IssuerKeys(issuer.settings(), clock := Clock())
    assert await outcome(keys, "one") == "found"
    assert issuer.asked == [DISCOVERY, KEYS]
    issuer.keys.append(published(rsa_key("two"), "two"))
    for now, expected, num in [(1009.9, "invalid_token", 1), (1010.0, "found", 2), (1019.9, "found", 2)]:
        clock.now = now
        assert ([await outcome(keys, "two") for _ in range(3)], issuer.num_readings) == ([expected] * 3, num)
    assert [await outcome(keys, f"junk-{number}") for number in range(100)] == ["invalid_token"] * 100
    clock.now = 1030.0
    assert [await outcome(keys, f"junk-{number}") for number in range(100)] == ["invalid_token"] * 100
    assert issuer.num_readings == 3


@in_loop
async def test_requests_that_come_while_the_issuer_is_asked_wait_for_that_answer_and_hold_nobody(issuer: Issuer) -> None:
    keys = IssuerKeys(issuer.settings())
    issuer.may_answer.clear()
    waiting = [asyncio.create_task(outcome(keys, kid)) for kid in ("one", "one", "two")]
    while not issuer.asked:
        await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting[1:])
    issuer.may_answer.set()
    await asyncio.wait(waiting)
    assert issuer.num_readings == 1
    assert await outcome(keys, "one") == "found", "the answer counts, though its first request has gone"


@in_loop
async def test_known_keys_stay_while_the_issuer_is_away(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokens = Tokens(issuer.settings(), IssuerKeys(issuer.settings(), clock := Clock()))
    first = await tokens.rights(issuer.token().encode())
    issuer.status = 503
    for _ in range(3):
        clock.now += 400.0
        assert await tokens.rights(issuer.token(jti=str(clock.now)).encode()) == first
        with pytest.raises(InvalidToken, match="the token is signed with a key that its issuer does not publish"):
            await tokens.rights(issuer.token(kid="unknown").encode())
    assert answers(issuer) == 0
    issuer.status, clock.now = 200, clock.now + 400.0
    assert await outcome(tokens.keys, "unknown") == "invalid_token"
    assert answers(issuer) == 1
    said = [record.getMessage() for record in caplog.records if record.name == issuer_keys.__name__]
    assert said == [
        f"ingress.oidc: {issuer.url} has 1 keys: one",
        f"ingress.oidc: {issuer.url}: ValueError: {issuer.url}{DISCOVERY} answers with status 503; "
        "the 1 keys fetched before stay in force",
        f"ingress.oidc: {issuer.url} answers again",
    ]


@in_loop
async def test_without_any_key_a_token_cannot_be_judged(issuer: Issuer) -> None:
    issuer.status = 500
    keys = IssuerKeys(issuer.settings(), clock := Clock())
    with pytest.raises(IssuerAway, match="the issuer's keys are not known yet, so no token can be checked; retry in 10 s"):
        await keys.find("one")
    assert [await outcome(keys, "one") for _ in range(5)] == ["issuer_away"] * 5
    assert issuer.asked == [DISCOVERY]
    issuer.status, clock.now = 200, 1010.0
    assert await outcome(keys, "one") == "found"


@in_loop
async def test_the_watch_renews_the_keys_and_asks_again_sooner_after_a_failure(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record(pause_s: float) -> None:
        pauses.append(pause_s)
        issuer.status = 500 if len(pauses) in (1, 2) else 200
        await sleep(0 if len(pauses) < 4 else 60)

    monkeypatch.setattr(asyncio, "sleep", record)
    keys = IssuerKeys(issuer.settings(), Clock())
    watching = asyncio.create_task(keys.watch())
    while len(pauses) < 4:
        await sleep(0.01)
    watching.cancel()
    assert pauses == [300.0, 10.0, 10.0, 300.0]
    assert await outcome(keys, "one") == "found"
    assert issuer.num_readings == 2


@in_loop
async def test_rotated_keys_count_and_what_a_withdrawn_key_has_signed_is_refused_though_it_was_verified(issuer: Issuer) -> None:
    tokens = Tokens(issuer.settings(), IssuerKeys(issuer.settings(), clock := Clock()))
    old, new = issuer.token().encode(), issuer.token(rsa_key("two"), "two").encode()
    first = await tokens.rights(old)
    issuer.keys.append(published(rsa_key("two"), "two"))
    clock.now += 11.0
    assert [await tokens.rights(new), await tokens.rights(old)] == [first, first]
    issuer.keys = issuer.keys[1:]
    clock.now += 11.0
    assert await outcome(tokens.keys, "unknown") == "invalid_token"
    with pytest.raises(InvalidToken, match="a key that its issuer does not publish"):
        await tokens.rights(old)
    assert await tokens.rights(new) == first
    issuer.keys = [published(rsa_key("three"), "two")]
    clock.now += 11.0
    assert await outcome(tokens.keys, "unknown") == "invalid_token"
    with pytest.raises(InvalidToken, match="the signature of the token is not valid"):
        await tokens.rights(new)


def test_an_error_of_the_connection_names_the_url_that_was_asked(issuer: Issuer) -> None:
    url = "http://127.0.0.1:1/keys"
    with pytest.raises(httpx.ConnectError) as failed:
        fetch_keys(issuer.settings(jwks_url=url))
    assert in_words(failed.value).startswith(f"{url}: ConnectError: ")


def test_a_given_url_of_the_keys_needs_no_discovery(issuer: Issuer) -> None:
    assert list(fetch_keys(issuer.settings(jwks_url=issuer.url + KEYS))) == ["one"]
    assert issuer.asked == [KEYS]


def test_an_issuer_whose_name_ends_with_a_slash_is_found(issuer: Issuer) -> None:
    issuer.document["issuer"] = issuer.url + "/"
    assert list(fetch_keys(issuer.settings(issuer=issuer.url + "/"))) == ["one"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"issuer": "https://login.example.org"}, "the discovery document is of 'https://login.example.org', and not of 'http"),
        (
            {"jwks_uri": "http://login.example.org/keys"},
            "names 'http://login.example.org/keys' as jwks_uri, and keys come by HTTPS",
        ),
        ({"jwks_uri": "file:///etc/passwd"}, "names 'file:///etc/passwd' as jwks_uri"),
        ({"jwks_uri": None}, "names 'None' as jwks_uri"),
    ],
)
def test_a_discovery_document_of_another_issuer_or_without_a_safe_url_is_refused(
    issuer: Issuer, document: dict[str, Any], said: str
) -> None:
    issuer.document |= document
    with pytest.raises(ValueError, match=said):
        fetch_keys(issuer.settings())


@pytest.mark.parametrize(
    ("raw", "status", "said"),
    [
        (b"[]", 200, "does not answer with a JSON object"),
        (b"no JSON", 200, "Expecting value"),
        (b"\xff", 200, "codec can't decode"),
        (b"{}", 200, "the issuer publishes no key with an id"),
        (b'{"keys": 7}', 200, "the issuer publishes no key with an id"),
        (b" " * (1 << 20) + b"{}", 200, "sends more than 1048576 bytes"),
        (b"{}", 302, "answers with status 302"),
    ],
    ids=range(7),
)
def test_an_answer_that_holds_no_keys_changes_nothing(issuer: Issuer, raw: bytes, status: int, said: str) -> None:
    issuer.raw, issuer.status = raw, status
    with pytest.raises(ValueError, match=said):
        fetch_keys(issuer.settings(jwks_url=issuer.url + KEYS))


@in_loop
async def test_an_answer_that_python_cannot_read_is_logged_and_the_keys_stay(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = IssuerKeys(issuer.settings(), clock := Clock())
    assert await outcome(keys, "one") == "found"
    issuer.raw, clock.now = b"[" * 500_000, 1011.0
    assert (await outcome(keys, "two"), await outcome(keys, "one")) == ("invalid_token", "found")
    assert f"ingress.oidc: the keys of {issuer.url} cannot be read" in caplog.text


def test_keys_that_sign_no_token_are_left_out() -> None:
    good = [published(rsa_key("one"), "rsa"), published(ec_key(), "ec"), published(ed_key(), "ed", use=None)]
    del good[2]["use"]
    bad: list[Any] = [
        published(rsa_key("one"), "encrypts", use="enc"),
        published(rsa_key("one"), "of another algorithm", alg="RS512"),
        published(rsa_key("one"), "ec") | {"kid": None},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"},
        {"kty": "RSA", "kid": "without a number"},
        {"kty": ["RSA"], "kid": "a list"},
        {"kid": "of no kind"},
        {"kty": "EC", "crv": "P-384", "kid": "of another curve"},
        "text",
        published(rsa_key("two"), "rsa"),
    ]
    found = usable_keys({"keys": good + bad})
    assert {kid: key.algorithms for kid, key in found.items()} == {
        "rsa": ("RS256", "PS256"),
        "ec": ("ES256",),
        "ed": ("EdDSA",),
    }
    assert found["rsa"].published == good[0], "the first of two with one id"


def test_the_server_of_the_issuer_shows_a_certificate_of_the_given_authority(tmp_path: Path) -> None:
    ours, other = (make_tls(tmp_path, name) for name in ("ours", "other"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.cert_file, ours.key_file)
    with issuing(context) as issuer:
        assert list(fetch_keys(issuer.settings(ca_file=str(ours.ca_file)))) == ["one"]
        for ca_file in (str(other.ca_file), None):
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                fetch_keys(issuer.settings(ca_file=ca_file))
        with pytest.raises(OSError, match="No such file"):
            fetch_keys(issuer.settings(ca_file=str(tmp_path / "none.pem")))
