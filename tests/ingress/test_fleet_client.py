"""A fleet client works over real links on the loopback interface; engines are fake and compute only when a test says so."""

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.core.fleet_report import outstanding_tokens
from serve_app.errors import NoReplica, QueueFull
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.http.error_answers import FleetError
from serve_app.membership import Lease
from tests.doubles.fake_engine import CAPABILITIES, FakeEngine, answer
from tests.doubles.fake_front_end import MAX_MODEL_LEN
from tests.doubles.fleet import MODEL, fleet, in_loop, settings, start_replica, until
from tests.ingress.helpers import PROMPT, answering, error_of, is_running

STARTS: list[tuple[str, str, dict[str, Any]]] = [
    ("a", MODEL, {"start_s": 33.0}),
    ("b", "another", {"start_s": 500.0}),
    ("c", MODEL, {}),
]


@in_loop
async def test_a_request_is_answered_by_the_replica_that_joined() -> None:
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("r", PROMPT, max_tokens=3)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(2)
        f.replicas["a"].engine.step(2)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 3)
        assert f.client.links.capabilities == CAPABILITIES
        config = f.front.vllm_config
        assert (config.model_config.max_model_len, config.cache_config.block_size) == (CAPABILITIES.max_model_len, 128)
        assert f.client.fleet.outcomes == {"complete": 1}


@in_loop
async def test_an_abort_reaches_the_engine_and_frees_the_credit() -> None:
    async with fleet(settings(protocol={"credit": 1})) as f:
        await f.join("a")
        await f.front.add("r0", PROMPT)
        await f.front.add("r1", PROMPT)
        await until(lambda: f.running("a") == ["r0@0"])
        await f.client.abort_requests_async(["r0", "never"])
        await until(lambda: f.running("a") == ["r1@0"])
        assert f.replicas["a"].engine.aborted == ["r0@0"]
        assert f.client.fleet.outcomes == {"aborted": 1}


@in_loop
async def test_an_answer_that_a_stop_string_ended_is_complete_and_its_engine_stops() -> None:
    async with fleet() as f:
        await f.join("a")
        stream = await f.front.add("r", PROMPT, stop_after=2)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step(2)
        await until(lambda: f.replicas["a"].engine.aborted == ["r@0"])
        assert stream.finished
        assert f.client.fleet.outcomes == {"complete": 1}
        assert f.client.fleet.tally.finished_tokens == 2


@in_loop
async def test_choices_that_vllm_aborts_because_another_one_failed_have_failed_too() -> None:
    async with fleet() as f:
        await f.join("a")
        streams = [await f.front.add(f"{i}_r", PROMPT, parent="r") for i in range(3)]
        await f.front.add("other", PROMPT)
        await until(lambda: len(f.running("a")) == 4)
        failed = EngineCoreOutput("1_r@0", [], finish_reason=FinishReason.ERROR)
        f.replicas["a"].engine.emit_outputs(0, step_of(failed, queries=0), finished=["1_r@0"])
        await until(lambda: streams[1].finished)
        await f.client.abort_requests_async([*f.front.abort_requests(["r"], internal=True), "other"])
        assert f.client.fleet.outcomes == {"failed": 3, "aborted": 1}


@in_loop
async def test_requests_beyond_the_credit_wait_at_the_ingress() -> None:
    async with fleet(settings(protocol={"credit": 1})) as f:
        await f.join("a")
        streams = [await f.front.add(f"r{i}", PROMPT, max_tokens=1) for i in range(3)]
        for i, stream in enumerate(streams):
            await until(partial(is_running, f, "a", f"r{i}@0"))
            assert len(f.client.fleet.waiting) == 2 - i
            f.replicas["a"].engine.step()
            await until(partial(getattr, stream, "finished"))


