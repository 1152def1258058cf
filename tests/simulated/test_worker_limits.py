"""A simulated accelerator refuses what vLLM's GPU workers refuse, and takes what passes the limits of requests."""

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from serve_app.core.request_limits import problem_of_params
from serve_app.simulated.sampling import refuse_as_workers


@pytest.mark.parametrize(
    ("name", "largest", "beyond"),
    [
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1024), 1.0)}, {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("allowed_token_ids", {"allowed_token_ids": [*range(1024)]}, {"allowed_token_ids": [*range(1025)]}),
        (
            "stop_token_ids",
            {"min_tokens": 1, "stop_token_ids": [*range(128)]},
            {"min_tokens": 1, "stop_token_ids": [*range(129)]},
        ),
    ],
)
def test_it_refuses_what_gpu_workers_refuse(name: str, largest: dict[str, Any], beyond: dict[str, Any]) -> None:
    fine, refused = SamplingParams(**largest), SamplingParams(**beyond)
    assert problem_of_params(fine) is None
    refuse_as_workers(fine)
    with pytest.raises(ValueError, match=name):
        refuse_as_workers(refused)


def test_it_refuses_too_many_tokens_of_bad_words() -> None:
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [[5] * 1024]
    refuse_as_workers(params)
    params._bad_words_token_ids = [[5] * 1025]
    with pytest.raises(ValueError, match="bad_words"):
        refuse_as_workers(params)
