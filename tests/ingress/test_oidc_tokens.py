"""Tokens are verified with the keys that a local issuer publishes; each forgery and each mistake is refused."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from serve_app.core.tenants import SCOPES
from serve_app.core.token_claims import TokenRights
from serve_app.errors import InvalidToken, NoTenant
from serve_app.ingress.http import tokens as module
from serve_app.ingress.http.tokens import Tokens, is_token
from tests.ingress.issuer import Issuer, ec_key, ed_key, issuing, part, published, rsa_key

BOTH = frozenset(SCOPES)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


def rights(issuer: Issuer, token: str, **settings: Any) -> TokenRights:
    return asyncio.run(Tokens(issuer.settings(**settings)).rights(token.encode()))


def problem(issuer: Issuer, token: str) -> str:
    with pytest.raises(InvalidToken) as refused:
        rights(issuer, token)
    assert str(refused.value).endswith("; ask the issuer for another token, or use an API key")
    return refused.value.problem


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("has_alg", [True, False])
def test_a_token_of_each_algorithm_is_accepted(issuer: Issuer, algorithm: str, has_alg: bool) -> None:
    key = {"ES256": ec_key, "EdDSA": ed_key}.get(algorithm, lambda: rsa_key("one"))()
    issuer.keys = [published(key, "k", **({"alg": algorithm} if has_alg else {}))]
    token = issuer.token(key, "k", algorithm)
    assert is_token(token.encode())
    assert rights(issuer, token) == TokenRights("groups", frozenset(["red", "staff"]), BOTH)


def test_times_have_a_leeway_of_half_a_minute(issuer: Issuer) -> None:
    now = int(time.time())
    rights(issuer, issuer.token(exp=now - 20))
    rights(issuer, issuer.token(nbf=now + 20, iat=now + 20))
    rights(issuer, issuer.token(iat=None))
    assert problem(issuer, issuer.token(exp=now - 31)) == "the token has expired"
    assert problem(issuer, issuer.token(nbf=now + 60)) == "the token is not valid yet"
    assert problem(issuer, issuer.token(iat=now + 60)) == "the token is not valid yet"


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"aud": "another"}, "the token is for another audience than 'serve-app'"),
        ({"aud": ["another", "serve"]}, "the token is for another audience than 'serve-app'"),
        ({"iss": "https://login.example.org"}, "the token is of another issuer than {url}"),
        ({"aud": None}, "the token lacks one of the claims exp, iss and aud"),
        ({"exp": None}, "the token lacks one of the claims exp, iss and aud"),
        ({"iss": None}, "the token lacks one of the claims exp, iss and aud"),
        ({"exp": "soon"}, "the token is malformed"),
        ({"exp": float("inf")}, "the token is malformed"),
    ],
)
def test_claims_that_are_not_for_this_server_are_refused(issuer: Issuer, claims: dict[str, Any], said: str) -> None:
    assert problem(issuer, issuer.token(**claims)) == said.format(url=issuer.url)


def test_an_audience_may_be_one_of_several(issuer: Issuer) -> None:
    rights(issuer, issuer.token(aud=["another", "serve-app"]))


def test_a_public_key_is_no_secret_of_hs256(issuer: Issuer) -> None:
    public = rsa_key("one").public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for secret in (pem, pem.strip(), der, part(issuer.keys[0])):
        assert (
            problem(issuer, issuer.signed_by_hmac(secret))
            == "the token's algorithm 'HS256' is none of RS256, PS256, ES256, EdDSA"
        )


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", None, "RS512", "HS512", ["RS256"], {"RS256": 1}, 7])
def test_an_algorithm_that_is_not_listed_is_refused(issuer: Issuer, algorithm: Any) -> None:
    assert problem(issuer, issuer.unsigned(algorithm)).startswith(f"the token's algorithm {str(algorithm)!r} is none of RS256,")
    assert issuer.num_readings == 0, "the issuer is not asked for such a token"


def test_an_algorithm_has_to_fit_the_key(issuer: Issuer) -> None:
    issuer.keys = [published(rsa_key("one"), "one", alg="PS256"), published(ec_key(), "ec")]
    assert problem(issuer, issuer.token()) == "the token's algorithm is not that of its key"
    assert problem(issuer, issuer.token(kid="ec")) == "the token's algorithm is not that of its key"
    assert problem(issuer, issuer.unsigned("RS256")) == "the token's algorithm is not that of its key"


def test_a_forged_signature_is_refused(issuer: Issuer) -> None:
    said = "the signature of the token is not valid"
    assert problem(issuer, issuer.token(rsa_key("forger"))) == said
    head, claims, signature = issuer.token().split(".")
    assert problem(issuer, f"{head}.{part(issuer.claims(groups=['blue'])).decode()}.{signature}") == said
    assert problem(issuer, f"{head}.{claims}.") == said
    assert problem(issuer, issuer.unsigned("RS256")) == said


def test_a_key_that_is_too_short_is_refused(issuer: Issuer) -> None:
    short = rsa_key("short", 1024)
    issuer.keys = [published(short, "one")]
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = issuer.token(short)
    assert problem(issuer, token) == "the token is signed with a key that is too short"


@pytest.mark.parametrize(
    "token",
    ["..", "a.b.c", "\xff.\xff.\xff", "e30.e30.e30.", f"{part([]).decode()}.e30.", part(b"[" * 10_000).decode() + ".e30."],
    ids=range(6),
)
def test_what_is_no_token_is_refused(issuer: Issuer, token: str) -> None:
    with pytest.raises(
        InvalidToken, match=r"^(what was given is no API key of this server, and no token|the token's algorithm 'None')"
    ):
        rights(issuer, token)


def test_a_token_without_a_key_or_of_too_many_bytes_is_refused(issuer: Issuer) -> None:
    assert problem(issuer, issuer.token(kid=None)) == "the head of the token names no key (kid)"
    token = issuer.token(text="x" * module.MAX_TOKEN_BYTES)
    assert problem(issuer, token) == f"the token has {len(token)} bytes, limit 16384"


def test_an_extension_that_must_be_understood_is_refused(issuer: Issuer) -> None:
    token = jwt.encode(issuer.claims(), rsa_key("one"), "RS256", {"kid": "one", "crit": ["new"], "new": 1})
    problem(issuer, token)


def test_a_claim_without_texts_is_refused(issuer: Issuer) -> None:
    with pytest.raises(NoTenant, match="the token's claim 'groups' is missing"):
        rights(issuer, issuer.token(groups=None))


class Counted:
    """Counts the tokens that PyJWT checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self._decode = 0, jwt.decode
        monkeypatch.setattr(jwt, "decode", self)

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.num += 1
        return self._decode(*args, **more)


def test_a_token_is_checked_once_until_it_expires(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, now = Counted(monkeypatch), time.time()
    tokens = Tokens(issuer.settings(), clock=lambda: now)
    token = issuer.token(exp=int(now) + 10).encode()

    async def ask(given: bytes = token) -> TokenRights:
        return await tokens.rights(given)

    run: Callable[[Any], Any] = asyncio.Runner().run
    first = run(ask())
    assert [run(ask()) for _ in range(5)] == [first] * 5
    assert checked.num == 1
    with pytest.raises(InvalidToken):
        run(ask(token[:-6] + b"AAAAAA"))
    assert checked.num == 2
    now += 41
    run(ask())
    assert checked.num == 3, "PyJWT, which has its own clock, is asked again"


def test_the_number_of_kept_tokens_is_bounded_and_the_latest_stay(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    checked, tokens = Counted(monkeypatch), Tokens(issuer.settings())
    given = [issuer.token(jti=str(number)).encode() for number in range(4)]

    async def ask() -> None:
        for number in (0, 1, 2, 0, 3):
            await tokens.rights(given[number])
        assert checked.num == 4
        await tokens.rights(given[0])
        assert checked.num == 4
        await tokens.rights(given[1])
        assert checked.num == 5

    asyncio.run(ask())