@in_loop
async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with fleet() as f:
        await f.join("a")
        first = await f.front.add("r0", PROMPT, max_tokens=1)
        await until(lambda: f.running("a") == ["r0@0"])
        f.replicas["a"].server.start_drain(60.0)
        await until(lambda: not f.client.is_ready())
        await f.front.add("r1", PROMPT)
        f.replicas["a"].engine.step()
        await until(lambda: first.finished)
        assert list(f.client.fleet.waiting) == ["r1"]
        await f.join("b")
        await until(lambda: f.running("b") == ["r1@0"])
        assert f.replicas["a"].server.num_attempts() == 0


@in_loop
async def test_a_replica_that_drains_gets_nothing_through_a_link_that_has_just_opened() -> None:
    async with fleet() as f:
        await f.front.add("r", PROMPT)
        draining = f.replicas["a"] = await start_replica(f.settings, "a")
        draining.server.start_drain(60.0)
        f.client.set_members([draining.lease])
        await until(lambda: f.client.fleet.replicas)
        await f.join("b")
        await until(lambda: f.running("b") == ["r@0"])
        assert draining.engine.added == []


@in_loop
async def test_outputs_that_are_none_of_vllms_close_the_link_and_the_request_continues() -> None:
    async with fleet() as f:
        await f.join("a", "b")
        await f.front.add("r", PROMPT)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.emit_outputs(0, [b"\xc1 is no MessagePack"])
        await until(lambda: f.running("b") == ["r@1"])


@in_loop
async def test_a_token_behind_a_frame_that_was_lost_is_taken_from_the_next_replica_together_with_the_lost_one() -> None:
    async with fleet() as f:
        await f.join("a", "b")
        stream = await f.front.add("r", PROMPT, max_tokens=6)
        await until(lambda: f.running("a") == ["r@0"])
        engine = f.replicas["a"].engine
        engine.step(1)
        await until(lambda: len(stream.token_ids) == 1)
        slot, _, token_ids = engine.running["r@0"]
        token_ids += answer([*PROMPT, *token_ids], 1)  # the second token, whose frame comes damaged
        engine.emit_outputs(slot, [b"\xc1 is no MessagePack"])
        engine.step(1)  # the third, in the same piece
        await until(lambda: f.running("b"))
        f.replicas["b"].engine.step(6)
        await until(lambda: stream.finished)
        assert stream.token_ids == answer(PROMPT, 6)


@in_loop
async def test_counters_of_steps_that_give_no_token_reach_vllms_metrics() -> None:
    async with fleet() as f:
        await f.join("a", "b")
        stream = await f.front.add("r", PROMPT, max_tokens=6, frequency_penalty=0.5)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.emit_outputs(0, step_of(queries=128))  # in the middle of a prompt
        f.replicas["a"].engine.step(2)
        await until(lambda: len(stream.token_ids) == 2)
        f.replicas["a"].stop_listening()
        await until(lambda: f.running("b") == ["r@1"])
        repeated = EngineCoreOutput("r@1", answer(PROMPT, 1))
        f.replicas["b"].engine.emit_outputs(0, step_of(repeated, queries=64))
        await until(lambda: [s.prefix_cache_stats.queries for s in f.front.stats if s.prefix_cache_stats.queries] == [128, 64])
        assert len(stream.token_ids) == 2


def step_of(*outputs: EngineCoreOutput, queries: int) -> list[bytes]:
    """Return the buffers of a step that asked the prefix cache for so many tokens."""
    stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1, queries=queries))
    return [bytes(b) for b in MsgpackEncoder().encode(EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats))]


@in_loop
async def test_another_replica_at_the_address_of_a_dead_one_is_not_taken_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as f:
        await f.join("b")
        lease = f.replicas["b"].lease
        stale = type(lease)("a", "replica", lease.model, lease.host, lease.port, epoch=0, pid=0)
        f.client.set_members([stale, lease])
        await until(lambda: "replica b answered" in caplog.text)
        assert f.client.fleet.replicas.keys() == {"b"}
        assert f.client.fleet.outcomes == {}


