"""A model's LoRA adapters as its front end needs them: by the names that requests give, and which requests they make impossible."""

from typing import Any

from vllm.lora.request import LoRARequest

from serve_app.config import ModelSettings
from serve_app.errors import BadRequest


def adapters_of(model: ModelSettings) -> dict[str, LoRARequest]:
    """Return by name what engine requests for an adapter carry. Engines know it by its number, so all ingresses must give it the same."""
    return {
        name: LoRARequest(name, adapter.number(name), str(adapter.path), base_model_name=model.name)
        for name, adapter in model.adapters.items()
    }


def refusal_of(request: Any, model: ModelSettings) -> BadRequest | None:
    """Return why an engine with adapters cannot be given vLLM's ``EngineCoreRequest``; None if it can.

    vLLM 0.32 looks up log probabilities of a prompt by token, and the adapters for them by request. With several requests in a batch
    the numbers differ and the engine ends, also where the request has no adapter.
    """
    params = request.sampling_params
    if model.adapters and params is not None and params.prompt_logprobs is not None:
        return BadRequest("prompt_logprobs", "a model with LoRA adapters has none of its prompts; nor has echo with logprobs")
    return None
