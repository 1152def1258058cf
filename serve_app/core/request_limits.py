"""Limits of engine requests: no value of a client ends an engine, or makes each of its steps slow for all others.

Pure. vLLM's front end checks most values. It accepts some that a worker refuses by raising, which ends the engine core and all its answers,
and some that cost each step milliseconds. `LIMITS` names every field of vLLM's request structs, with its check or with the reason why it
needs none. Two places call `problem_of`: the fleet client, before a request waits (`ingress/fleet/fleet_client.py`), and the engine core,
before its scheduler gets the request (`replica/engine_core.py`).

tests/contracts/test_request_limits.py fails for a field without a row, and for a new `raise` or `assert` in vLLM's scheduler and workers.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

MAX_LOGIT_BIAS = MAX_ALLOWED_TOKENS = MAX_BAD_WORD_TOKENS = 1024
"""Entries of ``logit_bias``, of ``allowed_token_ids``, and tokens in all ``bad_words``: the rows of vLLM's V2 runner have this length."""
MAX_BAD_WORDS = 128
"""Token sequences that the ``bad_words`` of a request may become: vLLM's own limit."""
MAX_MIN_TOKENS_STOPS = 128
"""Stop tokens of a request with ``min_tokens``, end-of-sequence tokens included: again a row of vLLM's V2 runner."""
MAX_STOP_TOKENS = 1024
"""Stop tokens of other requests. vLLM compares each new token with the list: 1,024 take 25 us, 150,000 took 3.7 ms."""
MAX_REPETITION_STEPS = 32_768
"""Most comparisons of tokens that ``repetition_detection`` may make for a token: 3 ms."""
MAX_BAD_WORD_CHARS = 16_384
"""Characters in all ``bad_words``: tokenizing 5 million held the event loop for 13 s."""
MAX_STOPS, MAX_STOP_CHARS = 64, 16_384
"""Texts in ``stop``, and their characters together. The ingress searches each new text for all of them."""
MAX_EXTRA_VALUES, MAX_EXTRA_CHARS = 1000, 65_536
"""Values in ``extra_args``, and their characters together."""
MAX_CHOICE_TOKENS = 1 << 22
"""Tokens of the prompt times ``n``. vLLM's front end copies the prompt for each choice before it queues the first: 12 ns a token."""
MAX_PROMPT_LOGPROBS, MAX_LOGPROBS = 1 << 16, 1 << 20
"""Log probabilities of a prompt, and those of all prompts and answers of one HTTP request. A single answer may have more."""
MAX_TEXT_CHARS = 1024
"""Characters of ``cache_salt`` and ``session_id``."""
INT64 = range(-(2**63), 2**63)
"""The integers that the engine's MessagePack can carry; a larger one would fail as an error of the server."""
_COUNTS = range(2**30)  # workers add the tokens of the prompt, in 32 bits

Check = Callable[[Any, Any], str | None]
"""Gets the value of a field and the struct that holds it; returns what is wrong with the value, None if nothing is."""

IN_FRONT = "vLLM's front end checks it, and workers take every value that passes"
FRONT_ONLY = "only the front end reads it"
A_SWITCH = "on or off"
INTERNAL = "the front end sets it"
GRAMMAR = "grammar checks limit it: size, time and memory of its compilation"
SIZED = "the prompt: bounded by the model's context"


def _at_most(limit: int, what: str) -> Check:
    def check(value: Sized, _: Any) -> str | None:
        return None if len(value) <= limit else f"has {len(value)} {what}, limit {limit}"

    return check


def _within(allowed: range) -> Check:
    def check(value: int, _: Any) -> str | None:
        return None if value in allowed else f"is {value}, allowed are {allowed.start} to {allowed.stop - 1}"

    return check


_count = _within(_COUNTS)


def _only(expected: object, instead: str) -> Check:
    def check(value: object, _: Any) -> str | None:
        return None if value == expected else instead

    return check


def _min_tokens(num: int, params: Any) -> str | None:
    if params.max_tokens is not None and num > params.max_tokens:
        return f"is {num}, more than max_tokens, {params.max_tokens}"
    return _count(num, params)


def _stop_tokens(_: object, params: Any) -> str | None:
    """Check both lists of vLLM: the client's, and that list with the model's own ends, which only ``min_tokens`` uses."""
    num = len(params.stop_token_ids or ())
    if num > MAX_STOP_TOKENS:
        return f"has {num} tokens, limit {MAX_STOP_TOKENS}"
    num = len(params.all_stop_token_ids)
    if params.min_tokens and num > MAX_MIN_TOKENS_STOPS:
        return f"has {num} tokens with those that end the model's answers, limit {MAX_MIN_TOKENS_STOPS} beside min_tokens"
    return None


