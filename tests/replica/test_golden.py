"""An engine must answer golden prompts before its replica takes requests."""

import ast
import asyncio
import os
import re
from pathlib import Path

import pytest

from serve_app.checkpoints import make_tiny_llama
from serve_app.config import GoldenPrompt, HealthSettings, ModelSettings
from serve_app.errors import EngineStartFailed
from serve_app.replica import pipe
from serve_app.replica.golden import ask_all
from serve_app.replica.process import EngineProcess
from tests.doubles.fleet import in_loop

PARIS = GoldenPrompt(prompt="The capital of France is", expect="Paris")


async def ask(*prompts: GoldenPrompt, answers: list[pipe.GoldenAnswer | Exception | None]) -> list[str]:
    """Ask an engine with these answers (None: no answer in time); return the prompts that it got."""
    asked = list[str]()

    def engine(question: pipe.AskGolden) -> asyncio.Future[pipe.GoldenAnswer]:
        asked.append(question.prompt)
        future = asyncio.get_running_loop().create_future()
        match answers[len(asked) - 1]:
            case Exception() as error:
                future.set_exception(error)
            case pipe.GoldenAnswer() as answer:
                future.set_result(answer)
        return future

    await ask_all("tiny", prompts, engine, lambda: None)
    return asked


@in_loop
async def test_each_prompt_is_asked_once_and_a_match_anywhere_in_the_answer_is_enough() -> None:
    other = GoldenPrompt(prompt="1 + 1 =", expect=r"^\s*2\b")
    answers = [pipe.GoldenAnswer(" the city of Paris."), pipe.GoldenAnswer(" 2, of course")]
    assert await ask(PARIS, other, answers=[*answers]) == ["The capital of France is", "1 + 1 ="]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (pipe.GoldenAnswer(" Rome."), "was answered with ' Rome.', in which 'Paris' is not found"),
        (pipe.GoldenAnswer("", "ValueError: the model makes no text"), "has no answer: ValueError: the model makes no text"),
        (None, r"has no answer after 0\.05 s \(within_s\)"),
    ],
    ids=["wrong", "none", "late"],
)
@in_loop
async def test_another_answer_ends_the_start_and_says_what_it_was(answer: pipe.GoldenAnswer | None, reason: str) -> None:
    golden = PARIS.model_copy(update={"within_s": 0.05})
    with pytest.raises(EngineStartFailed, match=f"'tiny' did not start: golden prompt 'The capital of France is' {reason}"):
        await ask(golden, answers=[answer])


@in_loop
async def test_the_end_of_the_engine_is_reported_as_such() -> None:
    died = EngineStartFailed(model="", reason="killed")
    with pytest.raises(EngineStartFailed, match="killed"):
        await ask(PARIS, answers=[died])


async def start(model_path: Path, golden: GoldenPrompt) -> pipe.EngineReady:
    """Start a simulated engine."""
    simulated = {"profile": "a10g-llama-8b"}
    model = ModelSettings(
        name="tiny", model=str(model_path), simulated=simulated, golden=(golden,), engine_args={"max_model_len": 512}
    )
    process = EngineProcess(HealthSettings(), on_message=lambda message: None, on_lost=lambda error: None)
    path = asyncio.get_running_loop().create_future()
    path.set_result(model.model)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        return await process.start(model, path, environment=environment, timeout_s=240.0, max_frame_bytes=1 << 20)
    finally:
        await process.stop()


@pytest.mark.engine
@in_loop
async def test_a_real_engine_answers_the_same_each_time(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "llama")
    wrong = GoldenPrompt(prompt="Once upon a time", expect="no such words", max_tokens=8)
    with pytest.raises(EngineStartFailed) as failed:
        await start(checkpoint, wrong)
    shown = re.search(r"was answered with (.+), in which 'no such words' is not found", str(failed.value))
    assert shown is not None
    right = wrong.model_copy(update={"expect": f"^{re.escape(ast.literal_eval(shown[1]))}$"})
    assert (await start(checkpoint, right)).max_num_seqs > 0
