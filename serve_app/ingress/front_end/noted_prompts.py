"""The prompts of an HTTP request are noted in its exchange before its first engine request, so that quotas judge the request as a whole,
and the books know how many beam searches it is.

vLLM's routes make one generation for each prompt of a list, and start the first of them only then. At that moment prompts are tokenized,
and the values of the body have vLLM's types: the text "20" is the number 20.
"""

from typing import Any

from serve_app.core.quotas import Prompt
from serve_app.errors import BadRequest
from serve_app.ingress.exchange.held_answer import current_exchange

_BEAM_SEARCHES = ("openai_serving_chat", "openai_serving_completion")
"""The parts of the state of vLLM's app that search by beams."""


def note_prompts(engine: Any) -> None:
    """Let each generation and each encoding of vLLM's ``engine`` be noted when it is made."""
    generate, encode, longest = engine.generate, engine.encode, engine.model_config.max_model_len

    def noting_generate(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if (exchange := current_exchange()) is not None and not exchange.is_beam_search:  # a step of a noted search is no prompt
            _note(prompt, sampling_params.n, sampling_params.max_tokens, longest)
        return generate(prompt, sampling_params, *args, **kwargs)

    def noting_encode(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        _note(prompt, 0, 0, longest)
        return encode(prompt, *args, **kwargs)

    engine.generate, engine.encode = noting_generate, noting_encode


def note_beam_searches(state: Any, max_model_len: int) -> None:
    """Let each beam search of vLLM's app, of which this is the state, be noted when it is made."""
    for serving in (getattr(state, name, None) for name in _BEAM_SEARCHES):
        if serving is not None:
            serving.beam_search = _noting(serving.beam_search, max_model_len)


def note_beam_search(prompt: Any, width: int, max_tokens: int, max_model_len: int) -> None:
    """Note one beam search of the current HTTP request, whose engine requests are its steps."""
    _note(prompt, width, max_tokens, max_model_len, is_beam_search=True)


def _noting(search: Any, max_model_len: int) -> Any:
    def beam_search(prompt: Any, *args: Any, params: Any, **kwargs: Any) -> Any:
        note_beam_search(prompt, params.beam_width, params.max_tokens, max_model_len)
        return search(prompt, *args, params=params, **kwargs)

    return beam_search


def _note(prompt: Any, answers: int, max_tokens: int | None, max_model_len: int, *, is_beam_search: bool = False) -> None:
    """Note a prompt, if the request has a tenant. Beam searches are always noted, because the ledger counts their prompts by them."""
    if (exchange := current_exchange()) is None or (exchange.caller is None and not is_beam_search):
        return
    tokens = len(_token_ids(prompt))
    most = max(1, max_model_len - tokens if max_tokens is None else min(max_tokens, max_model_len - tokens))
    try:
        if exchange.caller is not None:
            most = exchange.caller.tenant.max_output_tokens(tokens, most) or most
    except BadRequest:  # its engine request gets this error
        most = 1
    exchange.prompts.append(Prompt(tokens, answers, most, is_beam_search))


def _token_ids(prompt: Any) -> Any:
    """Return the tokens of vLLM's prompt that its engine request will have; of a model with an encoder, those of the decoder."""
    if not isinstance(prompt, dict):
        return ()
    return prompt.get("decoder_prompt", prompt).get("prompt_token_ids") or ()
