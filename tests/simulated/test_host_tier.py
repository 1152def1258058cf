"""KV that falls out of a simulated accelerator's memory is kept in the host's, and comes back in the time of a modelled link."""

import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serve_app.config import ModelSettings
from serve_app.core.cached_points import BlocksRemoved, CachedPoints
from serve_app.core.prompt_hashes import hash_points
from serve_app.engine_args import engine_core_args
from serve_app.replica.kv_params import params_of
from serve_app.simulated.exchange import MemoryExchange
from serve_app.simulated.transfer import Link
from tests.simulated.engine_traffic import Traffic

pytestmark = pytest.mark.engine

BLOCK = 16
BLOCK_BYTES = BLOCK * 131_072
"""KV of a block of the profile's model, as in test_profiles.py."""
PROMPT, ANSWER = 320, 20
NUM_BLOCKS = 40
"""Blocks of the accelerator: two prompts do not fit."""
HOST_GIB = 1.0
STEP_S = 0.01
"""Seconds between two steps, for the copies."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from serve_app.replica import hand_over

    made = Clock()
    monkeypatch.setattr(hand_over, "time", SimpleNamespace(monotonic=made))
    return made


class Engine:
    """An engine with few blocks, whose steps take time."""

    def __init__(self, traffic: Traffic, clock: Clock) -> None:
        self.traffic, self.clock = traffic, clock
        self.scheduler, self.executor = traffic.scheduler, traffic.core.model_executor
        self.num_free = self.free_blocks()

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def step(self) -> None:
        self.clock.now += STEP_S
        self.traffic.step()

    def finish(self, limit: int = 300) -> None:
        """Run until nothing is left to do, copies to the host included."""
        for _ in range(limit):
            if not (self.scheduler.has_requests() or self.traffic.core.batch_queue):
                return
            self.step()
        raise AssertionError(f"not over after {limit} steps: {self.scheduler.get_num_unfinished_requests()} requests")

    def play(self, name: str, first: int, answer: int = ANSWER) -> list[int]:
        """Return the answer to the prompt that begins with ``first``."""
        self.traffic.add(name, prompt=PROMPT, answer=answer, first=first)
        self.finish()
        return self.traffic.answers[name]

    def computed(self, name: str) -> int:
        """Return the tokens that the request's steps computed."""
        return sum(step.get(name, 0) for step in self.traffic.steps)

    def play_others(self) -> None:
        """Play prompts that take all blocks."""
        for number in range(3):
            self.play(f"other{number}", 100 + 50 * number)

    def hand_over(self, name: str, after: int) -> dict[str, Any]:
        """Begin the prompt of ``play(name, 20)``, end it after so many tokens, and return where its KV is."""
        self.traffic.add(name, prompt=PROMPT, answer=ANSWER, first=20)
        while len(self.traffic.answers[name]) < after:
            self.step()
        (output,) = (each for outputs in self.scheduler.hand_over([name]).values() for each in outputs)
        assert output.kv_transfer_params is not None
        return dict(output.kv_transfer_params)

    def go_on(self, name: str, emitted: list[int], params: dict[str, Any]) -> None:
        """Take over a request, by the rules for what other replicas send."""
        kv = params_of(msgspec.msgpack.encode(params), PROMPT + len(emitted), BLOCK, self.clock.now)
        self.traffic.add(name, prompt=PROMPT, emitted=emitted, answer=ANSWER - len(emitted), kv=kv)


@pytest.fixture
def make(make_traffic: Callable[..., Traffic], clock: Clock) -> Callable[..., Engine]:
    """Return a function that makes an engine with the arguments that a configuration gives it."""
    from serve_app.replica.hand_over import handing_over
    from serve_app.simulated.kv_executor import in_virtual_time

    exchange = MemoryExchange()

    def make(*, transfer: str = "none", offload_gib: float = HOST_GIB, **more: Any) -> Engine:
        model = ModelSettings(
            name="m", model="/m", simulated={"profile": "h100-llama-8b"}, kv={"transfer": transfer, "offload_gib": offload_gib}
        )
        arguments = {
            "scheduler_of": handing_over if transfer == "nixl" else lambda it: it,
            "executor_of": functools.partial(in_virtual_time, clock=clock, exchange=exchange),
            "simulated": {"profile": "h100-llama-8b", "time_scale": 1.0},
            "num_gpu_blocks_override": NUM_BLOCKS,
            "enable_prefix_caching": True,
            "kv_transfer_config": engine_core_args(model, "/m").get("kv_transfer_config"),
        }
        return Engine(make_traffic(**arguments | more), clock)

    return make


