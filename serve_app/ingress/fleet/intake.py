"""The intake reads from vLLM's engine request the facts by which ``FleetState`` decides, before the request waits or starts.

The intake finds how many tokens the answer may have, how the answer can resume at another replica, the fingerprint under which equal
requests are quarantined, the hashes of the prompt for routing, and the LoRA adapter. Pure, except for `Intake.refusal`: a request may
wait for its tenant's quota.

The ways to resume are an allow-list: a parameter that `WAYS` does not name came with a newer vLLM, and it is unknown which state the engine
keeps for it. tests/contracts/test_resume_ways.py compares the table with the installed vLLM and with docs/reliability.md.
"""

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from serve_app.config import ModelSettings
from serve_app.core.events import RequestArrived
from serve_app.core.fair_tags import BACKGROUND_PRIORITY
from serve_app.core.prefix_index import NO_PREFIX, Prefix
from serve_app.core.prompt_hashes import hash_points, root_of, stable_hash
from serve_app.core.request import Resume
from serve_app.core.request_limits import problem_of
from serve_app.core.tenants import Priority, Tenant
from serve_app.errors import BadRequest, ServingError
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.fleet.quotas import Quotas

TOKENS_AT_ONCE, _REQUEST_TOKENS = 60_000, 500
"""Tokens of the prompts that are taken in during one turn of the event loop, about 12 ms. A request itself costs as much as 500 tokens."""
_GREEDY_BELOW = 1e-5  # vllm.sampling_params: a lower temperature is greedy


class Way(Enum):
    """The effect of a parameter on an attempt that begins after tokens were emitted. The value is the word in the documentation."""

    SAME = "sent again"
    """The engine keeps no history for the parameter, or derives it from prompt and emitted ids alike, or only the front end reads it."""
    REST = "what is left"
    """The parameter counts output tokens: the attempt gets the count less the emitted tokens."""
    ONCE = "once"
    """The result was delivered with the first token, or the value is used up then: later attempts leave the parameter out."""
    SEED = "seed"
    """vLLM's V2 runner derives its noise from seed and position. The V1 runner's generator has a state, which only a replay reproduces."""
    GRAMMAR = "grammar"
    """The engine's grammar accepts the emitted tokens before it masks the next one (serve_app/replica/grammar.py)."""
    OUTPUT = "output history"
    """The engine looks at its own output. A repeatable request is replayed. Another one is continued: its engine sees only later output."""
    KEYS = "by key"
    """The parameter is a mapping whose keys have ways of their own. A key without a way is WHOLE."""
    WHOLE = "whole"
    """Prompt + emitted ids cannot continue the request. It is replayed if repeatable; else the client gets one explicit error."""


WAYS: dict[str, dict[Way, str]] = {
    "SamplingParams": {
        Way.SAME: """n repetition_penalty temperature top_p top_k min_p stop stop_token_ids ignore_eos logprobs
            logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
            output_kind stream_interval skip_clone output_text_buffer_length _eos_token_id _all_stop_token_ids _watermarking_skipped
            logit_bias allowed_token_ids skip_reading_prefix_cache""",
        Way.REST: "max_tokens min_tokens",
        Way.ONCE: "prompt_logprobs prompt_logprob_token_ids prompt_logprob_start",
        Way.SEED: "seed",
        Way.GRAMMAR: "structured_outputs",
        Way.OUTPUT: """presence_penalty frequency_penalty bad_words _bad_words_token_ids thinking_token_budget repetition_detection
            watermarking""",
        Way.KEYS: "extra_args",
        Way.WHOLE: "routed_experts_prompt_start trace_decode_token_ids",
    },
    "extra_args": {
        Way.SAME: "kv_cache_report_mode",
    },
    "StructuredOutputsParams": {
        Way.GRAMMAR: """json regex choice grammar json_object disable_any_whitespace disable_additional_properties whitespace_pattern
            structural_tag _backend _backend_was_auto""",
    },
    "EngineCoreRequest": {
        Way.SAME: """request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request cache_salt
            data_parallel_rank prompt_is_token_ids client_index current_wave priority trace_headers external_req_id reasoning_ended
            reasoning_parser_kwargs abort_immediately session_id kv_hints""",
        Way.WHOLE: "prompt_embeds resumable",
    },
}
"""Struct of vLLM -> way -> the names of the struct's fields; for `extra_args`, the keys that vLLM's own code reads."""

