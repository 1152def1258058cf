"""From vLLM's engine request to what ``FleetState`` decides by. Pure."""

from typing import Any

from serve_app.config import ModelSettings
from serve_app.core.events import RequestArrived
from serve_app.core.prefix_index import NO_PREFIX
from serve_app.ingress.attempts import fingerprint_of, max_output_tokens
from serve_app.ingress.prefixes import prefix_of
from serve_app.ingress.resume import resume_of


def arrival_of(request: Any, model: ModelSettings, vllm_config: Any, *, background: bool) -> RequestArrived:
    """Return the event of an ``EngineCoreRequest`` for ``model``. ``background``: it is a line of a batch."""
    prompt_tokens = len(request.prompt_token_ids or ())
    return RequestArrived(
        request.request_id,
        prompt_tokens=prompt_tokens,
        max_tokens=max_output_tokens(request.sampling_params, prompt_tokens, vllm_config.model_config.max_model_len),
        resume=resume_of(request, replays_seeded=model.device == "cpu" and model.simulated is None),
        fingerprint=fingerprint_of(request, model.name),
        prefix=prefix_of(request, vllm_config.cache_config) if model.routing.by == "prefix" else NO_PREFIX,
        background=background,
        adapter=None if request.lora_request is None else request.lora_request.lora_int_id,
    )