def _bad_words(words: list[str], params: Any) -> str | None:
    sequences = params.bad_words_token_ids or ()
    if (num := max(len(words), len(sequences))) > MAX_BAD_WORDS:
        return f"has {num} entries after tokenization, limit {MAX_BAD_WORDS}"
    if (num_chars := sum(map(len, words))) > MAX_BAD_WORD_CHARS:
        return f"has {num_chars} characters, limit {MAX_BAD_WORD_CHARS}"
    num_tokens = sum(map(len, sequences))
    return f"has {num_tokens} tokens, limit {MAX_BAD_WORD_TOKENS}" if num_tokens > MAX_BAD_WORD_TOKENS else None


def _logit_bias(biases: Mapping[int, float], _: Any) -> str | None:
    if len(biases) > MAX_LOGIT_BIAS:
        return f"has {len(biases)} entries, limit {MAX_LOGIT_BIAS}"
    beyond = next((bias for bias in biases.values() if not -100 <= bias <= 100), None)
    return None if beyond is None else f"has a bias of {beyond}, allowed are -100 to 100"


def _repetition(detection: Any, _: Any) -> str | None:
    longest, shortest, count = detection.max_pattern_size, max(1, detection.min_pattern_size), detection.min_count
    num = max(0, longest - shortest + 1) * longest * count
    if num <= MAX_REPETITION_STEPS:
        return None
    said = f"(max_pattern_size - min_pattern_size + 1) x max_pattern_size x min_count is {num}"
    return f"may compare too many tokens in each step: {said}, limit {MAX_REPETITION_STEPS}"


def _stops(stop: str | list[str], _: Any) -> str | None:
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > MAX_STOPS:
        return f"has {len(texts)} texts, limit {MAX_STOPS}"
    num_chars = sum(map(len, texts))
    return f"has {num_chars} characters, limit {MAX_STOP_CHARS}" if num_chars > MAX_STOP_CHARS else None


def _extra_args(extra: Mapping[str, Any], _: Any) -> str | None:
    num_chars = 0
    for num, part in enumerate(_parts(extra), 1):
        num_chars += len(part) if isinstance(part, str) else 0
        if num > MAX_EXTRA_VALUES or num_chars > MAX_EXTRA_CHARS:
            return f"has more than {MAX_EXTRA_VALUES} values or {MAX_EXTRA_CHARS} characters"
    return None


