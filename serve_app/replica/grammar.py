"""This module restores the grammar of a request that continues in this engine to the state that it had in the lost engine.

vLLM masks the first new token by a fresh grammar, which would begin the answer again in the middle of it. So the grammar first accepts
the emitted tokens here, through vLLM's own manager and one by one, as in the engine that made them. A reasoning parser, too, then finds
the end of the reasoning at the same token, and a backend needs no function but accepting tokens.
"""

from concurrent.futures import Future
from typing import Any

from vllm.v1.request import Request


class EmittedRejected(ValueError):
    """The grammar does not accept the emitted tokens: it differs from the grammar of the lost engine."""


def accept_emitted(manager: Any, request: Any, num_emitted: int) -> None:
    """Make the request's grammar ready only after it has accepted the last ``num_emitted`` ids of the prompt.

    vLLM compiles in threads of its manager and schedules the request when the grammar is ready; an exception ends only this request.
    """
    structured = request.structured_output_request
    if structured is None:
        return
    compiled: Future[Any] = structured._grammar
    before = Request(
        request.request_id,
        request.prompt_token_ids[:-num_emitted],
        request.sampling_params,
        None,
        reasoning_ended=structured.reasoning_ended,
        reasoning_parser_kwargs=structured.reasoning_parser_kwargs,
    )
    # Queued after the compilation in the same threads, so that it never holds a thread while the compilation still waits for one.
    structured.grammar = manager.executor.submit(
        _accept, manager, compiled, before, request, request.prompt_token_ids[-num_emitted:]
    )


def _accept(manager: Any, compiled: Future[Any], before: Request, request: Any, emitted: list[int]) -> Any:
    """Return the grammar after ``emitted``. ``before``: the request as it was before the first token."""
    grammar = before.structured_output_request.grammar = compiled.result()
    for position, token_id in enumerate(emitted):
        before.append_output_token_ids(token_id)
        if not manager.accept_tokens(before, [token_id]):
            raise EmittedRejected(f"token {token_id} at position {position} of {len(emitted)}")
    request.structured_output_request.reasoning_ended = before.structured_output_request.reasoning_ended
    return grammar
