"""Streams leave replicas that drain before the end of the budget; real links on the loopback interface, fake engines."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import msgspec

from serve_app.core.read_costs import MIN_TOKENS
from tests.doubles.fake_engine import CAPABILITIES, FakeEngine, answer
from tests.doubles.fleet import Fleet, fleet, in_loop, until
from tests.ingress.helpers import PROMPT

STEP_S = 0.05
BUDGET_S = 3.0
CHANGE_EVERY_S = 0.5
NUM_TOKENS = 400


@in_loop
async def test_a_stream_moves_before_the_budget_ends_and_the_drain_ends_with_it() -> None:
    async with fleet() as f:
        await f.join("a", "b")
        stream = await f.front.add("r", PROMPT, max_tokens=6)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(2)
        await until(lambda: len(stream.token_ids) == 2)
        await f.replicas["a"].server.drain(BUDGET_S)
        assert f.replicas["a"].server.num_attempts() == 0
        await until(lambda: f.running("b") == ["r@1"])
        assert f.replicas["a"].engine.aborted == ["r@0"]
        f.replicas["b"].engine.step(4)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 6)


@in_loop
async def test_a_stream_takes_its_kv_along_where_the_replicas_can_read_each_others() -> None:
    where = {"remote_block_ids": [[3, 4]], "remote_host": "10.0.0.1"}
    prompt = list(range(1, MIN_TOKENS + 1))
    async with fleet() as f:
        for replica_id in "ab":
            await f.join(replica_id, engine=FakeEngine(capabilities=msgspec.structs.replace(CAPABILITIES, kv_transfer="nixl")))
        stream = await f.front.add("r", prompt, max_tokens=6)
        await until(lambda: f.running("a") == ["r@0"])
        engine, target = f.replicas["a"].engine, f.replicas["b"].engine
        engine.step(2)
        await until(lambda: len(stream.token_ids) == 2)
        draining = asyncio.create_task(f.replicas["a"].server.drain(BUDGET_S))
        await until(lambda: engine.leaving == ["r@0"])
        engine.step(1)
        engine.hand_over(where)
        await until(lambda: f.running("b") == ["r@1"])
        assert msgspec.msgpack.decode(target.kv["r@1"]) == where
        assert (target.num_emitted["r@1"], target.added[-1].prompt_token_ids) == (3, prompt + answer(prompt, 3))
        assert engine.aborted == []
        target.step(3)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(prompt, 6)
        assert f.client.fleet.hand_overs.results == {"computed": 1}, "the double reads nothing"
        await until(lambda: engine.freed == ["r@0"])
        await draining


@in_loop
async def test_twenty_changes_of_membership_leave_streams_that_outlive_them_all_whole() -> None:
    prompts = [[number, 1, 2] for number in range(16)]
    async with fleet() as f, computing(f):
        await f.join("r0", "r1")
        streams = [await f.front.add(f"s{n}", prompt, max_tokens=NUM_TOKENS) for n, prompt in enumerate(prompts)]
        await until(lambda: all(s.token_ids for s in streams))
        async with asyncio.TaskGroup() as stopping:
            for number in range(10):
                await f.join(f"r{number + 2}")
                stopping.create_task(stop(f, f"r{number}"))
                await asyncio.sleep(CHANGE_EVERY_S)
        assert not any(s.finished for s in streams)
        while not all(s.finished or s.error for s in streams):
            await asyncio.sleep(STEP_S)
        assert [s.token_ids for s in streams] == [answer(prompt, NUM_TOKENS) for prompt in prompts]
        assert f.client.fleet.outcomes == {"complete": len(streams)}
        assert f.client.fleet.drains.num_moved >= len(streams)


async def stop(f: Fleet, replica_id: str) -> None:
    """As a replica's deployment does it."""
    server = f.replicas[replica_id].server
    await server.drain(BUDGET_S)
    await server.close("drained", "the replica stopped")


@contextlib.asynccontextmanager
async def computing(f: Fleet) -> AsyncIterator[None]:
    """Every engine makes a step at a time, and every replica reports its load once a second."""

    async def compute() -> None:
        for number in itertools.count():
            for replica in list(f.replicas.values()):
                replica.engine.step()
                if number % round(1 / STEP_S) == 0:
                    replica.server.send_heartbeats()
            await asyncio.sleep(STEP_S)

    task = asyncio.create_task(compute())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
