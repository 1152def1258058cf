"""Grammars are checked by a real process, with a real tokenizer and limits that a test can reach."""

import asyncio
import errno
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xgrammar as xgr
from llguidance import LLMatcher
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from serve_app.errors import GrammarsBusy
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.front_end import grammar_compiler
from serve_app.ingress.front_end.grammar_checks import GrammarChecks, tokenizer_description
from serve_app.ingress.front_end.grammar_compiler import CheckLimits, GrammarCompiler
from serve_app.ingress.front_end.grammar_readers import _for_guidance
from tests.doubles.fleet import MODEL, in_loop, until
from tests.ingress.helpers import answering
from tests.ingress.serving import serving

pytestmark = pytest.mark.engine

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
TREE = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
LARGE = {"type": "object", "properties": {f"property_{n}": {"type": "string", "description": "a" * 250} for n in range(100)}}
SLOW = {
    "json": {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "^[a-z]{1,5000}$"} for n in range(4000)}}
}
"""Ten times as many properties as take 5 s with a vocabulary of 49,152 tokens."""
GOOD: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": TREE},
    {"json": LARGE},
    {"regex": "[a-z]{1,20}@[a-z]{1,20}"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "a" | "b" root'},
    {"grammar": 'start: "a" | "b"'},
    {"structural_tag": '{"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}'},
]


@asynccontextmanager
async def checks_of(model: Path, **limits: Any) -> AsyncIterator[GrammarChecks]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    compiler = GrammarCompiler(CheckLimits(**limits))
    try:
        yield GrammarChecks(lambda: tokenizer_description(tokenizer, len(tokenizer)), compiler)
    finally:
        await compiler.close()


def pid(compiler: GrammarCompiler) -> int:
    assert compiler._process is not None
    return compiler._process._process.pid


async def refusal(checks: GrammarChecks, **constraint: Any) -> str:
    with pytest.raises(VLLMValidationError) as refused:
        await checks.check(StructuredOutputsParams(**constraint))
    assert refused.value.parameter == "structured_outputs"
    return str(refused.value)


@in_loop
async def test_what_compiles_within_the_limits_passes(model: Path) -> None:
    async with checks_of(model) as checks:
        for constraint in GOOD:
            await checks.check(StructuredOutputsParams(**constraint))


@in_loop
async def test_what_takes_longer_is_refused_by_one_sentence_and_the_next_passes(model: Path) -> None:
    async with checks_of(model, compile_s=1) as checks:
        slow = "takes more than 1 s to compile, which is the limit; simplify it: fewer alternatives, repetitions or properties"
        assert slow in await refusal(checks, **SLOW)
        await checks.check(StructuredOutputsParams(json=PERSON))


@in_loop
async def test_what_takes_more_memory_is_refused(model: Path) -> None:
    async with checks_of(model, memory_bytes=1 << 20) as checks:
        assert "takes more than 1 MiB to compile" in await refusal(checks, **SLOW)


@in_loop
async def test_without_a_result_in_time_the_client_may_come_again_and_no_result_is_kept(model: Path) -> None:
    async with checks_of(model, compile_s=60, run_s=0.5) as checks:
        exchange = Exchange("/v1/completions")
        with answering(exchange):
            assert "retry in 1.0 s" in await refusal(checks, **SLOW)
        assert isinstance(exchange.error, GrammarsBusy)
        assert "retry in 1.0 s" in await refusal(checks, **SLOW)


@in_loop
async def test_a_process_that_does_not_answer_is_ended_and_the_next_grammar_passes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "_SPARE_S", 0.0)
    async with checks_of(model) as checks:
        await checks.check(StructuredOutputsParams(json=PERSON))
        os.kill(pid(checks.compiler), signal.SIGSTOP)
        monkeypatch.setattr(checks.compiler, "limits", CheckLimits(run_s=0.5))
        assert "retry in 1.0 s" in await refusal(checks, json=TREE)
        monkeypatch.setattr(checks.compiler, "limits", CheckLimits())
        await checks.check(StructuredOutputsParams(json=LARGE))


