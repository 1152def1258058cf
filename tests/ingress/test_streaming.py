"""Streams whose middle is repeated equal the same streams of vLLM's own, event by event; real HTTP, a fake engine."""

import asyncio
import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.core.instructions import FailRequest
from serve_app.errors import SendFailed
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.stat_logger import SharedPrometheusStatLogger
from serve_app.ingress.shortcuts.streaming import text_of
from tests.doubles.fleet import in_loop, until
from tests.ingress.streams import CHAT, COMPLETIONS, NUM_TOKENS, Ingress, Play, both, serving
from tests.ports import free_port
from tests.shortcuts import of_shortcuts

pytestmark = [pytest.mark.engine, of_shortcuts]


REPEATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True}},
    "stop that is not hit": {"stop": ["never this 1234567", "nor that"]},
    "minimum": {"min_tokens": 9, "stop": ["a", "e"]},
    "special tokens": {"skip_special_tokens": False},
    "sampled": {"temperature": 0.7, "seed": 3},
}
BY_VLLM: dict[str, dict[str, Any]] = {
    "two choices": {"n": 2, "temperature": 0.7},
    "ids": {"return_token_ids": True},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


@in_loop
async def test_events_are_those_of_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18110) as ingress:
        await ingress.join()
        for path in (COMPLETIONS, CHAT):
            for name, fields in REPEATED.items():
                ours, theirs, repeated = await both(ingress, path, **fields)
                assert ours == theirs, (path, name)
                assert repeated > 0, (path, name)
            for name, fields in BY_VLLM.items():
                ours, theirs, repeated = await both(ingress, path, **fields)
                assert (ours == theirs or name == "two choices", repeated) == (True, 0), (path, name)
            ours, theirs, repeated = await both(ingress, path, 3)
            assert (ours == theirs, repeated > 0) == (True, True), f"{path}, three tokens a step"
        logprobs, echo = {"logprobs": 1}, {"echo": True}
        for fields in (logprobs, echo, {"prompt": ["hello", "you"]}):
            assert (await both(ingress, COMPLETIONS, **fields))[2] == 0, fields


