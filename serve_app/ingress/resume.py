"""How a request may go on elsewhere after its replica is lost: judged by the parameters that are set, each of which has its way.

Pure. An allow-list: a parameter that the table does not name is one that a newer vLLM brought, and nobody has looked at what the engine
keeps for it. tests/contracts/test_resume_ways.py compares the table with the installed vLLM and with docs/reliability.md.
"""

import dataclasses
import functools
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

from serve_app.core.request import Resume

_GREEDY_BELOW = 1e-5  # vllm.sampling_params: a lower temperature is greedy


class Way(Enum):
    """What a parameter means for an attempt that begins after tokens were emitted. The value is its word in the documentation."""

    SAME = "sent again"
    """The engine keeps no history for it, or derives it from all tokens, prompt and emitted ids alike, or only the front end reads it."""
    REST = "what is left"
    """A count of output tokens: the attempt gets what the emitted ones leave of it."""
    ONCE = "once"
    """Delivered, or used up, with the first token: later attempts do not ask for it again."""
    SEED = "seed"
    """vLLM's V2 runner derives its noise from seed and position. The V1 runner's generator has a history, which only a replay repeats."""
    GRAMMAR = "grammar"
    """The engine's grammar accepts the emitted tokens before it masks the next one (serve_app/replica/grammar.py)."""
    OUTPUT = "output history"
    """The engine looks at its own output. Replayed if repeatable, else continued: the engine then sees only what follows the seam."""
    KEYS = "by key"
    """A mapping whose keys have ways of their own; a key without one is WHOLE."""
    WHOLE = "whole"
    """Prompt + emitted ids do not continue it: replayed if repeatable, else the client gets one explicit error."""


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
        Way.ONCE: "kv_transfer_params",
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
"""Struct of vLLM -> way -> the names of its fields. Of `extra_args`, the keys that vLLM's own code reads."""

_GRAMMAR_BACKENDS = frozenset({"xgrammar", "guidance", "outlines"})
"""Those for which tests/replica/test_grammar.py shows that a grammar which accepts the emitted tokens masks as the lost one did."""


def names(struct: str, way: Way) -> list[str]:
    return WAYS[struct].get(way, "").split()


_KNOWN_KEYS = frozenset(key for way in WAYS["extra_args"] for key in names("extra_args", way))


def resume_of(request: Any, *, replays_seeded: bool) -> Resume:
    """Return how the request goes on after its replica is lost. ``replays_seeded``: its engines are vLLM's V1 runner, the one on CPU."""
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
    """Yield the ways of those fields that are set and keep a request from going on where it was."""
    cls: Any = type(struct)
    for field, way, default in _fields_that_matter(cls, name):
        value = getattr(struct, field)
        if value is default or (isinstance(value, (str, list, dict, tuple, set, frozenset)) and not value):
            continue
        if value is False and way is Way.OUTPUT:  # vLLM's front end says so of `watermarking`, whose default is None
            continue
        if not isinstance(value, (bool, int, float)) or value != default:
            yield way


def _ways_of_keys(extra_args: dict[str, Any] | None) -> Iterator[Way]:
    if extra_args and not _KNOWN_KEYS.issuperset(extra_args):
        yield Way.WHOLE


@functools.cache
def _fields_that_matter(cls: Any, name: str) -> list[tuple[str, Way, Any]]:
    """Return field, way and default; those of the other ways change nothing here and are not looked at per request."""
    way_of = {field: way for way in WAYS[name] for field in names(name, way)}
    fields = [(field, way_of.get(field, Way.WHOLE), default) for field, default in _defaults(cls)]
    return [row for row in fields if row[1] in (Way.OUTPUT, Way.WHOLE)]


def _defaults(cls: Any) -> Iterator[tuple[str, Any]]:
    """Yield all fields of vLLM's struct or dataclass; a container's default is empty, which counts as not set in any case."""
    if issubclass(cls, msgspec.Struct):
        yield from ((field.name, field.default) for field in msgspec.structs.fields(cls))
    else:
        yield from ((field.name, field.default) for field in dataclasses.fields(cls))
