"""`POST /generate` is the route of vLLM's first server, which many clients still use; it includes beam search.

Kept from `vllm/entrypoints/api_server.py` of 2023: the fields next to `prompt` are sampling parameters, `text` in the answer holds one
string per sequence and begins with the prompt, and a stream repeats the text so far. Differs: the values of a stream end with a newline
(in 2023 with NUL, as with `ingress.generate_delimiter: nul`), errors have the body of vLLM's `/v1` routes, and `best_of` is only the width
of a beam search. The app has used `model` to select the front end; here it selects the adapter, if it names one.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.inputs import TextPrompt, TokensPrompt, tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid

from serve_app.errors import NotSupported
from serve_app.ingress.front_end.noted_prompts import note_beam_search
from serve_app.ingress.http.error_answers import describe_error
from serve_app.ingress.routes.beam_search import BeamSearch
from serve_app.ingress.routes.generate_body import GenerateRequest, parse_body

logger = logging.getLogger(__name__)

NEWLINE, NUL = b"\n", b"\0"
"""The possible ends of a value in a stream. JSON as it is written here contains neither of them."""
MEDIA_TYPES = {NEWLINE: b"application/x-ndjson", NUL: b"application/x-nul-json"}


def generate_route(
    engine_client: EngineClient, *, max_logprobs: int, end: bytes = NEWLINE, adapters: Mapping[str, LoRARequest] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of `POST /generate` for one model.

    Args:
        engine_client: vLLM's AsyncLLM of the model.
        max_logprobs: The engine's limit of this name, which limits the width of a beam search; -1 for the size of the vocabulary.
        end: `NEWLINE` or `NUL`, which follows each value of a stream.
        adapters: The model's LoRA adapters by the names that requests give. Default: it has none.
    """
    max_width = (max_logprobs if max_logprobs >= 0 else engine_client.model_config.get_vocab_size()) // 2

    async def generate(request: Request) -> Response:
        try:
            body = parse_body(await request.body(), max_width=max_width)
        except Exception as exc:
            return describe_error(exc).response()
        request_id = f"generate-{request.headers.get('x-request-id', '')}-{random_uuid():.8}"
        lora = (adapters or {}).get(body.model or "")
        return GenerateResponse(_texts(engine_client, body, request_id, lora), stream=body.stream, end=end)

    return generate