@in_loop
async def test_a_client_that_goes_frees_no_place_and_a_grammar_that_no_client_wants_any_more_is_not_checked(model: Path) -> None:
    async with checks_of(model, compile_s=60, run_s=60.0) as checks:
        wanted = [SLOW["json"] | {"title": str(n)} for n in range(grammar_compiler._AT_ONCE + 2)]
        clients = [asyncio.create_task(checks.check(StructuredOutputsParams(json=schema))) for schema in wanted]
        await until(lambda: sum(check.begun for check in checks._checks.values()) == grammar_compiler._AT_ONCE)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        assert checks.compiler.places.locked()
        await until(lambda: len(checks._checks) == grammar_compiler._AT_ONCE)
        assert all(check.begun for check in checks._checks.values())


@in_loop
async def test_what_xgrammar_cannot_read_is_left_to_vllm(model: Path) -> None:
    async with checks_of(model) as checks:
        await checks.check(StructuredOutputsParams(json={"$ref": "#/$defs/nowhere"}))


MANY_ITEMS = {"type": "array", "minItems": 10**9}
"""xgrammar refuses it at once. guidance, which vLLM asks next, writes all the items out."""
NAMES = [f"a{n}" for n in range(400)]
LEVELS = [{"$ref": "#/$defs/1"}, {"$ref": "#/$defs/2"}, {"type": "null"}]
CUBIC = {
    "$defs": {str(n): {"type": "object", "properties": dict.fromkeys(NAMES, LEVELS[n]), "required": NAMES} for n in range(3)},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/0"}},
    "required": ["a"],
    "patternProperties": {"x": {}},
}
"""outlines, which vLLM asks about `patternProperties`, writes 400**3 values out."""


@in_loop
@pytest.mark.parametrize(
    "constraint",
    [
        {"json": MANY_ITEMS},
        {"json": {"type": "object", "properties": {"a": MANY_ITEMS, "b": {"type": "integer", "multipleOf": 5}}}},
        {"json": CUBIC},
        {
            "structural_tag": json.dumps(
                {"structures": [{"begin": "<f>", "schema": MANY_ITEMS, "end": "</f>"}], "triggers": ["<f>"]}
            )
        },
    ],
    ids=["unreadable", "keyword that xgrammar ignores", "outlines", "structural tag"],
)
async def test_what_another_library_of_vllm_s_would_read_without_end_is_refused(model: Path, constraint: dict[str, Any]) -> None:
    async with checks_of(model, compile_s=1, memory_bytes=256 << 20) as checks:
        assert "which is the limit; simplify it" in await refusal(checks, **constraint)
        await checks.check(StructuredOutputsParams(json=PERSON))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json", json.dumps(PERSON)),
        ("regex", "a+"),
        ("ebnf", 'root ::= "a" | "b" root'),
        ("lark", 'start: "a"'),
        ("structural_tag", GOOD[-1]["structural_tag"]),
    ],
)
def test_guidance_is_given_what_it_can_read(kind: str, spec: str) -> None:
    assert LLMatcher.validate_grammar(_for_guidance(kind, spec)) == ""


@in_loop
async def test_a_process_that_is_gone_is_started_again(model: Path) -> None:
    async with checks_of(model) as checks:
        await checks.check(StructuredOutputsParams(json=PERSON))
        os.kill(pid(checks.compiler), signal.SIGKILL)
        assert checks.compiler._process is not None
        await asyncio.wait([checks.compiler._process.reader])
        await checks.check(StructuredOutputsParams(json=TREE))


@in_loop
async def test_a_process_that_hangs_before_it_is_ready_is_ended_and_the_next_grammar_passes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checks_of(model) as checks:
        await checks.prepare()
        os.kill(pid(checks.compiler), signal.SIGSTOP)
        monkeypatch.setattr(checks.compiler, "limits", CheckLimits(wait_s=0.5))
        assert "retry in 1.0 s" in await refusal(checks, json=PERSON)
        hanging = checks.compiler._process
        assert hanging is not None
        await until(lambda: hanging.has_ended)
        monkeypatch.setattr(checks.compiler, "limits", CheckLimits())
        await checks.check(StructuredOutputsParams(json=TREE))


