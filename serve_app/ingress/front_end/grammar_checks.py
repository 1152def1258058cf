"""Grammar checks test the grammar of a request's answer before the event loop reads it and an engine compiles it.

A schema, regular expression or grammar of up to 64 KiB may keep xgrammar's compiler busy for minutes. That would happen in the engine core,
whose few compiler threads every constrained request needs, and continue after the client has left, because nothing can stop a thread there.
So each new grammar is compiled once in a process of the ingress (`grammar_compiler.py`), which the kernel ends at a limit, and only a
grammar that passes is sent to an engine. The engine compiles it again: the result is a thousand times as large as the text, and slower to
send than to make.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import xgrammar as xgr
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from serve_app.errors import BadRequest, GrammarsBusy
from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.front_end.grammar_compiler import LATE, GrammarCompiler
from serve_app.ingress.front_end.grammar_readers import GUIDANCE, OUTLINES

_REMEMBERED = 1024
_RETRY_AFTER_S = 1.0


@dataclass
class _Check:
    """The check of one grammar, for which ``num_waiting`` requests wait."""

    task: asyncio.Task[None]
    num_waiting: int = 0
    begun: bool = False


class GrammarChecks:
    """The grammar checks of one model.

    Args:
        tokenizer: Returns xgrammar's serialized description of the tokenizer. It is called in a thread until it has returned once;
            requests with a grammar fail by the error that it raises.
        compiler: The compiler that all models of the ingress share; its owner closes it.
        any_whitespace: Whether schemas allow any white space between values; vLLM has the same setting.
        has_fallback: Whether vLLM reads a grammar with another library if xgrammar cannot, as with the backend `auto`.
    """

    def __init__(
        self, tokenizer: Callable[[], str], compiler: GrammarCompiler, *, any_whitespace: bool = True, has_fallback: bool = True
    ) -> None:
        self.compiler = compiler
        self._describe = tokenizer
        self._describing = asyncio.Lock()
        self._described: str | None = None
        self._any_whitespace = any_whitespace
        self._has_fallback = has_fallback
        self._checks: dict[bytes, _Check] = {}
        self._results: OrderedDict[bytes, str | None] = OrderedDict()

    async def prepare(self) -> None:
        """Start the process and send it this model's tokenizer, so that the first request with a grammar need not wait for either."""
        await self.compiler.prepare(await self._tokenizer())

    async def check(self, params: StructuredOutputsParams) -> None:
        """Return if the grammar of ``params`` may be given to vLLM and an engine.

        A grammar that xgrammar cannot read is left to vLLM, which reads it with another library: the check did the same within the limits.

        Raises:
            VLLMValidationError: Compiling the grammar fails, or exceeds a limit, or has no result in time. The error is also noted in
                the exchange of the HTTP request, so that a stream is refused before it begins.
        """
        if (kind_and_spec := _kind_and_spec(params)) is None:
            return
        digest = _digest_of(*kind_and_spec)
        if digest not in self._results:
            await self._wait_for_result(digest, *kind_and_spec)
        if digest not in self._results:
            _refuse(GrammarsBusy(limit_s=self.compiler.limits.wait_s, retry_after_s=_RETRY_AFTER_S))
        self._results.move_to_end(digest)
        if (refusal := self._results[digest]) is not None:
            _refuse(BadRequest("structured_outputs", refusal))

    async def _wait_for_result(self, digest: bytes, kind: str, spec: str) -> None:
        """Return when the result is there, or when the time is over. A check that has begun continues without waiting requests."""
        if (check := self._checks.get(digest)) is None:
            task = asyncio.create_task(self._run(digest, kind, spec), name="grammar-check")
            check = self._checks[digest] = _Check(task)
            task.add_done_callback(lambda _: self._forget(digest, task))
        check.num_waiting += 1
        try:
            async with asyncio.timeout(self.compiler.limits.wait_s):
                await asyncio.shield(check.task)
        except TimeoutError:
            return
        finally:
            check.num_waiting -= 1
            if not (check.num_waiting or check.begun):
                check.task.cancel()
                self._forget(digest, check.task)  # now, or the next request with this grammar would wait for the cancelled check

    def _forget(self, digest: bytes, task: asyncio.Task[None]) -> None:
        if (check := self._checks.get(digest)) is not None and check.task is task:
            del self._checks[digest]

    async def _run(self, digest: bytes, kind: str, spec: str) -> None:
        async with self.compiler.places:
            self._checks[digest].begun = True
            tokenizer = await self._tokenizer()
            second, ignores = _second_reader(kind, spec) if self._has_fallback else (None, False)
            grammar = {"kind": kind, "spec": spec, "any_whitespace": self._any_whitespace, "second": second, "ignores": ignores}
            result = await self.compiler.check(grammar, tokenizer)
            if result["step"] != LATE:
                self._remember(digest, self._refusal(result))

    async def _tokenizer(self) -> str:
        async with self._describing:
            if self._described is None:
                self._described = await asyncio.to_thread(self._describe)
            return self._described

    def _remember(self, digest: bytes, refusal: str | None) -> None:
        self._results[digest] = refusal
        if len(self._results) > _REMEMBERED:
            self._results.popitem(last=False)

    def _refusal(self, result: dict[str, Any]) -> str | None:
        """Return the error text for the client; None if the grammar passes."""
        limits, way_out = self.compiler.limits, "simplify it: fewer alternatives, repetitions or properties"
        match result["step"]:
            case "time":
                return f"The grammar of the answer takes more than {limits.compile_s} s to compile, which is the limit; {way_out}"
            case "memory":
                limit = f"{limits.memory_bytes >> 20} MiB"
                return f"The grammar of the answer takes more than {limit} to compile, which is the limit; {way_out}"
            case "depth":
                return (
                    "The grammar of the answer ends its compiler, most likely by recursion that reads no character; remove that"
                )
            case "compile":
                return f"The grammar of the answer cannot be compiled: {result['said']}"
        for name, what in (("read_s", "to read"), ("mask_s", "for one token")):
            if result[name] > limits.in_loop_s:
                return f"The grammar of the answer takes {result[name]:.2f} s {what}, limit {limits.in_loop_s} s; {way_out}"
        return None