@in_loop
async def test_an_event_like_those_repeated_before_is_a_template_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18119) as ingress:
        await ingress.join()
        for path in (COMPLETIONS, CHAT):
            first, _, num_first = await both(ingress, path)
            second, _, num_second = await both(ingress, path)
            assert (second, num_second) == (first, num_first + 1), path
        assert (await both(ingress, COMPLETIONS, echo=True))[2] == 0
        ours, theirs, repeated = await both(
            ingress, COMPLETIONS, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        assert (ours == theirs, repeated) == (True, 0)


@in_loop
async def test_steps_that_come_in_one_read_become_one_event(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18120) as ingress:
        replica = await ingress.join()
        whole, play = Play(ingress, CHAT), Play(ingress, CHAT)
        await until(lambda: len(replica.engine.running) == 2)
        for _ in range(6):
            await play.step(replica)
        before, emit = play.num_events(), replica.engine._emit
        frames: list[Any] = []
        replica.engine._emit = frames.append
        replica.engine.step()
        replica.engine.step()
        both_steps = msgspec.structs.replace(frames[1], frame=frames[0].frame + frames[1].frame)
        emit(both_steps)
        replica.engine._emit = emit
        await until(lambda: play.num_events() > before and whole.num_events() > before)
        for _ in range(50):
            await asyncio.sleep(0)
        assert play.num_events() == whole.num_events() == before + 1
        await play.to_end(replica)
        await whole.task
        assert (play.text(), play.ends()) == (whole.text(), whole.ends())
        with ingress.by_vllm_alone():
            alone = Play(ingress, CHAT)
            await alone.to_end(replica)
        assert (play.text(), play.ends()) == (alone.text(), alone.ends())


@in_loop
async def test_a_stop_string_that_is_hit_anywhere_ends_the_answer_as_vllm_does(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(1)
    async with serving(model, monkeypatch, 18111) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, COMPLETIONS)
        await whole.to_end(replica)
        text, repeated = whole.text(), 0
        for start in range(1, len(text) - 4):
            stop = text[start : start + chosen.randint(1, 4)]
            fields = {"stop": [stop, "never this"], "include_stop_str_in_output": chosen.random() < 0.5}
            ours, theirs, num = await both(ingress, COMPLETIONS, chosen.choice([1, 1, 3]), **fields)
            assert ours == theirs, (start, stop)
            repeated += num
        assert repeated > len(text)


@in_loop
async def test_uvicorns_cycle_has_what_is_read_of_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its private state: another version of uvicorn fails here first, and not by streams that are never repeated."""
    async with serving(model, monkeypatch, 18118) as ingress:
        replica = await ingress.join()
        play = Play(ingress, CHAT)
        await until(lambda: replica.engine.running)
        (stream,) = ingress.streams._of.values()
        cycle = stream._cycle
        await play.step(replica)
        assert (cycle.chunked_encoding, cycle.disconnected, cycle.flow.write_paused) == (True, False, False)
        assert callable(cycle.transport.write)
        await play.to_end(replica)


@in_loop
async def test_every_character_is_written_as_vllm_writes_it() -> None:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage

    from serve_app.ingress.shortcuts.streaming import _encode

    for first in range(0, 0x110000, 0x400):
        text = "".join(chr(c) for c in range(first, first + 0x400) if not 0xD800 <= c < 0xE000)
        assert DeltaMessage(content=text).model_dump_json(exclude_unset=True).encode() == b'{"content":%b}' % _encode(text)


@in_loop
async def test_an_answer_that_continues_elsewhere_is_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18112) as ingress:
        first = await ingress.join()
        undisturbed = await Play(ingress, CHAT).to_end(first)
        play = Play(ingress, CHAT)
        await until(lambda: first.engine.running)
        for _ in range(8):
            await play.step(first)
        second = await ingress.join()
        first.stop_listening()
        await until(lambda: second.engine.running)
        before = ingress.num_repeated
        assert await play.to_end(second) == undisturbed
        assert ingress.num_repeated > before


@in_loop
async def test_what_could_not_be_written_comes_with_the_next_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither into a connection that is full, nor while something else is being written to it."""
    async with serving(model, monkeypatch, 18113) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, CHAT, stream_options={"include_usage": True})
        await whole.to_end(replica)
        play = Play(ingress, CHAT, stream_options={"include_usage": True})
        await until(lambda: replica.engine.running)
        for _ in range(6):
            await play.step(replica)
        (stream,) = ingress.streams._of.values()
        num_events, flow = play.num_events(), stream._cycle.flow
        flow.write_paused = True
        for _ in range(5):
            replica.engine.step()
            await asyncio.sleep(0.01)
        assert play.num_events() == num_events
        flow.write_paused = False
        events = await play.to_end(replica)
        assert play.text() == whole.text()
        assert events[-3:] == whole.events()[-3:], "usage and end"


@pytest.mark.parametrize("reads_again", [True, False])
@in_loop
async def test_a_slow_client_gets_all_text_that_came_before_its_request_failed(
    reads_again: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model, monkeypatch, free_port()) as ingress:
        replica = await ingress.join()
        play = Play(ingress, COMPLETIONS, max_tokens=60)
        await until(lambda: replica.engine.running)
        for _ in range(12):
            await play.step(replica)
        ((request_id, stream),) = ingress.streams._of.items()
        stream._cycle.flow.pause_writing()  # the client does not read: the transport's buffer is full
        for _ in range(8):
            replica.engine.step()
            await asyncio.sleep(0.02)
        state = ingress.front.client._output_processor.request_states[request_id]
        if reads_again:
            stream._cycle.flow.resume_writing()
            await until(lambda: not ingress.streams._slow)  # without another token
        text = state.detokenizer.output_text
        ingress.front.client._carry_out([FailRequest(request_id, SendFailed(request=request_id, cause="test"))])
        stream._cycle.flow.resume_writing()
        await asyncio.wait_for(asyncio.wait([play.task]), 5)
        events = re.findall(rb"data: (\{.*?\"choices\".*?\})\n\n", play.content)
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
        assert b'"error"' in play.content


