"""This module parses and writes the static server's part of OpenAI's completions API: a prompt in, a greedy answer out. Sans-IO."""

from typing import Any

import msgspec

from serve_app.errors import BadRequest, ModelNotFound


class StreamOptions(msgspec.Struct, frozen=True):
    """vLLM's options of a stream; with the whole answer in one chunk, both mean nearly the same."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StaticRequest(msgspec.Struct, frozen=True):
    """The body of POST /v1/completions. Other fields are ignored."""

    prompt: str | list[int | str | list[int]]
    model: str = ""
    max_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None


class StaticAnswer(msgspec.Struct, frozen=True):
    """The answer to one request."""

    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    """Reason of the end. ``stop``: end of sequence; ``length``: max_tokens."""


_ASK: msgspec.json.Decoder[StaticRequest] = msgspec.json.Decoder(StaticRequest)


def parse_ask(body: bytes, *, served: str) -> StaticRequest:
    """Parse and check a body.

    Raises:
        BadRequest: The body is no JSON, a field has the wrong type, or a field asks for more than one greedy answer.
        ModelNotFound: The body names another model.
    """
    try:
        ask = _ASK.decode(body)
    except msgspec.DecodeError as exc:
        raise BadRequest(param="body", problem=str(exc)) from exc
    if ask.model not in ("", served):
        raise ModelNotFound(model=ask.model, served=(served,))
    if ask.temperature:
        raise BadRequest(param="temperature", problem=f"is {ask.temperature:g}: answers are greedy, give 0 or leave it out")
    if ask.max_tokens is not None and ask.max_tokens < 1:
        raise BadRequest(param="max_tokens", problem=f"is {ask.max_tokens}, must be at least 1")
    return ask


def single_prompt(ask: StaticRequest) -> str | list[int]:
    """Return the only prompt of a request.

    Raises:
        BadRequest: There is no prompt, or there are several.
    """
    prompt = ask.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise BadRequest(param="prompt", problem=f"has {len(prompt)} prompts: give one, batches are formed here")
        prompt = prompt[0]  # type: ignore[assignment]  # a text or ids, which are checked below like a single prompt
    if not prompt:
        raise BadRequest(param="prompt", problem="is empty")
    if isinstance(prompt, str):
        return prompt
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) < len(prompt):
        raise BadRequest(param="prompt", problem="mixes token ids with something else")
    return ids


def body_of(answer: StaticAnswer, *, request_id: str, model: str, created: int) -> bytes:
    """Return the whole answer as JSON."""
    return msgspec.json.encode({**_event(answer, request_id, model, created), "usage": _usage(answer)})


def stream_of(answer: StaticAnswer, options: StreamOptions | None, *, request_id: str, model: str, created: int) -> bytes:
    """Return the answer as server-sent events: one event with the whole answer, which exists only when the batch ends."""
    options = options or StreamOptions()
    event = _event(answer, request_id, model, created)
    if options.continuous_usage_stats:
        event["usage"] = _usage(answer)
    events = [event]
    if options.include_usage:
        events.append({**event, "choices": [], "usage": _usage(answer)})
    return b"".join(b"data: " + msgspec.json.encode(e) + b"\n\n" for e in events) + b"data: [DONE]\n\n"


def _event(answer: StaticAnswer, request_id: str, model: str, created: int) -> dict[str, Any]:
    choice = {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}
    return {"id": request_id, "object": "text_completion", "created": created, "model": model, "choices": [choice]}


def _usage(answer: StaticAnswer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.output_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.output_tokens, "total_tokens": total}