def _refuse(error: GrammarsBusy | BadRequest) -> NoReturn:
    if (exchange := current_exchange()) is not None:
        exchange.fail(error)  # vLLM reports errors of a stream only after its head
    raise VLLMValidationError(str(error), parameter="structured_outputs")


def check_grammars(engine: Any, vllm_config: Any, compiler: GrammarCompiler) -> GrammarChecks | None:
    """Let ``engine``, vLLM's `AsyncLLM`, check the grammar of each request before it accepts the request.

    Returns:
        None, and checks nothing, if another compiler than xgrammar is configured, or the tokenizer is of Mistral's own library.
    """
    config, tokenizer = vllm_config.structured_outputs_config, engine.renderer.tokenizer
    if config.backend not in ("auto", "xgrammar") or tokenizer is None or is_mistral_tokenizer(tokenizer):
        return None
    describe = partial(tokenizer_description, tokenizer, vllm_config.model_config.get_vocab_size())
    checks = GrammarChecks(
        describe, compiler, any_whitespace=not config.disable_any_whitespace, has_fallback=config.backend == "auto"
    )
    backend_xgrammar.validate_xgrammar_grammar = _validate_once
    add = engine.add_request

    async def add_request(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if (structured := getattr(params, "structured_outputs", None)) is not None:
            await checks.check(structured)
        return await add(request_id, prompt, params, *args, **kwargs)

    engine.add_request = add_request
    return checks


_validate = backend_xgrammar.validate_xgrammar_grammar
_valid: OrderedDict[bytes, None] = OrderedDict()


def _validate_once(sampling_params: Any) -> None:
    """Do what vLLM's function does, once for each schema, expression or grammar. It reads them in the event loop, for up to 0.1 s each."""
    structured = sampling_params.structured_outputs
    kind_and_spec = None
    # vLLM replaces choices by a grammar, for each request anew.
    if structured is not None and not structured.choice:
        kind_and_spec = _kind_and_spec(structured)
    if kind_and_spec is None:
        _validate(sampling_params)
        return
    digest = _digest_of(*kind_and_spec)
    if digest not in _valid:
        _validate(sampling_params)
        _valid[digest] = None
        if len(_valid) > _REMEMBERED:
            _valid.popitem(last=False)


def _digest_of(kind: str, spec: str) -> bytes:
    return hashlib.sha256(f"{kind}\0{spec}".encode("utf-8", "surrogatepass")).digest()


def tokenizer_description(tokenizer: Any, vocab_size: int) -> str:
    """Return xgrammar's serialized description of a tokenizer of Transformers. It takes 0.1 to 1 s of CPU time."""
    return str(xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size).serialize_json())


def _kind_and_spec(params: StructuredOutputsParams) -> tuple[str, str] | None:
    """Return the kind and text that xgrammar will get; None if they are always the same, or vLLM will refuse them anyway."""
    if params.json_object or params.all_constraints_none():
        return None
    try:
        if params.choice is not None:
            return "ebnf", choice_as_grammar(params.choice)
        kind, spec = get_structured_output_key(params)
    except (TypeError, ValueError, RecursionError):
        return None
    name = kind.name.lower()
    if name == "grammar":
        return ("lark" if grammar_is_likely_lark(spec) else "ebnf"), spec
    return name, spec


def _second_reader(kind: str, spec: str) -> tuple[str, bool]:
    """Return the library that vLLM's backend `auto` uses after xgrammar, and whether vLLM uses it even if xgrammar reads the grammar."""
    if kind != "json":
        return GUIDANCE, False
    try:
        schema = json.loads(spec)
        second = OUTLINES if has_guidance_unsupported_json_features(schema) else GUIDANCE
        return second, has_xgrammar_unsupported_json_features(schema)
    except (AttributeError, TypeError, ValueError, RecursionError):  # vLLM refuses such a schema at the same place
        return GUIDANCE, False