_GRAMMAR_BACKENDS = frozenset({"xgrammar", "guidance", "outlines"})
"""Backends for which tests/replica/test_grammar.py shows that a new grammar, given the emitted tokens, masks as the lost one did."""


def names(struct: str, way: Way) -> list[str]:
    return WAYS[struct].get(way, "").split()


_KNOWN_KEYS = frozenset(key for way in WAYS["extra_args"] for key in names("extra_args", way))


class Intake:
    """Takes in the engine requests of one model.

    The digest and the prefix of a prompt are computed once for all choices of one request, which share the list of its ids. For 100,000
    tokens they take 6 ms of the event loop, so that ``n: 1000`` held it for 6 s.
    """

    def __init__(self, model: ModelSettings) -> None:
        self._model = model
        self.quotas: Quotas | None = None
        """The tenants' quotas; None where there are no tenants."""
        self._ids: list[int] | None = None
        self._rest: tuple[Any, ...] = ()
        self._digest, self._prefix = b"", NO_PREFIX
        self._at_once = 0

    async def refusal(self, request: Any, exchange: Exchange | None, vllm_config: Any) -> ServingError | None:
        """Return the error if vLLM's ``EngineCoreRequest`` must not run, else None. It gets its tenant's cache salt and limits."""
        if exchange is not None and exchange.error is not None:
            return exchange.error  # the HTTP request is ending: its time is over, or another of its engine requests has failed
        refused = bind_or_refuse(request, exchange, self._model, vllm_config.model_config.get_vocab_size())
        if refused is not None or self.quotas is None:
            return refused
        return await self.quotas.refusal(exchange)

    def arrival(
        self, request: Any, exchange: Exchange | None, vllm_config: Any, *, seeds_by_position: bool | None
    ) -> RequestArrived:
        """Return the event for the arrival of an ``EngineCoreRequest``.

        Args:
            exchange: The HTTP request to which it belongs; None outside of one.
            seeds_by_position: What all replicas of the model report; None before the first one joins.
        """
        model = self._model
        if seeds_by_position is None:
            seeds_by_position = model.device == "cuda" or model.simulated is not None
        self._compute_parts(request, vllm_config.cache_config)
        prompt_tokens, max_tokens = tokens_of(request, vllm_config)
        tenant = None if exchange is None or exchange.caller is None else exchange.caller.tenant
        start_by, max_wait_s = self._bounds(exchange)
        return RequestArrived(
            request.request_id,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            resume=resume_of(request, replays_seeded=not seeds_by_position),
            fingerprint=fingerprint_of(request, model.name, self._digest),
            prefix=self._prefix,
            background=exchange is not None and exchange.background,
            adapter=None if request.lora_request is None else request.lora_request.lora_int_id,
            start_by=start_by,
            first_token_s=0.0 if start_by is None or tenant is None else tenant.first_token_s or 0.0,
            max_wait_s=max_wait_s,
            is_first=exchange is None or exchange.requests.first is None,
            tenant="" if tenant is None else tenant.name,
            weight=1.0 if tenant is None else tenant.weight,
            priority=priority_of(exchange, request.priority),
        )

    def _bounds(self, exchange: Exchange | None) -> tuple[float | None, float | None]:
        """Return ``start_by`` and ``max_wait_s`` of an engine request.

        Only the first engine request of an HTTP request has them, so that an HTTP request is judged once. Lines of batches may wait, and
        tenants of lower priorities have no limit but their own.
        """
        if exchange is None or exchange.background or exchange.requests.first is not None:
            return None, None
        if exchange.caller is None:
            return None, self._model.replicas.max_wait_s()
        tenant = exchange.caller.tenant
        start_by = None if tenant.first_token_s is None else exchange.arrived_at + tenant.first_token_s
        return start_by, self._model.replicas.max_wait_s() if tenant.priority == "interactive" else None

    def _compute_parts(self, request: Any, cache_config: Any) -> None:
        ids = request.prompt_token_ids
        rest = request.mm_features, request.lora_request, request.cache_salt, request.session_id, cache_config.block_size
        if ids is None or ids is not self._ids or any(new is not old for new, old in zip(rest, self._rest, strict=True)):
            self._digest = digest_of(ids or ())
            self._prefix = prefix_of(request, cache_config) if self._model.routing.by == "prefix" else NO_PREFIX
            self._ids, self._rest = ids, rest

    def is_pause_due(self, request: Any) -> bool:
        """Return whether the event loop should turn to others before this request, of several that come at once."""
        self._at_once += _REQUEST_TOKENS + len(request.prompt_token_ids or ())
        if self._at_once <= TOKENS_AT_ONCE:
            return False
        self._at_once = 0
        return True


