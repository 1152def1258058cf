"""These errors say what is wrong with a client's request. None of them carries Retry-After."""

from dataclasses import dataclass
from typing import ClassVar

from serve_app.errors.base import ServingError


@dataclass(eq=False)
class BadRequest(ServingError):
    """A parameter of the request has an invalid value."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "bad_request"
    param: str
    problem: str

    def __str__(self) -> str:
        return f"{self.param}: {self.problem}"


@dataclass(eq=False)
class NotSupported(ServingError):
    """The request uses a feature that this server leaves out on purpose; ``hint`` is the way out."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "not_supported"
    feature: str
    hint: str

    def __str__(self) -> str:
        return f"{self.feature} is not supported; {self.hint}"


@dataclass(eq=False)
class InvalidApiKey(ServingError):
    """The request carries no API key, or a key that is not in the file, has expired or was revoked."""

    http_status: ClassVar[int] = 401
    code: ClassVar[str] = "invalid_api_key"
    problem: str
    hint: str = "send the header `Authorization: Bearer KEY` with a key of this server"

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}"


@dataclass(eq=False)
class InvalidToken(ServingError):
    """The request carries a token of OIDC that is not valid, or is not for this server."""

    http_status: ClassVar[int] = 401
    code: ClassVar[str] = "invalid_token"
    problem: str

    def __str__(self) -> str:
        return f"{self.problem}; ask the issuer for another token, or use an API key"


@dataclass(eq=False)
class NoTenant(ServingError):
    """The request's token is valid, and its claim does not name one tenant. No name is shown: it may be another client's."""

    http_status: ClassVar[int] = 403
    code: ClassVar[str] = "no_tenant"
    claim: str
    problem: str

    def __str__(self) -> str:
        return f"the token's claim {self.claim!r} {self.problem}; ask the operator of this server which value gives you access"


@dataclass(eq=False)
class MissingScope(ServingError):
    """The request's API key or token is valid, but has no right to this route."""

    http_status: ClassVar[int] = 403
    code: ClassVar[str] = "missing_scope"
    scope: str
    key: str
    """The id of the key; "" for a token."""
    tenant: str

    def __str__(self) -> str:
        shown, other = (f"API key {self.key}", "key") if self.key else ("token", "token")
        return f"the {shown} of the tenant {self.tenant!r} lacks the scope {self.scope!r}; use a {other} that has it"


@dataclass(eq=False)
class ModelNotFound(ServingError):
    """The request names a model that is not served, or that its tenant may not ask: no tenant learns of another's models."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "model_not_found"
    model: str
    served: tuple[str, ...]

    def __str__(self) -> str:
        return f"the model {self.model[:256]!r} does not exist; served here: {', '.join(self.served) or 'none'}"


@dataclass(eq=False)
class NotStored(ServingError):
    """There is no such file or batch, or it belongs to another tenant."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "not_stored"
    kind: str
    """File or Batch."""
    id: str

    def __str__(self) -> str:
        return f"no such {self.kind} object: {self.id[:80]!r}"


@dataclass(eq=False)
class RequestQuarantined(ServingError):
    """Two replicas were lost while they worked on the request, or on a similar one. No Retry-After: a client should not repeat it."""

    http_status: ClassVar[int] = 422
    code: ClassVar[str] = "request_quarantined"
    blocked_s: float

    def __str__(self) -> str:
        return (
            "two replicas were lost while they worked on a request like this one, which may be the cause; "
            f"requests like it are refused for another {self.blocked_s:.1f} s"
        )


@dataclass(eq=False)
class RequestTooLarge(ServingError):
    """The body is longer than the ingress reads, or its message longer than a frame may be; ``size_bytes`` is the size seen so far."""

    http_status: ClassVar[int] = 413
    code: ClassVar[str] = "request_too_large"
    size_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return f"the request has at least {self.size_bytes} bytes, limit {self.limit_bytes}"


@dataclass(eq=False)
class BodyTooSlow(ServingError):
    """The body did not arrive within the time limit."""

    http_status: ClassVar[int] = 408
    code: ClassVar[str] = "body_too_slow"
    limit_s: float

    def __str__(self) -> str:
        return f"the request body was not complete within {self.limit_s:g} s"