@pytest.mark.parametrize("transfer", ["none", "nixl"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_that_fell_out_of_the_accelerators_memory_comes_back_from_the_hosts(
    make: Callable[..., Engine], transfer: str, is_async: bool
) -> None:
    engine = make(transfer=transfer, is_async=is_async)
    first = engine.play("first", 20)
    engine.play_others()
    assert engine.play("again", 20) == first
    assert engine.computed("again") < BLOCK + ANSWER
    assert engine.free_blocks() == engine.num_free


def test_without_the_hosts_memory_the_same_prompt_is_computed_again(make: Callable[..., Engine]) -> None:
    engine = make(offload_gib=0.0)
    first = engine.play("first", 20)
    engine.play_others()
    assert engine.play("again", 20) == first
    assert engine.computed("again") >= PROMPT - BLOCK


def test_a_host_with_room_for_one_prompt_forgets_the_older_one(make: Callable[..., Engine]) -> None:
    engine = make(offload_gib=21 * BLOCK_BYTES / 2**30)
    engine.play("first", 20)
    engine.play_others()
    engine.play("again", 20)
    assert engine.computed("again") >= PROMPT - BLOCK


@pytest.mark.parametrize("is_async", [False, True])
def test_the_reported_points_are_those_that_the_next_prompt_finds(make: Callable[..., Engine], is_async: bool) -> None:
    from serve_app.replica.kv_events import KvReporter, events_config, is_reportable

    engine = make(offload_gib=70 * BLOCK_BYTES / 2**30, is_async=is_async, kv_events_config=events_config())
    assert is_reportable(engine.scheduler, 70 * BLOCK)
    assert not is_reportable(engine.scheduler, 0)
    cached, media = CachedPoints(BLOCK), set[str]()

    def note(changed: Any) -> None:
        for report in changed.reports:
            cached.note(report)
            media.update([report.medium] if isinstance(report, BlocksRemoved) else [])

    engine.scheduler.kv_event_publisher = KvReporter(note, {})
    whole = PROMPT - BLOCK, PROMPT - 1
    """Tokens of a whole prompt that need not be computed: on the accelerator whole blocks, from the host all but the last token."""
    found = []
    for turn, first in enumerate([20, 90, 160, 230, 90, 300, 20, 370, 300, 440, 90, 230]):
        hashes = hash_points([first + (7 * i) % 900 for i in range(PROMPT)], BLOCK)
        num_cached = next((n for n, point in enumerate(hashes) if point not in cached.points), len(hashes))
        engine.play(f"turn{turn}", first)
        found.append(PROMPT + ANSWER - 1 - engine.computed(f"turn{turn}"))
        assert found[-1] in (whole if num_cached == len(hashes) else (num_cached * BLOCK,))
        cached.validate()
    assert 0 in found
    assert not {*whole}.isdisjoint(found)
    assert media == {"GPU", "CPU"}, "both tiers forgot something"


def test_a_client_that_leaves_while_its_prompt_comes_back_leaves_no_block_behind(make: Callable[..., Engine]) -> None:
    from vllm.v1.request import RequestStatus

    engine = make()
    first = engine.play("first", 20)
    engine.play_others()
    engine.traffic.add("gone", prompt=PROMPT, answer=ANSWER, first=20)
    engine.traffic.step()
    assert engine.scheduler.requests["gone"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED)
    engine.finish()
    assert engine.free_blocks() == engine.num_free
    assert engine.play("again", 20) == first


def test_a_request_is_handed_over_beside_the_hosts_memory(make: Callable[..., Engine]) -> None:
    source, target = make(transfer="nixl"), make(transfer="nixl")
    whole = make().play("whole", 20)
    params = source.hand_over("r", 5)
    emitted = source.traffic.answers["r"]
    target.go_on("r", emitted, params)
    target.finish()
    assert emitted + target.traffic.answers["r"] == whole
    assert target.computed("r") == ANSWER - len(emitted), "one token for each that came"
    source.finish()
    assert [engine.free_blocks() for engine in (source, target)] == [NUM_BLOCKS - 1] * 2


def test_kv_that_was_freed_while_it_goes_to_the_host_is_copied_before_others_get_its_blocks(make: Callable[..., Engine]) -> None:
    source = make(transfer="nixl")
    whole = make().play("whole", 20)
    source.hand_over("r", 5)
    source.scheduler.free_kv(["r"])
    source.play_others()
    assert source.play("again", 20) == whole
    assert source.computed("again") < BLOCK + ANSWER
    assert source.free_blocks() == source.num_free


def test_a_read_that_was_late_is_made_up_by_the_targets_own_host(make: Callable[..., Engine]) -> None:
    source, target = make(transfer="nixl"), make(transfer="nixl")
    whole = target.play("whole", 20)
    target.play_others()
    params = source.hand_over("r", 5)
    emitted = source.traffic.answers["r"]
    target.go_on("r", emitted, params)
    target.traffic.step()
    target.clock.now += 20.0
    target.finish()
    assert emitted + target.traffic.answers["r"] == whole
    assert target.computed("r") < 3 * BLOCK + ANSWER, "what the target keeps of the prompt is not computed again"
    assert target.free_blocks() == target.num_free


def test_the_engines_statistics_reach_an_ingress_and_say_where_the_tokens_were(make: Callable[..., Engine]) -> None:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    engine = make(log_stats=True)
    step, passed = engine.traffic.core.step_fn, list[EngineCoreOutputs]()

    def noting() -> Any:
        outputs, executed = step()
        passed.extend(MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(each)) for each in outputs.values())
        return outputs, executed

    engine.traffic.core.step_fn = noting
    engine.play("first", 20)
    engine.play_others()
    engine.play("again", 20)
    stats = [each.scheduler_stats for each in passed if each.scheduler_stats is not None]
    hits = Counter[CacheHitSource]()
    for each in stats:
        if each.connector_prefix_cache_stats is not None:
            hits.update(each.connector_prefix_cache_stats.hits_by_source)
    assert PROMPT - BLOCK <= hits[CacheHitSource.HOST] <= PROMPT
    assert hits.keys() == {CacheHitSource.HOST}
    assert any(each.kv_connector_stats for each in stats), "bytes of copies"


def jobs(**groups: Any) -> Any:
    """Return the metadata of a step: by ``stores`` and ``loads`` the blocks of each job, and the jobs to ``flush``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    def made(count: int) -> tuple[Any, Any]:
        return GPULoadStoreSpec(list(range(1, count + 1)), [count], [0]), CPULoadStoreSpec(list(range(count)))

    stores = {number: TransferJob(f"s{number}", *made(count)) for number, count in groups.get("stores", {}).items()}
    loads = {number: TransferJob(f"l{number}", *reversed(made(count))) for number, count in groups.get("loads", {}).items()}
    return OffloadingConnectorMetadata(loads, stores, groups.get("flush"))


def test_copies_of_one_direction_follow_each_other_and_a_step_waits_for_blocks_that_others_get() -> None:
    from serve_app.simulated.host_tier import HostTier

    clock = Clock()
    link = Link(bandwidth_gbit_s=8e-9, latency_us=0, bandwidth_efficiency=1.0)  # a byte a second
    tier = HostTier(link, time_scale=2.0, block_bytes=3, clock=clock)
    assert tier.begin(jobs(stores={1: 1, 2: 2}, loads={3: 4})) == 0.0
    assert tier.next_load_at() == 1024.0
    assert tier.begin(jobs(flush={2})) == 9.0
    clock.now += 6.0
    loaded, report = tier.report()
    assert (loaded, report.completed_jobs if report else None) == (set(), {1: 1})
    clock.now += 18.0
    loaded, report = tier.report()
    assert report is not None
    assert (loaded, report.completed_jobs) == ({"l3"}, {2: 1, 3: 1})
    assert (report.transfer_stats.load.bytes, report.transfer_stats.load.time) == (12, 24.0)
    assert (report.transfer_stats.store.bytes, report.transfer_stats.store.time) == (6, 12.0)
    assert (tier.report(), tier.next_load_at()) == ((set(), None), None)