class GenerateResponse(Response):
    """The response of one generation: a stream of its values, each followed by ``end``, or only the last value.

    The head of a stream is sent first, as on vLLM's routes. A refusal before the first line sends a second head, and `HeldAnswer` passes
    on only one of the two. A client that disconnects cancels the generation.
    """

    def __init__(self, results: AsyncGenerator[list[str], None], *, stream: bool, end: bytes) -> None:
        super().__init__()
        self._results = results
        self._stream = stream
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # No StreamingResponse: it notices a disconnect only after the status line, and leaves closing the generator to the garbage
        # collector.
        try:
            async with asyncio.TaskGroup() as tasks:
                answer = tasks.create_task(self._send_all(scope, receive, send), name="generate")
                watch = tasks.create_task(_cancel_at_disconnect(receive, answer), name="generate-disconnect")
                answer.add_done_callback(lambda _: watch.cancel())
        except* OSError as group:
            logger.debug("the client went away: %s", group.exceptions)  # ASGI 2.4: what send() raises then

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            headers = [(b"content-type", MEDIA_TYPES[self._end])]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        texts: list[str] = []
        try:
            async with aclosing(self._results) as results:
                async for texts in results:
                    if self._stream:
                        await send({"type": "http.response.body", "body": _json({"text": texts}) + self._end, "more_body": True})
        except OSError:
            raise
        except Exception as exc:
            answer = describe_error(exc)
            if not self._stream or not texts:
                response = Response(_json(answer.body) + NEWLINE, answer.status, answer.headers, media_type="application/json")
                await response(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": _json(answer.body) + self._end, "more_body": True})
        if self._stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await Response(json.dumps({"text": texts}), media_type="application/json")(scope, receive, send)


async def _cancel_at_disconnect(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _texts(
    engine: EngineClient, body: GenerateRequest, request_id: str, lora: LoRARequest | None
) -> AsyncGenerator[list[str], None]:
    """Yield prompt + text so far for each of the ``n`` sequences."""
    engine.check_admission(body.width if body.use_beam_search else body.n, request_id)
    prompt = await _render(engine, body)
    prefix = prompt["prompt"]
    generate = _beam_search if body.use_beam_search else _sample
    async with aclosing(generate(engine, prompt, body, request_id, lora)) as answers:
        async for texts in answers:
            yield [prefix + text for text in texts]


async def _render(engine: EngineClient, body: GenerateRequest) -> Any:
    """Return the engine's form of the prompt: its token ids and its text, which for token ids is their decoding."""
    if isinstance(body.prompt, str):
        parsed = TextPrompt(prompt=body.prompt)
    else:
        engine.renderer.validate_token_ids(body.prompt, parameter="prompt")
        parsed = TokensPrompt(prompt_token_ids=body.prompt)
    tokenizing = engine.renderer.default_cmpl_tok_params.with_kwargs(needs_detokenization=True)
    (prompt,) = await engine.renderer.render_cmpl_async([parsed], tokenizing)
    if prompt["type"] != "token":
        raise NotSupported("/generate for an encoder-decoder model", "use one of the /v1 routes")
    return prompt


def _room(engine: EngineClient, prompt: Any) -> int:
    """Return how many tokens fit after the prompt, at least 1: if none fits, the engine refuses the prompt by its own error."""
    return max(int(engine.model_config.max_model_len) - len(prompt["prompt_token_ids"]), 1)


async def _sample(
    engine: EngineClient, prompt: Any, body: GenerateRequest, request_id: str, lora: LoRARequest | None
) -> AsyncGenerator[list[str], None]:
    kind = RequestOutputKind.CUMULATIVE if body.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**body.sampling(), output_kind=kind)
    texts = [""] * params.n
    if params.max_tokens is not None:  # as on the /v1 routes, do not ask for more than there is room for
        params.max_tokens = min(params.max_tokens, _room(engine, prompt))
    async with aclosing(_outputs(engine, prompt, params, request_id, lora)) as outputs:
        async for output in outputs:
            for completion in output.outputs:  # with n > 1 only sequences that have grown
                texts[completion.index] = completion.text
            yield texts


async def _beam_search(
    engine: EngineClient, prompt: Any, body: GenerateRequest, request_id: str, lora: LoRARequest | None
) -> AsyncGenerator[list[str], None]:
    """Yield the ``n`` best beams after each step, or after the last one only."""
    tokenizer = engine.renderer.get_tokenizer()
    prompt_ids: list[int] = prompt["prompt_token_ids"]
    search = BeamSearch(
        prompt_ids,
        width=body.width,
        eos_token_id=tokenizer.eos_token_id,
        ignore_eos=body.ignore_eos,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping is True,
    )
    room = _room(engine, prompt)
    num_steps = min(body.max_tokens or room, room)
    note_beam_search(prompt, body.width, num_steps, int(engine.model_config.max_model_len))
    for step in range(num_steps):
        search.advance(await _step(engine, prompt, search, body, f"{request_id}-{step}", lora))
        if body.stream or search.done or step == num_steps - 1:
            tokens = [list(beam.token_ids[len(prompt_ids) :]) for beam in search.best()[: body.n]]
            yield [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in tokens]
        if search.done:
            return


async def _step(
    engine: EngineClient, prompt: Any, search: BeamSearch, body: GenerateRequest, request_id: str, lora: LoRARequest | None
) -> list[dict[int, float]]:
    """Return the candidates of each running beam: one request per beam, all at once, for one token each."""
    params = SamplingParams(
        logprobs=2 * body.width,
        max_tokens=1,
        # Beams are ranked by log probabilities; sampling would only add an unlikely candidate to each beam.
        temperature=body.temperature if "temperature" in body.model_fields_set else 0.0,
        watermarking=False,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    salt = prompt.get("cache_salt")
    try:
        async with asyncio.TaskGroup() as tasks:
            steps = [
                tasks.create_task(
                    _candidates(
                        engine, tokens_input(list(beam.token_ids), cache_salt=salt), params, f"{request_id}-beam-{index}", lora
                    )
                )
                for index, beam in enumerate(search.running)
            ]
    except ExceptionGroup as group:
        raise group.exceptions[0]  # noqa: B904 - its own cause decides the status; the other tasks were cancelled
    return [step.result() for step in steps]


async def _candidates(
    engine: EngineClient, prompt: Any, params: Any, request_id: str, lora: LoRARequest | None
) -> dict[int, float]:
    async with aclosing(_outputs(engine, prompt, params, request_id, lora)) as outputs:
        output = await anext(outputs)
        return {token_id: item.logprob for token_id, item in output.outputs[0].logprobs[0].items()}


async def _outputs(
    engine: EngineClient, prompt: Any, params: Any, request_id: str, lora: LoRARequest | None
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the engine's outputs. Closing the generator before the end aborts the request."""
    finished = False
    try:
        async with aclosing(engine.generate(prompt, params, request_id, lora_request=lora)) as outputs:
            async for output in outputs:
                finished = output.finished
                reasons = {completion.finish_reason for completion in output.outputs}
                if "error" in reasons:
                    raise GenerationError("the engine failed while it generated")
                if "abort" in reasons:
                    raise RetryableRequestError("the server aborted the generation; send the request again")
                yield output
    finally:
        # vLLM itself aborts only requests for which it has returned a queue, not one that is cancelled while it is being added.
        if not finished:
            await engine.abort(request_id)


def _json(value: Mapping[str, Any]) -> bytes:
    # ASCII, as in the server of 2023: clients split by str.splitlines, which also splits at U+0085 and U+2028.
    return json.dumps(value).encode()