@in_loop
async def test_under_pressure_the_text_and_the_end_are_those_of_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come faster than vLLM writes them wait until it is caught up; where vLLM itself would put some together, so may this."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    pace, take = random.Random(0), FleetClient.get_output_async

    async def slow(client: FleetClient) -> Any:
        frame = await take(client)
        for _ in range(pace.choice([0, 0, 5, 20])):
            await asyncio.sleep(0)
        return frame

    monkeypatch.setattr(FleetClient, "get_output_async", slow)
    async with serving(model, monkeypatch, 18117) as ingress:
        replica = await ingress.join()
        num_parked = 0
        for path in (COMPLETIONS, CHAT):
            with ingress.by_vllm_alone():
                plain = Play(ingress, path)
                await plain.to_end(replica)
                text = plain.text()
                stops = [{"stop": [text[k : k + 3]]} for k in range(5, len(text) - 3, 9)]
                bodies: list[dict[str, Any]] = [usage, *stops, *([{"echo": True}] if path == COMPLETIONS else [])]
                wanted = [Play(ingress, path, **fields) for fields in bodies]
                for play in wanted:
                    await play.to_end(replica)
            for seed, (fields, whole) in enumerate(zip(bodies * 2, wanted * 2, strict=True)):
                chosen = random.Random(seed)
                play, counted, num_steps = Play(ingress, path, **fields), counts(ingress), 0
                await until(lambda: replica.engine.running)
                while replica.engine.running:
                    replica.engine.step(chosen.choice([1, 1, 2]))
                    num_steps += 1
                    for _ in range(chosen.choice([1, 2, 3, 5, 40])):
                        await asyncio.sleep(0)
                    num_parked += sum(bool(stream.parked) for stream in ingress.streams._of.values())
                await play.task
                assert play.text() == whole.text(), (path, fields, seed)
                assert play.ends() == whole.ends(), (path, fields, seed)
                if "stop" not in fields:
                    added = [after - before for after, before in zip(counts(ingress), counted, strict=True)]
                    assert added[:2] == [NUM_TOKENS, num_steps - 1], (path, fields, seed)
        assert ingress.num_repeated > 100
        assert num_parked > 10


@in_loop
async def test_a_client_that_goes_in_the_middle_is_aborted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18114) as ingress:
        replica = await ingress.join()
        play = Play(ingress, CHAT)
        await until(lambda: replica.engine.running)
        for _ in range(6):
            await play.step(replica)
        assert ingress.num_repeated > 0
        play.task.cancel()
        await until(lambda: replica.engine.aborted)
        assert not ingress.streams._of


@in_loop
async def test_a_silence_in_the_middle_is_filled_and_nothing_is_lost(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18115, silence_s=0.2) as ingress:
        replica = await ingress.join()
        whole = Play(ingress, CHAT)
        await whole.to_end(replica)
        play = Play(ingress, CHAT)
        await until(lambda: replica.engine.running)
        for _ in range(6):
            await play.step(replica)
        await until(lambda: b": waiting" in play.content)
        repeated, size = ingress.num_repeated, len(play.content)
        replica.engine.step()
        await until(lambda: b"data: {" in play.content[size:])
        assert ingress.num_repeated == repeated + 1
        await play.to_end(replica)
        assert play.text() == whole.text()


def counts(ingress: Ingress) -> list[float]:
    """Return what vLLM's logger has: tokens, gaps between them, tokens by step. Not from the registry, which tests of others empty."""
    stat_loggers = ingress.front.engine.logger_manager.stat_loggers
    (mine,) = (found for found in stat_loggers if isinstance(found, SharedPrometheusStatLogger))
    gaps = mine.histogram_inter_token_latency[0]
    by_step = mine.histogram_iteration_tokens[0]
    gaps.sort()
    by_step.sort()
    num_gaps = sum(bucket.get() for bucket in gaps._buckets)
    return [mine.counter_generation_tokens[0]._value.get(), num_gaps, by_step._sum.get()]


@in_loop
async def test_tokens_and_gaps_are_counted_as_vllm_counts_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model, monkeypatch, 18116) as ingress:
        replica = await ingress.join()
        added = []
        for context in (contextlib.nullcontext(), ingress.by_vllm_alone()):
            with context:
                before = counts(ingress)
                await Play(ingress, CHAT).to_end(replica)
                added.append([after - value for after, value in zip(counts(ingress), before, strict=True)])
        assert ingress.num_repeated > 0
        assert added[0] == added[1]
        assert added[1][0] == NUM_TOKENS


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (b'data: {"choices":[{"index":0,"text":"a\\u0007","finish_reason":null}]}\n\n', "a\x07"),
        (b'data: {"choices":[{"index":0,"delta":{"content":""}}]}\n\n', ""),
        (b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n', None),
        (b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n', None),
        (b'data: {"choices":[{"index":0,"text":"a"}],"usage":{"total_tokens":1}}\n\n', None),
        (b'data: {"choices":[{"text":"a"},{"text":"b"}]}\n\n', None),
        (b"data: [DONE]\n\n", None),
        (b": waiting\n\n", None),
    ],
)
def test_the_text_of_an_event_is_that_of_a_middle_one(event: bytes, text: str | None) -> None:
    assert text_of(event) == text