def adapters_of(model: ModelSettings) -> dict[str, LoRARequest]:
    """Return vLLM's request part for each adapter by its name. Engines know an adapter by its number, which is equal in all ingresses."""
    return {
        name: LoRARequest(name, adapter.number(name), str(adapter.path), base_model_name=model.name)
        for name, adapter in model.adapters.items()
    }


def priority_of(exchange: Exchange | None, priority: int) -> Priority:
    """Return the priority of an engine request. Its own vLLM ``priority`` can only make it background work."""
    if priority >= BACKGROUND_PRIORITY or (exchange is not None and exchange.background):
        return "background"
    return "interactive" if exchange is None or exchange.caller is None else exchange.caller.tenant.priority


def bind_or_refuse(request: Any, exchange: Exchange | None, model: ModelSettings, vocab_size: int) -> BadRequest | None:
    """Give vLLM's ``EngineCoreRequest`` the cache salt and the limits of its tenant; return the error if it must not run, else None."""
    try:
        if exchange is not None and exchange.caller is not None:
            _bind(request, exchange.caller.tenant)
    except BadRequest as exc:
        return exc
    return refusal_of(request, model, vocab_size)


def _bind(request: Any, tenant: Tenant) -> None:
    prompt = request.prompt_token_ids if request.prompt_embeds is None else request.prompt_embeds
    prompt_tokens = 0 if prompt is None else len(prompt)
    if (params := request.sampling_params) is None:
        tenant.check_prompt(prompt_tokens)
    else:
        params.max_tokens = tenant.max_output_tokens(prompt_tokens, params.max_tokens)
    request.cache_salt = tenant.cache_salt(request.cache_salt)


def refusal_of(request: Any, model: ModelSettings, vocab_size: int) -> BadRequest | None:
    """Return the error if no engine of the model must get vLLM's ``EngineCoreRequest``; None if it may.

    vLLM 0.32 looks up log probabilities of a prompt by token, and the adapters for them by request. With several requests in a batch
    the two counts differ and the engine ends, even if the request has no adapter.
    """
    if (problem := problem_of(request, vocab_size)) is not None:
        return BadRequest(*problem)
    params = request.sampling_params
    if model.adapters and params is not None and params.prompt_logprobs is not None:
        return BadRequest("prompt_logprobs", "a model with LoRA adapters has none of its prompts; nor has echo with logprobs")
    return None


def tokens_of(request: Any, vllm_config: Any) -> tuple[int, int]:
    """Return the tokens of the prompt of vLLM's ``EngineCoreRequest``, and the most that its answer may have."""
    prompt_tokens = len(request.prompt_token_ids or ())
    return prompt_tokens, max_output_tokens(request.sampling_params, prompt_tokens, vllm_config.model_config.max_model_len)


def max_output_tokens(params: Any, prompt_tokens: int, max_model_len: int) -> int:
    """Return the most tokens that the engine can give: it ends every answer at the model's length."""
    if params is None:
        return 0
    return min(params.max_tokens or 1, max(max_model_len - prompt_tokens, 1))


