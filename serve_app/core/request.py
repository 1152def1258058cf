"""`RequestState` is what the fleet remembers of one engine request, from its arrival to its single terminal outcome.

Pure. A *request* is one engine request of the front end (a child of n>1 and a beam's step each count as one); an *attempt* is
one try of it on one replica. Wire ids are ``<request id>@<attempt>``: the abort of an old attempt and the add of a new one may
meet on one engine, and vLLM asserts on a duplicate id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from serve_app.core.prefix_index import NO_PREFIX, Prefix
from serve_app.core.trail import Trail


class Resume(Enum):
    """The way in which a request that has emitted tokens continues after its replica is lost."""

    CONTINUE = "continue"
    """Prompt + emitted ids become the new prompt: the engine keeps no other history of this request."""
    REPLAY = "replay"
    """The request starts again from the original prompt; tokens that were sent already are swallowed as long as they are equal."""
    RESTART = "restart"
    """The request starts again: its answer comes as a whole (pooling), so that nothing was sent before."""
    NEVER = "never"
    """No way is known to be right (unseeded, and with a parameter that was not judged): the client gets one explicit error."""


class Trial(Enum):
    """The stage of a suspect's attempt. A replica gives its engine one suspect at a time."""

    NONE = "none"
    """The attempt is not a suspect's, or has had a new token."""
    IN_LINE = "in line"
    """The replica has the attempt and has not reported that its engine gets it: a loss of the replica says nothing about the suspect."""
    BEGUN = "begun"
    """The engine has the attempt."""


class EngineOutput(Protocol):
    """The part of vLLM's ``EngineCoreOutput`` that decisions need; the rest passes through untouched."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: object | None
    """Its text is vLLM's word: stop, length, abort, error, repetition."""
    events: object | None
    """With an attempt's first token: when the engine queued and scheduled the request, as items with `type` and `timestamp`."""
    prefill_stats: object | None
    """With an attempt's first token: its `num_cached_tokens` of the prompt were in the engine's prefix cache, and the KV of its
    `num_external_cached_tokens` was read from another engine."""
    stop_reason: object | None
    kv_transfer_params: object | None
    """Where the KV of an attempt is that was handed over."""


@dataclass(slots=True)
class RequestState:
    """One unfinished request.

    ``prompt_tokens`` and ``max_tokens`` (output tokens still allowed) are counts. ``emitted_ids`` are the tokens that the front end has.
    ``weights`` is the id of the weights that made them; the answer may continue with these weights only. ``fingerprint`` is equal for
    requests that give the engine the same to compute.

    ``HandOvers`` keeps ``is_leaving``, whether the replica was asked to hand the request over, and ``reads_kv``, whether the present
    attempt reads KV of the one before and has no token yet.

    ``step_part`` is the request's part of the engine's steps, 0.1 for a step in which ten requests got a token; ``ReplicaState`` adds it up
    for each attempt that had the request's first token, from its ``part_from`` on.

    ``Failover`` keeps the fields from ``to_swallow`` on. ``to_swallow`` is how many of ``emitted_ids`` a replay has still to repeat,
    ``deaths`` the number of engines that died while they had the request, ``broken_off`` the replicas whose connection broke off while
    they had it, and ``lost_at`` the time of the first loss after the latest new token. ``suspect_of`` names the replica that the request
    may have brought down, until its next new token. ``Quarantine`` keeps ``trial``, the stage of the present attempt.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    resume: Resume
    fingerprint: str = ""
    prefix: Prefix = NO_PREFIX
    background: bool = False
    """Whether the request is a batch's."""
    tenant: str = ""
    """Name of the tenant that sent the request; "" for a request without a tenant."""
    number: int = 0
    """1 for the first request of the model at this ingress."""
    spreads: bool = False
    """Whether it goes by load alone, because its tenant is behind its share where its prefixes are cached."""
    is_first: bool = True
    """Whether it is the first engine request of its HTTP request."""
    priority: int = 0
    """Its tag in `FairOrder`: among requests that wait, the lowest starts first."""
    gives_way: bool = False
    """Whether engines pause it for an interactive request of a tenant that is not ahead of its share."""
    emitted_ids: list[int] = field(default_factory=list)
    weights: str | None = None
    adapter: int | None = None
    """Number of the LoRA adapter that the request is for; None for the model itself."""
    attempt: int = -1
    replica_id: str | None = None
    arrived_at: float = 0.0
    waiting_since: float = 0.0
    start_by: float | None = None
    """When its first token has to come; None if there is no such limit."""
    first_token_s: float = 0.0
    """The limit of its tenant from which ``start_by`` was computed, in seconds; 0 without one."""
    expected_by: float | None = None
    """When its first token should come, by what is known at its arrival; None if that does not matter."""
    expected_wait_s: float | None = None
    """How long it was expected to wait at most when it was admitted; None if that was not known or if nothing limits its wait."""
    outstanding_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens of the prompt that the present attempt has probably still to compute; 0 after its first token."""
    charge_at: int = 16
    """Number of emitted tokens at which the tenant is charged for the running answer; then `FairOrder.charge` doubles it."""
    step_part: float = 0.0
    part_from: float | None = None
    to_swallow: int = 0
    deaths: int = 0
    broken_off: frozenset[str] = frozenset()
    lost_at: float | None = None
    suspect_of: str | None = None
    trial: Trial = Trial.NONE
    is_leaving: bool = False
    reads_kv: bool = False
    trail: Trail = field(default_factory=Trail)

    @property
    def attempt_id(self) -> str:
        return f"{self.request_id}@{self.attempt}"

    def tokens_left(self) -> int:
        """Return the prompt and output tokens that a new attempt may cost at most; emitted tokens are computed again in any case."""
        return self.prompt_tokens + len(self.emitted_ids) + self.max_tokens

    def first_difference(self, token_ids: Sequence[int], *, ended: bool) -> int | None:
        """Return the position, from 0, of the first output token at which a replay differs from the emitted ones; None without one.

        ``ended``: the engine finished with these tokens. A replay that ends with the last repeated token ends too early: the first run
        continued there.
        """
        start = len(self.emitted_ids) - self.to_swallow
        for position, token_id in enumerate(token_ids[: self.to_swallow], start):
            if token_id != self.emitted_ids[position]:
                return position
        return start + len(token_ids) if ended and len(token_ids) <= self.to_swallow else None
