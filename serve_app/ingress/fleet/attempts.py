"""An attempt is a copy of the front end's request with the work that is left for one engine; its outputs are taken in here, too.

The functions work on vLLM's structs and do no IO. They never change the front end's own request: ``RequestState`` and the children of
n>1 share its lists and its ``SamplingParams``.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from vllm.v1.engine import FinishReason

from serve_app.core.instructions import DeliverOutputs, StartAttempt
from serve_app.errors import BadRequest, NotSupported, RequestTooLarge, SendFailed, ServingError
from serve_app.ingress.fleet.intake import Way, names
from serve_app.links.protocol.connection import IngressConnection
from serve_app.links.protocol.errors import FrameTooLarge, MalformedMessage
from serve_app.links.protocol.messages import MAX_KV_BYTES, REFUSED
from serve_app.vllm_versions import may_send_media


def check_media(request: Any, architecture: str, connection: IngressConnection) -> None:
    """Refuse media of which the ingress would make other tensors than the engine's model reads.

    Such an engine would end, and then the next one, or answer wrongly (ADR 56).

    Args:
        architecture: The model's, by vLLM's name.
        connection: An open link to the engine.

    Raises:
        NotSupported: The request has media, and its model's are not among those that both versions of vLLM process alike.
    """
    assert connection.peer is not None
    ours, theirs = connection.vllm_version, connection.peer.vllm_version
    if request.mm_features and not may_send_media(architecture, ours, theirs):
        raise NotSupported(
            f"media (images, sound, video) for {architecture}",
            f"the ingress has vLLM {ours}, the engine {theirs}, and they may process media of this architecture differently: "
            "ask the operator to run the CUDA image in all pods",
        )


def attempt_request(request: Any, start: StartAttempt) -> Any:
    """Return a copy of ``request`` for one attempt, with the id of the attempt and, after emitted tokens, only the rest of the work."""
    attempt = copy.copy(request)
    attempt.request_id = start.attempt_id
    attempt.client_index = 0
    if not start.emitted or attempt.sampling_params is None:
        return attempt
    params = attempt.sampling_params = copy.copy(request.sampling_params)
    for name in names("SamplingParams", Way.ONCE):
        setattr(params, name, None)
    if start.continue_from:
        count = len(start.continue_from)
        attempt.prompt_token_ids = [*request.prompt_token_ids, *start.continue_from]
        params.max_tokens = request.sampling_params.max_tokens - count
        params.min_tokens = max(0, request.sampling_params.min_tokens - count)
    return attempt


def kv_of(start: StartAttempt) -> bytes:
    """Return where the KV of an attempt lies, as it goes over the link; b"" if it lies nowhere, or that cannot be sent."""
    if start.kv is None:
        return b""
    try:
        kv = msgspec.msgpack.encode(start.kv)
    except (TypeError, ValueError, OverflowError):
        return b""
    return kv if len(kv) <= MAX_KV_BYTES else b""


def drop_what_belongs_to_swallowed(deliver: DeliverOutputs) -> None:
    """Drop the log probabilities and sampling masks of tokens that the fleet dropped because a replay had computed them again."""
    for index, count in deliver.swallowed:
        output: Any = deliver.outputs[index]
        num_left = len(output.new_token_ids)
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(count, num_left)
        if output.new_sampling_mask is not None:
            output.new_sampling_mask = output.new_sampling_mask.slice_request(count, num_left)


def refused_by_engines(outputs: Iterable[Any], requests: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, BadRequest]:
    """Return by id the requests that ended because of a value of the client: vLLM's front end would answer 500.

    A replica names the value in the stop reason (``replica/engine_io.py``). vLLM itself gives no reason when an engine cannot compile the
    grammar of an answer, and ends the request before its first token. Other failures come from the replica, for example for an output too
    large for a frame: the client cannot mend these.

    Args:
        requests: The requests that the engines got, by id.
        states: The states of requests in vLLM's output processor, by id.
    """
    refused = {}
    for output in outputs:
        if output.finish_reason != FinishReason.ERROR:
            continue
        if isinstance(reason := output.stop_reason, str) and reason.startswith(REFUSED):
            param, _, problem = reason.removeprefix(REFUSED).partition(": ")
            refused[output.request_id] = BadRequest(param, problem)
        elif reason is None and _waits_for_grammar(requests[output.request_id], states.get(output.request_id)):
            problem = "the engine cannot compile the grammar of the answer; simplify it, or leave out rare keywords of a schema"
            refused[output.request_id] = BadRequest("structured_outputs", problem)
    return refused


def _waits_for_grammar(request: Any, state: Any) -> bool:
    params = request.sampling_params
    return params is not None and params.structured_outputs is not None and state is not None and state.is_prefilling


def why_unsendable(request: Any, exc: Exception, encode: Callable[[Any], object]) -> ServingError:
    """Return the error for a request that could not be encoded or sent; ``exc`` is the exception that this raised.

    vLLM's validation accepts values that its own ``encode`` refuses: lone surrogates, integers beyond 64 bits.
    """
    match exc:
        case FrameTooLarge():
            return RequestTooLarge(size_bytes=exc.size_bytes, limit_bytes=exc.limit_bytes)
        case MalformedMessage():
            return BadRequest(param="request", problem=exc.problem)
        case NotSupported():
            return exc
        case ServingError():
            return SendFailed(request=request.request_id, cause=str(exc))
    for name, value in _parameters(request):
        try:
            encode(value)
        except Exception as refusal:  # its kind depends on the value: UnicodeEncodeError, OverflowError, TypeError, ...
            return BadRequest(param=name, problem=f"cannot be encoded for the engine: {refusal}")
    if isinstance(exc, RecursionError):
        return BadRequest(param="request", problem="has values that are nested too deeply")
    return SendFailed(request=request.request_id, cause=f"{type(exc).__name__}: {exc}")


def _parameters(request: Any) -> list[tuple[str, Any]]:
    """Return the values that a client has set, by the names of their fields. The header X-Vllm-Priority sets `priority`."""
    params = request.sampling_params or request.pooling_params
    values = {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}
    xargs = values.pop("extra_args", None)
    structured = values.pop("structured_outputs", None)
    return [
        *values.items(),
        ("vllm_xargs", xargs),
        ("response_format", structured),
        ("cache_salt", request.cache_salt),
        ("priority", request.priority),
        ("session_id", request.session_id),
        ("chat_template_kwargs", request.reasoning_parser_kwargs),
    ]


def take_in(frame: Any, connection: IngressConnection, now: float) -> bool:
    """Change vLLM's ``EngineCoreOutputs`` as if they came from an engine on this machine, and finish ended attempts on the link.

    Times are converted to this machine's clock, because vLLM subtracts them from times of the ingress, and monotonic times of another
    machine mean nothing here. ``engine_index`` becomes 0, the only engine for which vLLM's loggers have series here: to them the fleet is
    one engine.

    Returns:
        Whether some attempt has finished.
    """
    some_finished = False
    for output in frame.outputs:
        if output.finish_reason is not None:
            some_finished = True
            connection.attempt_finished(output.request_id)
        for event in output.events or ():
            event.timestamp += now - frame.timestamp
    frame.timestamp, frame.engine_index = now, 0
    return some_finished
