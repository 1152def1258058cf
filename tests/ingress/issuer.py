"""A small OpenID Connect issuer on 127.0.0.1: it serves a discovery document and its public keys, and signs tokens."""

import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from serve_app.config import OidcSettings

AUDIENCE = "serve-app"
DISCOVERY, KEYS = "/.well-known/openid-configuration", "/keys"


@cache
def rsa_key(name: str, bits: int = 2048) -> rsa.RSAPrivateKey:
    """Return one private key for each name: to make one takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@cache
def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def published(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    """Return the public part of the private key as an issuer publishes it."""
    kinds: dict[type, Any] = {
        rsa.RSAPrivateKey: RSAAlgorithm,
        ec.EllipticCurvePrivateKey: ECAlgorithm,
        ed25519.Ed25519PrivateKey: OKPAlgorithm,
    }
    (kind,) = [made for known, made in kinds.items() if isinstance(key, known)]
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": kid, "use": "sig", **more}


def part(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class Issuer:
    """What the issuer answers; change it at any time. At first it publishes the RSA key `one`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: list[dict[str, Any]] = [published(rsa_key("one"), "one")]
        self.document: dict[str, Any] = {"issuer": url, "jwks_uri": url + KEYS}
        self.status = 200
        self.raw: bytes | None = None
        """Sent in place of the keys."""
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def num_readings(self) -> int:
        """Return how often the keys were asked for."""
        return self.asked.count(KEYS)

    def settings(self, **more: Any) -> OidcSettings:
        return OidcSettings.model_validate({"issuer": self.url, "audience": AUDIENCE, "tenant_claim": "groups"} | more)

    def claims(self, **more: Any) -> dict[str, Any]:
        now = int(time.time())
        made = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "someone",
            "iat": now,
            "exp": now + 600,
            "groups": ["red", "staff"],
        } | more
        return {name: value for name, value in made.items() if value is not None}

    def token(self, key: Any = None, kid: str | None = "one", algorithm: str = "RS256", **claims: Any) -> str:
        """Return a token, by default a valid one of the tenant `red`. A claim that is None is left out."""
        return jwt.encode(self.claims(**claims), key or rsa_key("one"), algorithm, None if kid is None else {"kid": kid})

    def signed_by_hmac(self, secret: bytes) -> str:
        """Return a token of HS256. PyJWT refuses to make one with a public key, and a forger does not ask PyJWT."""
        signed = part({"alg": "HS256", "typ": "JWT", "kid": "one"}) + b"." + part(self.claims())
        return (signed + b"." + part(hmac.new(secret, signed, hashlib.sha256).digest())).decode()

    def unsigned(self, algorithm: Any = "none") -> str:
        return (part({"alg": algorithm, "kid": "one"}) + b"." + part(self.claims()) + b".").decode()


@contextlib.contextmanager
def issuing(context: ssl.SSLContext | None = None) -> Iterator[Issuer]:
    """Run an issuer, with TLS if there is a context."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked.append(self.path)
            assert issuer.may_answer.wait(30)
            body = json.dumps(issuer.document if self.path == DISCOVERY else {"keys": issuer.keys}).encode()
            if self.path == KEYS and issuer.raw is not None:
                body = issuer.raw
            self.send_response(issuer.status if self.path in (DISCOVERY, KEYS) else 404)
            self.send_header("content-length", str(len(body)))
            self.send_header("location", issuer.url + KEYS)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client need not read all of it
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    issuer = Issuer(f"http{'' if context is None else 's'}://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()