def digest_of(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", token_ids).tobytes()).digest()


def fingerprint_of(request: Any, model: str, prompt_digest: bytes) -> str:
    """Return a fingerprint that is equal for requests with equal work for an engine: ids, seeds, priorities and salts do not count.

    ``prompt_digest`` is that of the prompt's ids. All choices of an n>1 have one fingerprint, and so has the same request when sent again.
    """
    digest = hashlib.sha256()
    params = request.sampling_params or request.pooling_params
    kind: Any = type(params)
    values = _reader_of(kind)(params)
    media = [feature.identifier for feature in request.mm_features or ()]
    lora = request.lora_request and request.lora_request.lora_name
    digest.update(repr((model, lora, media, kind.__name__, values)).encode("utf-8", "backslashreplace"))
    digest.update(prompt_digest)
    if request.prompt_embeds is not None:
        digest.update(request.prompt_embeds.float().numpy(force=True).tobytes())
    return digest.hexdigest()


@functools.cache
def _reader_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads, from parameters of this class, all public fields but the seed, in order."""
    return attrgetter(*(name for name in kind.__struct_fields__ if not name.startswith("_") and name != "seed"))


def resume_of(request: Any, *, replays_seeded: bool) -> Resume:
    """Return how the request resumes after its replica is lost. ``replays_seeded``: its engines use vLLM's V1 runner, as on CPU."""
    params = request.sampling_params
    if params is None:
        return Resume.RESTART
    greedy = params.temperature < _GREEDY_BELOW
    repeatable = greedy or params.seed is not None
    ways = {*_ways(request, "EngineCoreRequest"), *_ways(params, "SamplingParams"), *_ways_of_keys(params.extra_args)}
    if (structured := params.structured_outputs) is not None:
        ways |= {
            Way.GRAMMAR if structured._backend in _GRAMMAR_BACKENDS else Way.WHOLE,
            *_ways(structured, "StructuredOutputsParams"),
        }
    if Way.WHOLE in ways:
        return Resume.REPLAY if repeatable else Resume.NEVER
    if repeatable and (Way.OUTPUT in ways or (not greedy and replays_seeded)):
        return Resume.REPLAY
    return Resume.CONTINUE


def _ways(struct: Any, name: str) -> Iterator[Way]:
    """Yield the ways of fields that are set and may prevent that a request continues after its emitted tokens."""
    cls: Any = type(struct)
    for field, way, default in _fields_that_matter(cls, name):
        value = getattr(struct, field)
        if value is default or (isinstance(value, (str, list, dict, tuple, set, frozenset)) and not value):
            continue
        if value is False and way is Way.OUTPUT:  # vLLM's front end sets `watermarking` so, although its default is None
            continue
        if not isinstance(value, (bool, int, float)) or value != default:
            yield way


def _ways_of_keys(extra_args: dict[str, Any] | None) -> Iterator[Way]:
    if extra_args and not _KNOWN_KEYS.issuperset(extra_args):
        yield Way.WHOLE


@functools.cache
def _fields_that_matter(cls: Any, name: str) -> list[tuple[str, Way, Any]]:
    """Return field, way and default of the fields whose way matters here; the others are not read for each request."""
    way_of = {field: way for way in WAYS[name] for field in names(name, way)}
    fields = [(field, way_of.get(field, Way.WHOLE), default) for field, default in _defaults(cls)]
    return [row for row in fields if row[1] in (Way.OUTPUT, Way.WHOLE)]


def _defaults(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yield all fields of vLLM's struct or dataclass. Defaults of containers may be missing: an empty container counts as not set."""
    if issubclass(cls, msgspec.Struct):
        yield from ((field.name, field.default) for field in msgspec.structs.fields(cls))
    else:
        yield from ((field.name, field.default) for field in dataclasses.fields(cls))


def prefix_of(request: Any, cache_config: Any) -> Prefix:
    """Return the prefix of vLLM's ``EngineCoreRequest``. Prompts share cached blocks only with equal adapter, salt and media.

    ``cache_config`` is vLLM's. Without a prefix cache, the prefix consists of the session only.
    """
    block_size = cache_config.block_size  # None until the first replica has reported it
    session = None if request.session_id is None else stable_hash("session", request.session_id)
    ids = request.prompt_token_ids
    if not ids or request.prompt_embeds is not None or not (cache_config.enable_prefix_caching and block_size):
        return NO_PREFIX if session is None else Prefix(session=session)
    lora = request.lora_request
    root = root_of(None if lora is None else (lora.lora_name, lora.lora_path), request.cache_salt)
    media = ((f.mm_position.offset, stable_hash("media", f.identifier)) for f in request.mm_features or ())
    return Prefix(hash_points(ids, block_size, root, media), block_size, session)
