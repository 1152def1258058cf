"""`rules_of` and `refuse_as_workers` read vLLM's ``SamplingParams`` for the simulated executor: what it obeys, and what it refuses."""

from typing import Any

from vllm import envs
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_ALLOWED_TOKEN_IDS, MAX_NUM_LOGIT_BIAS_TOKENS, MAX_NUM_STOP_TOKEN_IDS

from serve_app.simulated.sequences import SamplingRules
from serve_app.simulated.tokens import NO_EOS, salt_of


def refuse_as_workers(sampling: Any) -> None:
    """Raise where a worker of vLLM's V2 runner raises. Like there, that ends the engine, so that a test of the whole fleet shows it.

    Raises:
        ValueError: A list is longer than the worker's row for it.
    """
    stops = sampling.all_stop_token_ids if sampling.min_tokens else ()
    lengths = {
        "allowed_token_ids": (sampling.allowed_token_ids or (), MAX_NUM_ALLOWED_TOKEN_IDS),
        "logit_bias": (sampling.logit_bias or (), MAX_NUM_LOGIT_BIAS_TOKENS),
        "stop_token_ids": (stops, MAX_NUM_STOP_TOKEN_IDS),
        "bad_words": (
            [token for word in sampling.bad_words_token_ids or () for token in word],
            envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        ),
    }
    for name, (values, limit) in lengths.items():
        if len(values) > limit:
            raise ValueError(f"a worker has room for {limit} entries of {name}, not for {len(values)}")


def rules_of(sampling: Any) -> SamplingRules:
    """Return the part of vLLM's ``SamplingParams`` that the simulation obeys."""
    eos = sampling.eos_token_id
    seeded = sampling.seed is not None and sampling.temperature > 0
    return SamplingRules(
        eos_token_id=NO_EOS if eos is None or sampling.ignore_eos else eos,
        salt=salt_of(sampling.seed) if seeded else 0,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.all_stop_token_ids),
        allowed_token_ids=tuple(sorted(sampling.allowed_token_ids or ())),
        num_logprobs=sampling.num_logprobs,
    )
