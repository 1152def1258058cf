"""The limits of requests know every field of vLLM's structs, and every statement of vLLM by which a worker refuses a request."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import envs
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.worker.gpu.sample import logit_bias
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

from serve_app.core import request_limits as limits
from serve_app.core.request_limits import LIMITS, problem_of_params
from tests.contracts.changes import difference, fail_with, line
from tests.contracts.raises import REACHED, counts, recorded
from tests.contracts.tables import lacking

DOCS = Path(__file__).parents[2] / "docs" / "differences.md"


def test_each_field_of_vllms_structs_has_a_limit_or_the_reason_why_it_needs_none() -> None:
    fields = {
        "SamplingParams": [f.name for f in msgspec.structs.fields(SamplingParams)],
        "StructuredOutputsParams": [f.name for f in dataclasses.fields(StructuredOutputsParams)],
        "PoolingParams": [f.name for f in msgspec.structs.fields(PoolingParams)],
        "EngineCoreRequest": [f.name for f in msgspec.structs.fields(EngineCoreRequest)],
    }
    look = "; read what the engine does with it, then give it a row in serve_app/core/request_limits.py"
    changes = []
    for struct, now in fields.items():
        change = difference(sorted(LIMITS[struct].keys() - lacking(struct)), sorted(now))
        changes.append(line(struct, f"{change}{look}" if change else ""))
    fail_with(changes)


def test_every_statement_that_may_end_an_engine_was_read() -> None:
    now, was = counts(), recorded()
    fail_with(
        f"{name}: {was[name]} raise and assert statements were read, {now[name]} are there; read tests/contracts/raises.py"
        for name in sorted(now.keys() | was.keys())
        if now[name] != was[name]
    )


def test_every_function_that_requests_reach_is_there() -> None:
    assert REACHED.keys() - recorded().keys() == set()


def test_the_limits_are_those_of_vllms_workers() -> None:
    assert limits.MAX_LOGIT_BIAS == logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    assert limits.MAX_ALLOWED_TOKENS == logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    assert limits.MAX_MIN_TOKENS_STOPS == logit_bias.MAX_NUM_STOP_TOKEN_IDS
    assert (limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_TOKENS) == (
        envs.VLLM_MAX_NUM_BAD_WORDS,
        envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    )
    assert MAX_LOGPROB_TOKEN_IDS == 128, "vLLM's front end and worker have one constant"


class Row:
    """Takes the values that a worker's state class writes, in place of a buffer on the GPU."""

    def __init__(self) -> None:
        self.np = np.zeros(4, dtype=np.int32)

    def stage_write(self, *_: Any) -> None: ...


def worker_refuses(params: SamplingParams) -> bool:
    """Return whether a state class of vLLM's V2 runner raises for the parameters. Its worker does not catch that: the engine ends."""
    state: Any = SimpleNamespace(
        prompt_len_np=np.zeros(4, dtype=np.int32), use_logit_bias=np.zeros(4, dtype=bool), **{name: Row() for name in _ROWS}
    )
    try:
        LogitBiasState.add_request(state, 0, params)
        BadWordsState.add_request(state, 0, params)
    except (ValueError, OverflowError):
        return True
    return False


_ROWS = (
    *("num_allowed_token_ids", "allowed_token_ids", "num_logit_bias", "logit_bias_token_ids", "logit_bias", "min_lens"),
    *(
        "num_stop_token_ids",
        "restore_when_all_masked",
        "stop_token_ids",
        "bad_word_token_ids",
        "bad_word_offsets",
        "num_bad_words",
    ),
)


def bad_words(num_tokens: int) -> SamplingParams:
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [[5] * num_tokens]
    return params


@pytest.mark.parametrize(
    ("largest", "beyond"),
    [
        (SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)), SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))),
        (SamplingParams(allowed_token_ids=[*range(1024)]), SamplingParams(allowed_token_ids=[*range(1025)])),
        (
            SamplingParams(min_tokens=1, stop_token_ids=[*range(128)]),
            SamplingParams(min_tokens=1, stop_token_ids=[*range(129)]),
        ),
        (bad_words(1024), bad_words(1025)),
        (
            SamplingParams(max_tokens=2**30 - 1, min_tokens=2**30 - 1),
            SamplingParams(max_tokens=2**31, min_tokens=2**31),
        ),
    ],
    ids=["logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words", "min_tokens"],
)
def test_a_worker_takes_what_passes_the_limits_and_ends_by_what_they_refuse(
    largest: SamplingParams, beyond: SamplingParams
) -> None:
    assert (problem_of_params(largest), worker_refuses(largest)) == (None, False)
    assert problem_of_params(beyond) is not None
    assert worker_refuses(beyond), "vLLM has mended it: the limit may go"


def test_the_documentation_lists_each_limited_parameter() -> None:
    row = next(row for row in DOCS.read_text().splitlines() if row.startswith("| `engine-limits` |"))
    named = set(re.findall(r"`(\w+)`", row))
    checked = {name for struct in LIMITS for name, rule in LIMITS[struct].items() if not isinstance(rule, str)}
    of_servers = {"resumable", "abort_immediately", "kv_hints", "late_interaction_params", "extra_kwargs"}
    assert checked - named - of_servers == set()