def _parts(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part


_FLEETS_OWN = "is set by the servers of this fleet alone; leave it out"

LIMITS: dict[str, dict[str, Check | str]] = {
    "SamplingParams": {
        "n": "each answer is an engine request of its own; bodies are limited in how many they may become",
        "presence_penalty": IN_FRONT,
        "frequency_penalty": IN_FRONT,
        "repetition_penalty": IN_FRONT,
        "temperature": IN_FRONT,
        "watermarking": A_SWITCH,
        "top_p": IN_FRONT,
        "top_k": _within(INT64),
        "min_p": IN_FRONT,
        "seed": _within(INT64),  # the answers of one request have the seeds from its own upwards
        "stop": _stops,
        "stop_token_ids": _stop_tokens,
        "ignore_eos": A_SWITCH,
        "max_tokens": _count,
        "min_tokens": _min_tokens,
        "logprobs": IN_FRONT,
        "prompt_logprobs": IN_FRONT,
        "prompt_logprob_token_ids": IN_FRONT,
        "prompt_logprob_start": IN_FRONT,
        "logprob_token_ids": IN_FRONT,
        "flat_logprobs": A_SWITCH,
        "detokenize": A_SWITCH,
        "skip_special_tokens": A_SWITCH,
        "spaces_between_special_tokens": A_SWITCH,
        "include_stop_str_in_output": A_SWITCH,
        "output_kind": INTERNAL,
        "stream_interval": FRONT_ONLY,
        "skip_clone": INTERNAL,
        "output_text_buffer_length": INTERNAL,
        "_eos_token_id": INTERNAL,
        "_all_stop_token_ids": "checked with stop_token_ids",
        "_watermarking_skipped": INTERNAL,
        "structured_outputs": "its fields are below",
        "logit_bias": _logit_bias,
        "allowed_token_ids": _at_most(MAX_ALLOWED_TOKENS, "tokens"),
        "extra_args": "its keys are below, its size is limited",
        "bad_words": _bad_words,
        "_bad_words_token_ids": "checked with bad_words",
        "skip_reading_prefix_cache": A_SWITCH,
        "thinking_token_budget": IN_FRONT,
        "repetition_detection": _repetition,
        "routed_experts_prompt_start": IN_FRONT,
        "trace_decode_token_ids": IN_FRONT,
    },
    "extra_args": {
        "kv_cache_report_mode": "one word; others count as not given",
        "kv_transfer_params": _only(None, _FLEETS_OWN),
        "ec_transfer_params": _only(None, _FLEETS_OWN),
    },
    "StructuredOutputsParams": {
        "json": GRAMMAR,
        "regex": GRAMMAR,
        "choice": GRAMMAR,
        "grammar": GRAMMAR,
        "json_object": A_SWITCH,
        "disable_any_whitespace": A_SWITCH,
        "disable_additional_properties": A_SWITCH,
        "whitespace_pattern": GRAMMAR,
        "structural_tag": GRAMMAR,
        "_backend": INTERNAL,
        "_backend_was_auto": INTERNAL,
    },
    "PoolingParams": {
        "use_activation": A_SWITCH,
        "dimensions": IN_FRONT,
        "step_tag_id": INTERNAL,
        "returned_token_ids": INTERNAL,
        "task": INTERNAL,
        "requires_token_ids": INTERNAL,
        "skip_reading_prefix_cache": A_SWITCH,
        # A worker keeps a query for the documents that follow; in a fleet, they may come to another engine, whose worker raises.
        "late_interaction_params": _only(None, "needs query and documents in one engine; leave it out"),
        "extra_kwargs": _extra_args,
        "output_kind": INTERNAL,
        "late_chunking_params": "from vLLM 0.33 on; vLLM checks its one number",
    },
    "EngineCoreRequest": {
        "request_id": "the protocol of links limits it",
        "prompt_token_ids": SIZED,
        "mm_features": SIZED,
        "sampling_params": "its fields are above",
        "pooling_params": "its fields are above",
        "arrival_time": INTERNAL,
        "lora_request": "the configuration names all adapters",
        "cache_salt": _at_most(MAX_TEXT_CHARS, "characters"),
        "data_parallel_rank": _only(0, _FLEETS_OWN),
        "prompt_embeds": SIZED,
        "prompt_is_token_ids": SIZED,
        "client_index": INTERNAL,
        "current_wave": INTERNAL,
        "priority": _within(INT64),
        "trace_headers": "heads of HTTP requests are limited",
        "resumable": _only(False, _FLEETS_OWN),
        "external_req_id": "the protocol of links limits it",
        "reasoning_ended": A_SWITCH,
        "reasoning_parser_kwargs": "bodies are limited in their chat_template_kwargs",
        "abort_immediately": _only(False, _FLEETS_OWN),
        "session_id": _at_most(MAX_TEXT_CHARS, "characters"),
        "kv_hints": _only(None, _FLEETS_OWN),
    },
}
"""Struct of vLLM -> field -> its check, or why it needs none. For `extra_args`: the keys that vLLM reads. A falsy value is not checked."""

_CHECKS = {struct: [(name, rule) for name, rule in rows.items() if not isinstance(rule, str)] for struct, rows in LIMITS.items()}


def problem_of(request: Any, vocab_size: int) -> tuple[str, str] | None:
    """Return the first field of vLLM's ``EngineCoreRequest`` that no engine should get, and what is wrong with it; None for none.

    ``vocab_size`` is the model's. A tokenizer may have more tokens, which a GPU worker would write behind its row of logits.
    """
    words = request.sampling_params and request.sampling_params.bad_words_token_ids
    if words and max(map(max, words)) >= vocab_size:
        return "bad_words", f"has a token beyond the model's vocabulary of {vocab_size}"
    found = _first_problem("EngineCoreRequest", request)
    return found or problem_of_params(request.sampling_params or request.pooling_params)


def problem_of_params(params: Any) -> tuple[str, str] | None:
    """Return the same for vLLM's ``SamplingParams`` or ``PoolingParams``."""
    extra = getattr(params, "extra_args", None)
    if extra:
        for name, check in _CHECKS["extra_args"]:
            if (value := extra.get(name)) and (problem := check(value, extra)) is not None:
                return name, problem
        if (problem := _extra_args(extra, params)) is not None:
            return "vllm_xargs", problem
    return _first_problem("SamplingParams" if hasattr(params, "max_tokens") else "PoolingParams", params)


def problem_of_size(params: Any, max_tokens: int, prompt_tokens: int, before: int, vocab_size: int) -> tuple[str, str] | int:
    """Return what would make the answer too large for the event loop; else the log probabilities of the HTTP request so far.

    Args:
        params: vLLM's ``SamplingParams`` for one prompt.
        max_tokens: Most tokens of one answer, by the request and its tenant; 0 for no bound.
        before: The log probabilities of the HTTP request's earlier prompts.
    """
    if (num := params.n * prompt_tokens) > MAX_CHOICE_TOKENS:
        return "n", f"times the prompt's {prompt_tokens} tokens is {num}, limit {MAX_CHOICE_TOKENS}"

    def per_token(asked: int | None) -> int:
        return 0 if asked is None else 1 + (vocab_size if asked < 0 else asked)

    if (num := prompt_tokens * per_token(params.prompt_logprobs)) > MAX_PROMPT_LOGPROBS:
        return "prompt_logprobs", f"asks for {num} log probabilities of a prompt, limit {MAX_PROMPT_LOGPROBS}"
    num += before + params.n * max_tokens * per_token(params.logprobs)
    if (params.n > 1 or before) and num > MAX_LOGPROBS:
        return "logprobs", f"asks for up to {num} log probabilities, limit {MAX_LOGPROBS}; lower max_tokens or divide the request"
    return num


def _first_problem(struct: str, values: Any) -> tuple[str, str] | None:
    for name, check in _CHECKS[struct]:
        if (value := getattr(values, name)) and (problem := check(value, values)) is not None:
            return name, problem
    return None