@in_loop
async def test_a_grammar_is_checked_that_is_wanted_again_in_the_moment_in_which_its_last_client_leaves(model: Path) -> None:
    async with checks_of(model) as checks:
        for _ in range(grammar_compiler._AT_ONCE):
            await checks.compiler.places.acquire()
        leaving = asyncio.create_task(checks.check(StructuredOutputsParams(json=PERSON)))
        await until(lambda: bool(checks._checks))
        leaving.cancel()
        staying = asyncio.create_task(checks.check(StructuredOutputsParams(json=PERSON)))
        await asyncio.wait([leaving])
        for _ in range(grammar_compiler._AT_ONCE):
            checks.compiler.places.release()
        await staying


@in_loop
async def test_where_no_process_can_be_started_the_client_may_come_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_memory(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with checks_of(model) as checks:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "create_subprocess_exec", no_memory)
            assert "retry in 1.0 s" in await refusal(checks, json=PERSON)
        await checks.check(StructuredOutputsParams(json=PERSON))


@in_loop
async def test_a_closed_compiler_starts_no_process_and_gives_no_result(model: Path) -> None:
    async with checks_of(model) as checks:
        await checks.compiler.close()
        await checks.prepare()
        assert "retry in 1.0 s" in await refusal(checks, json=PERSON)
        assert checks.compiler._process is None


@in_loop
async def test_models_share_one_process_that_is_there_before_the_first_grammar_and_keep_their_own_tokenizers(
    model: Path,
) -> None:
    few, many = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    many.add_tokens(["<one>", "<two>"])
    compiler = GrammarCompiler()
    checks = [GrammarChecks(partial(tokenizer_description, t, len(t)), compiler) for t in (few, many, few)]
    try:
        for one in checks:
            await one.prepare()
        prepared = pid(compiler)
        for one in checks:
            await one.check(StructuredOutputsParams(json=PERSON))
        assert compiler._process is not None
        assert (pid(compiler), sorted(compiler._process._tokenizers.values())) == (prepared, [0, 1])
    finally:
        await compiler.close()


def test_routes_answer_400_with_the_sentence_and_the_engine_never_sees_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "CheckLimits", partial(CheckLimits, in_loop_s=-1.0))

    @in_loop
    async def ask() -> None:
        async with serving(model) as (http, engine, _):
            constraint = {"structured_outputs": {"json": PERSON}, "max_tokens": 2}
            asked: list[tuple[str, dict[str, Any]]] = [
                ("/v1/completions", {"prompt": "a", **constraint}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **constraint}),
                ("/generate", {"prompt": "a", **constraint}),
            ]
            for path, fields in asked:
                answer = await http.post(path, json={"model": MODEL, **fields})
                assert answer.status_code == 400, answer.text
                assert "s to read, limit -1.0 s" in answer.json()["error"]["message"]
            assert engine.added == []

    ask()


@in_loop
async def test_a_grammar_that_only_the_engine_refuses_is_the_client_s_mistake(model: Path) -> None:
    async with serving(model, stepping=False) as (http, engine, _):
        async with asyncio.TaskGroup() as tasks:
            body = {"model": MODEL, "prompt": "a", "structured_outputs": {"json": PERSON}}
            answer = tasks.create_task(http.post("/v1/completions", json=body))
            await until(lambda: engine.running)
            engine.fail(next(iter(engine.running)))
        assert answer.result().status_code == 400, answer.result().text
        assert "the engine cannot compile the grammar of the answer" in answer.result().json()["error"]["message"]


@in_loop
async def test_vllm_reads_a_schema_in_the_event_loop_once_for_all_requests_with_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0
    read = xgr.Grammar.from_json_schema

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return read(*args, **kwargs)

    monkeypatch.setattr(xgr.Grammar, "from_json_schema", counted)
    schema = {"type": "object", "properties": {"only_here": {"type": "string"}}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    async with serving(model) as (http, _, _):
        answers = [await http.post("/v1/chat/completions", json=body) for _ in range(5)]
    assert {answer.status_code for answer in answers} == {200}
    assert num_read == 1
