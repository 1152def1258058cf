"""A replica makes some requests of its own: the probe, golden prompts, and the batches by which it measures its engine core."""

import time

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def own_request(request_id: str, token_ids: list[int], params: SamplingParams, slot: int) -> EngineCoreRequest:
    """Return a request whose outputs come back for ``slot``, which is not the slot of a link."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=slot,
    )