@in_loop
async def test_a_replica_with_another_fingerprint_is_not_joined(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as f:
        await f.join("a")
        other = type(f)(f.settings, f.front, f.client, f.replicas)
        join = asyncio.create_task(other.join("b", engine=FakeEngine(fingerprint="0" * 16)))
        await until(lambda: "fingerprint of model 'tiny'" in caplog.text)
        join.cancel()
        assert f.client.fleet.replicas.keys() == {"a"}


@in_loop
async def test_a_request_is_refused_at_once_when_the_queue_is_full_and_nothing_of_it_is_left() -> None:
    async with fleet(settings(ingress={"max_waiting_requests": 0})) as f:
        exchange = Exchange("/v1/completions")
        with answering(exchange), pytest.raises(FleetError) as refusal:
            await f.front.add("r", PROMPT)
        assert isinstance(refusal.value.error, QueueFull)
        assert exchange.error is refusal.value.error
        assert refusal.value.http_status == 503
        assert (f.front.request_states, f.client.fleet.requests) == ({}, {})


@in_loop
async def test_a_request_that_waited_too_long_has_the_error_in_its_exchange() -> None:
    async with fleet(settings(timeouts={"no_replica_s": 0})) as f:
        exchange = Exchange("/v1/completions")
        with answering(exchange):
            stream = await f.front.add("r", PROMPT)
        await until(lambda: stream.error)
        assert isinstance(error_of(stream), NoReplica)
        assert exchange.error is error_of(stream)


@in_loop
async def test_a_refusal_says_how_long_the_replicas_of_its_model_took_to_start() -> None:
    async with fleet(settings(ingress={"max_waiting_requests": 0})) as f:
        leases = [Lease(i, "replica", m, "127.0.0.1", 1, epoch=1, pid=0, load=load) for i, m, load in STARTS]
        f.client.set_members(leases)
        with pytest.raises(FleetError) as refusal:
            await f.front.add("r", PROMPT)
        assert refusal.value.error.retry_after_s == 33.0


@in_loop
async def test_the_length_of_a_request_is_bounded_by_the_shortest_linked_replica_and_no_longer_than_it_is_linked() -> None:
    short = FakeEngine(capabilities=msgspec.structs.replace(CAPABILITIES, max_model_len=1000))
    async with fleet() as f:
        model_config = f.front.vllm_config.model_config
        assert model_config.max_model_len == MAX_MODEL_LEN
        await f.join("a")
        await f.join("b", engine=short)
        assert model_config.max_model_len == 1000
        f.replicas["b"].stop_listening()
        await until(lambda: f.client.fleet.replicas.keys() == {"a"})
        assert model_config.max_model_len == CAPABILITIES.max_model_len


@in_loop
async def test_a_request_counts_no_more_tokens_than_the_model_has_room_for() -> None:
    async with fleet() as f:
        await f.front.add("r", PROMPT, max_tokens=10**9)
        assert outstanding_tokens(f.client.fleet) == MAX_MODEL_LEN


@in_loop
async def test_a_stopped_client_closes_its_links_and_dials_no_replica() -> None:
    async with fleet(run=False) as f:
        run = asyncio.create_task(f.client.run())
        await f.join("a")
        await f.front.add("r", PROMPT)
        await until(lambda: f.running("a") == ["r@0"])
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await until(lambda: f.replicas["a"].engine.aborted == ["r@0"])
        await until(lambda: not f.client.fleet.replicas)
        assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("dial")] == []


@in_loop
async def test_a_lease_that_ended_takes_no_link_down() -> None:
    async with fleet() as f:
        await f.join("a")
        f.client.set_members([])
        stream = await f.front.add("r", PROMPT, max_tokens=1)
        await until(lambda: f.running("a") == ["r@0"])
        f.replicas["a"].engine.step()
        await until(lambda: stream.finished)
