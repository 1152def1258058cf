"""A tenant is a group of clients that shares rights and limits; its API keys prove who sends a request. Pure.

A key is compared by its SHA-256 alone. Each request is compared with the digests of all keys, so that the time of the comparison reveals
nothing. Only the key names the tenant: no header and no field of a body does. `token_claims.py` finds the tenant of a token of OIDC.
"""

import hashlib
import hmac
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from serve_app.errors import BadRequest, InvalidApiKey, MissingScope

Scope = Literal["infer", "batch"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""`infer`: all routes that ask a model, its tokenizer included. `batch`: files and batches. Other routes need any valid key."""

Quota = Literal["requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent"]
"""What a tenant may take in a time (`quotas.py`)."""

Priority = Literal["interactive", "batch", "background"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The order in which requests of tenants go to full engines: `interactive` first, then `batch`, then `background`."""

OIDC = "oidc"
"""The id that all callers with a token of OIDC have in place of a key's, so that no subject of a token becomes a label."""

_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields by which bodies limit an answer: of completions and messages, of chat, of responses."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The rights and limits of one tenant. None stands for "no limit of its own"."""

    name: str
    models: frozenset[str] | None = None
    """Names of the models that the tenant may ask; each includes its aliases, adapters and canary. None: all models."""
    max_tokens: int | None = None
    """Most tokens of one answer."""
    max_context: int | None = None
    """Most tokens of a prompt and its answer together."""
    shares_prefix_cache: bool = False
    """Whether its prompts share cached blocks with those of all tenants that have this set."""
    quotas: Mapping[Quota, int] = field(default_factory=dict, hash=False)
    """Each >= 1. A quota that is not named does not limit the tenant."""
    first_token_s: float | None = None
    """Seconds from the end of a request's head within which its first token has to come; an embedding has to be complete."""
    total_s: float | None = None
    """Seconds from the end of a request's head within which the answer has to be complete."""
    weight: float = 1.0
    """The tenant's share, > 0, of the measured GPU time among the tenants of the same priority whose requests wait. With weights 3 and 1,
    two tenants get 75 % and 25 %."""
    priority: Priority = "interactive"
    """Requests of `interactive` tenants go before those of `batch` tenants, and these before those of `background` tenants. Lines of the
    batch API are background work, whatever the priority of their tenant."""

    def may_ask(self, model: str) -> bool:
        return self.models is None or model in self.models

    def cache_salt(self, own: str | None) -> str | None:
        """Return the salt of a prompt's cached blocks, given the client's ``own`` salt. Prompts of different salts share no block.

        No salt of a client equals that of another tenant, because each is a digest that begins with the tenant's name, or with "" for
        tenants that share. Equal arguments give the same object: the intake recognizes the choices of one request by that.
        """
        if self.shares_prefix_cache:
            return None if own is None else _salt("", own)
        return _salt(self.name, own)

    def check_asked(self, body: Any) -> None:
        """Check the limits that a body names. `max_output_tokens` bounds an answer whose body names none.

        Args:
            body: The fields of `BodyFields`, of any type: wrong types are left to vLLM, except in a beam search.
        Raises:
            BadRequest: The body asks for more tokens than the tenant may get.
        """
        if (limit := self.max_tokens) is None:
            return
        for name in _OUTPUT_LIMITS:
            value = getattr(body, name)
            if isinstance(value, int) and value > limit:
                raise BadRequest(name, f"is {value}, and the tenant {self.name!r} has max_tokens {limit}; ask for that or less")
            # Each step of a beam search is an engine request of its own with one token, so that only the body bounds the search.
            if body.use_beam_search and (value is not None or name == "max_tokens") and type(value) is not int:
                # Only chats read max_completion_tokens: on other routes a search with that field alone would have no bound.
                problem = "is missing, which max_completion_tokens does not replace" if value is None else "is no whole number"
                way_out = f"a beam search of the tenant {self.name!r} has to give a whole number of at most {limit}"
                raise BadRequest(name, f"{problem}; {way_out}")

    def max_output_tokens(self, prompt_tokens: int, asked: int | None) -> int | None:
        """Return the most tokens that the answer to a prompt may have, at least 1. ``asked`` is the request's own bound, if it has one.

        Raises:
            BadRequest: The prompt leaves no room for an answer within the tenant's ``max_context``.
        """
        room = None
        if self.max_context is not None and (room := self.max_context - prompt_tokens) < 1:
            problem = f"has {prompt_tokens} tokens, and the tenant {self.name!r} has max_context {self.max_context}"
            raise BadRequest("prompt", f"{problem}, which an answer of 1 token or more shares; shorten it")
        return min((bound for bound in (asked, self.max_tokens, room) if bound is not None), default=None)

    def check_prompt(self, prompt_tokens: int) -> None:
        """Check a prompt that gets no answer of tokens, such as one to embed.

        Raises:
            BadRequest: The prompt is longer than the tenant's ``max_context``.
        """
        if self.max_context is not None and prompt_tokens > self.max_context:
            problem = f"has {prompt_tokens} tokens, and the tenant {self.name!r} has max_context {self.max_context}; shorten it"
            raise BadRequest("prompt", problem)


@lru_cache(maxsize=4096)
def _salt(space: str, own: str | None) -> str:
    data = repr((space, own)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(data, digest_size=16, person=b"serve-app tenant").hexdigest()


@dataclass(frozen=True, slots=True)
class Key:
    """One API key of a tenant. Its ``id`` is unique among all tenants, and may be shown."""

    id: str
    digest: bytes
    """The SHA-256 of the key."""
    scopes: frozenset[Scope] = frozenset(SCOPES)
    expires: str = ""
    """The last day on which the key is valid, as errors show it; "" for none."""
    expires_at: float = math.inf
    """The end of that day, in seconds since 1970."""
    revoked: str = ""
    """The day on which the key was revoked; "" for a key that was not."""

    def why_invalid(self, now: float) -> str:
        """Return why the key is not valid at ``now``, in seconds since 1970; "" for a valid key."""
        if self.revoked:
            return f"the API key {self.id} was revoked on {self.revoked}"
        return f"the API key {self.id} has expired on {self.expires}" if now >= self.expires_at else ""


class Caller(NamedTuple):
    """Who sent a request."""

    tenant: Tenant
    key: Key

    def check_scope(self, scope: Scope) -> None:
        """Raise `MissingScope` if the key or token lacks the scope."""
        if scope not in self.key.scopes:
            raise MissingScope(scope=scope, key="" if self.key.id == OIDC else self.key.id, tenant=self.tenant.name)


class Keyring:
    """All tenants and their keys. The ids of keys, and their digests, are unique.

    Args:
        problem: What is wrong with models that the file names, "" for nothing. All else of the file counts.
    """

    def __init__(self, tenants: Iterable[tuple[Tenant, Sequence[Key]]], *, problem: str = "") -> None:
        self.problem = problem
        listed = list(tenants)
        self._tenants = {tenant.name: tenant for tenant, _ in listed}
        self._callers = [Caller(tenant, key) for tenant, keys in listed for key in keys]

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._callers)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def caller(self, key: bytes, now: float) -> Caller:
        """Return the caller to whom ``key`` belongs. ``now`` is in seconds since 1970.

        Raises:
            InvalidApiKey: The key is not known, has expired or was revoked. Only who has the key learns which.
        """
        if (found := self._find(key)) is None:
            raise InvalidApiKey("the API key is not known")
        if problem := found.key.why_invalid(now):
            raise InvalidApiKey(problem, "ask the operator of this server for a new key")
        return found

    def knows(self, key: bytes) -> bool:
        """Return whether ``key`` belongs to a caller, valid or not."""
        return self._find(key) is not None

    def _find(self, key: bytes) -> Caller | None:
        digest, found = hashlib.sha256(key).digest(), None
        for caller in self._callers:  # to the end: every digest is compared
            if hmac.compare_digest(digest, caller.key.digest):
                found = caller
        return found

    def models(self) -> frozenset[str]:
        """Return the models that tenants are restricted to."""
        return frozenset().union(*(tenant.models or () for tenant in self._tenants.values()))

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of this name, which need not have a key."""
        return self._tenants.get(name)

    def caller_of_batch(self, tenant: str, key_id: str, now: float) -> Caller | None:
        """Return the tenant and key by which a stored batch may continue; None if the key is not known.

        Args:
            tenant: Name of the batch's tenant.
            key_id: Id of the key by which it was made; "" for any: a batch of an older release does not have it.
        Raises:
            InvalidApiKey: The key is known, and has expired, was revoked or lacks the scope `batch`.
        """
        known = [each for each in self._callers if each.tenant.name == tenant and key_id in ("", each.key.id)]
        for caller in known:
            if "batch" in caller.key.scopes and not caller.key.why_invalid(now):
                return caller
        if known:
            raise InvalidApiKey(f"the API key of this batch of the tenant {tenant!r} is no longer valid for batches")
        return None

    def invalid(self, now: float) -> Iterator[str]:
        """Yield for each key that is not valid any more why that is so."""
        for tenant, key in self._callers:
            if problem := key.why_invalid(now):
                yield f"{problem} (tenant {tenant.name})"
