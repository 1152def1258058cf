"""A simulated engine reads the KV of a request that another one hands over, in the time of the modelled link and with vLLM's scheduler."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serve_app.engine_args import KV_LEASE_S, SIMULATED_CONNECTOR
from serve_app.replica.kv_params import params_of
from serve_app.replica.side_channel import reserve
from serve_app.simulated.exchange import Exchange, MemoryExchange
from serve_app.simulated.tcp_exchange import TcpExchange
from tests.simulated.engine_traffic import Traffic

pytestmark = pytest.mark.engine

BLOCK = 16
PROMPT, ANSWER = 320, 40
TIME_SCALE = 1e-6
_BLOCK_BITS = BLOCK * 131_072 * 8
"""KV of a block of the profile's model, as in test_profiles.py."""
BLOCK_S = 0.25
"""Seconds that a read takes for each block, so that a whole one ends within half of the lease."""
LINK = {"bandwidth_gbit_s": _BLOCK_BITS * TIME_SCALE / BLOCK_S / 1e9, "latency_us": 0, "bandwidth_efficiency": 1.0}
SIMULATED = {"profile": "h100-llama-8b", "link": LINK, "time_scale": TIME_SCALE}
NUM_BLOCKS = 21
"""Blocks of a prompt and five tokens."""
READ_S = NUM_BLOCKS * BLOCK_S


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An engine whose transfers have the clock of the test."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic, self.scheduler = traffic, traffic.scheduler
        self.executor = traffic.core.model_executor
        self.num_free = self.free_blocks()

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def begin(self, name: str, tokens: int = 5) -> None:
        """Run a request until it has so many tokens."""
        self.traffic.add(name, prompt=PROMPT, answer=ANSWER)
        while len(self.traffic.answers[name]) < tokens:
            self.traffic.step()

    def hand_over(self, name: str) -> dict[str, Any]:
        """End a request, and return where its KV is."""
        outputs = [output for frame in self.scheduler.hand_over([name]).values() for output in frame]
        (params,) = (output.kv_transfer_params for output in outputs)
        assert params is not None
        return dict(params)

    def go_on(self, name: str, source: "Engine", params: dict[str, Any], now: float) -> None:
        """Take over a request, by the rules for what other replicas send."""
        emitted = source.traffic.answers[name]
        num_tokens = PROMPT + len(emitted)
        kv = params_of(msgspec.msgpack.encode(params), num_tokens, BLOCK, now)
        self.traffic.add(name, prompt=PROMPT, emitted=emitted, answer=ANSWER - len(emitted), kv=kv)

    def steps_of(self, name: str) -> list[int]:
        """Return the tokens of the steps that the request was in."""
        return [step[name] for step in self.traffic.steps if name in step]

    def assert_empty(self) -> None:
        self.traffic.finish()
        assert self.free_blocks() == self.num_free


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    from serve_app.replica import hand_over

    made = FakeClock()
    monkeypatch.setattr(hand_over, "time", SimpleNamespace(monotonic=made))
    return made


@pytest.fixture
def make(make_traffic: Callable[..., Traffic], clock: FakeClock) -> Callable[..., Engine]:
    """Return a function that makes an engine; all share one exchange if they get no other."""
    from serve_app.replica.hand_over import handing_over
    from serve_app.simulated.kv_executor import in_virtual_time

    shared = MemoryExchange()
    numbers = itertools.count()

    def make(exchange: Exchange = shared, **more: Any) -> Engine:
        transfer = {
            **SIMULATED_CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": f"engine{next(numbers)}",
            "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_S},
        }
        arguments = {
            "scheduler_of": handing_over,
            "executor_of": functools.partial(in_virtual_time, clock=clock, exchange=exchange),
            "simulated": SIMULATED,
            "kv_transfer_config": transfer,
        }
        return Engine(make_traffic(**arguments, **more))

    return make


def answer(make: Callable[..., Engine]) -> list[int]:
    """Return the answer of an engine that nothing disturbs."""
    alone = make()
    alone.begin("r", ANSWER)
    return alone.traffic.answers["r"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_was_handed_over_goes_on_after_exactly_the_time_of_its_read(
    make: Callable[..., Engine], clock: FakeClock, is_async: bool
) -> None:
    source, target = make(is_async=is_async), make(is_async=is_async)
    assert source.scheduler.keeps_kv()
    source.begin("r")
    params = source.hand_over("r")
    source.traffic.step(3)
    assert source.num_free - source.free_blocks() == NUM_BLOCKS
    target.go_on("r", source, params, clock.now)
    target.traffic.step(3)
    assert target.executor.next_read_at() == pytest.approx(1000.0 + READ_S)
    clock.now = 1000.0 + READ_S - 0.01
    target.traffic.step(3)
    assert target.steps_of("r") == []
    assert target.scheduler.has_requests()  # so that vLLM's loop steps on
    clock.now = 1000.0 + READ_S + 0.01
    target.traffic.step(3)
    assert target.steps_of("r")[0] == 1
    target.traffic.finish()
    assert source.traffic.answers["r"] + target.traffic.answers["r"] == answer(make)
    for engine in (source, target):
        engine.assert_empty()


def test_the_output_of_a_virtual_step_says_that_a_read_is_over(make: Callable[..., Engine], clock: FakeClock) -> None:
    source, target = make(), make()
    source.begin("r")
    target.go_on("r", source, source.hand_over("r"), clock.now)
    target.traffic.step()
    clock.now = target.executor.next_read_at() or 0.0
    planned = target.scheduler.schedule()
    made, step_s = target.executor._step(planned)
    assert (planned.total_num_scheduled_tokens, step_s, made.kv_connector_output.finished_recving) == (0, 0.0, {"r"})
    assert made.kv_connector_output.failed_recving == set()
    target.scheduler.update_from_output(planned, made)
    assert target.executor.next_read_at() is None
    target.assert_empty()
    source.assert_empty()


def test_a_read_beside_a_step_with_a_grammar_is_reported_too(make: Callable[..., Engine], clock: FakeClock) -> None:
    source, target = make(), make()
    source.begin("r")
    target.go_on("r", source, source.hand_over("r"), clock.now)
    target.traffic.add("digits", prompt=10, answer=200, regex="[0-9]{400}")
    while not target.steps_of("digits"):
        target.traffic.step()
    clock.now += 2 * READ_S
    target.traffic.step(2)
    assert target.steps_of("r")[0] == 1
    target.assert_empty()
    source.assert_empty()


def test_two_reads_of_one_source_follow_each_other(make: Callable[..., Engine], clock: FakeClock) -> None:
    source, *targets = (make() for _ in range(3))
    for name, target in zip(("r", "s"), targets, strict=True):
        source.begin(name)
        target.go_on(name, source, source.hand_over(name), clock.now)
        target.traffic.step()
    ends = [target.executor.next_read_at() for target in targets]
    assert ends == pytest.approx([1000.0 + READ_S, 1000.0 + 2 * READ_S])
    for engine, now in zip(targets, ends, strict=True):
        clock.now = now
        engine.assert_empty()
    source.assert_empty()


@pytest.mark.parametrize("fault", ["dead", "dies", "lease over"])
def test_without_its_source_a_request_is_computed_and_its_answer_is_the_same(
    make: Callable[..., Engine], clock: FakeClock, fault: str
) -> None:
    source, target = make(), make()
    source.begin("r")
    params = source.hand_over("r")
    if fault == "dead":
        source.executor.shutdown()
    elif fault == "lease over":
        clock.now += KV_LEASE_S
        source.assert_empty()
    target.go_on("r", source, params, clock.now)
    target.traffic.step()
    if fault == "dies":
        source.executor.shutdown()
    target.traffic.step(2)
    assert target.steps_of("r")[0] == PROMPT + 5
    target.assert_empty()
    assert source.traffic.answers["r"] + target.traffic.answers["r"] == answer(make)


def test_a_late_read_is_computed_again(make: Callable[..., Engine], clock: FakeClock) -> None:
    source, target = make(), make()
    source.begin("r")
    target.go_on("r", source, source.hand_over("r"), clock.now)
    target.traffic.step()
    clock.now += KV_LEASE_S / 2 + 1  # the read is over long since, which no step has noticed
    target.traffic.step(2)
    assert target.steps_of("r") == [PROMPT + 5]
    target.assert_empty()
    source.assert_empty()


def test_kv_that_was_freed_early_leaves_nothing_behind_when_its_lease_ends(make: Callable[..., Engine], clock: FakeClock) -> None:
    source = make()
    source.begin("r")
    source.hand_over("r")
    source.scheduler.free_kv(["r"])
    assert source.free_blocks() == source.num_free
    clock.now += KV_LEASE_S + 1
    source.begin("s")
    assert not source.scheduler._freed, "the workers have reported the end of the lease"
    source.assert_empty()


def test_a_request_that_ends_before_or_during_its_read_leaves_no_block_behind(
    make: Callable[..., Engine], clock: FakeClock
) -> None:
    source, target = make(), make()
    for name in ("before", "during"):
        source.begin(name)
        target.go_on(name, source, source.hand_over(name), clock.now)
        if name == "during":
            target.traffic.step()
        target.traffic.core.abort_requests([name])
    target.traffic.step()
    source.traffic.step()
    assert source.scheduler.requests.keys() == {"during"}
    clock.now += READ_S
    target.assert_empty()
    source.assert_empty()


def test_a_target_with_the_prompt_in_its_prefix_cache_reads_only_the_rest(make: Callable[..., Engine], clock: FakeClock) -> None:
    source, target = make(), make(enable_prefix_caching=True)
    target.begin("other", 1)  # the same prompt
    source.begin("r", 20)
    target.go_on("r", source, source.hand_over("r"), clock.now)
    target.traffic.step()
    assert target.executor.next_read_at() == pytest.approx(
        1000.0 + 2 * BLOCK_S
    )  # 340 tokens: 22 blocks, of which 20 are the prompt's
    clock.now += READ_S
    target.assert_empty()
    source.assert_empty()


def test_engines_reach_each_other_over_tcp_on_their_side_channels(make: Callable[..., Engine], clock: FakeClock) -> None:
    with contextlib.ExitStack() as sockets:
        channels = [reserve("127.0.0.1", range(23900, 23964), "key") for _ in range(2)]
        for channel in channels:
            sockets.enter_context(channel.sock)
        source, target = (make(TcpExchange(channel.host, channel.port)) for channel in channels)
        source.begin("r")
        # vLLM has read the variables of the side channel once in this process, where both engines are.
        params = source.hand_over("r") | {"remote_host": channels[0].host, "remote_port": channels[0].port}
        target.go_on("r", source, params, clock.now)
        while target.executor.next_read_at() is None:
            assert target.steps_of("r") == []
            target.traffic.step()
        assert target.executor.next_read_at() == pytest.approx(1000.0 + READ_S)
        clock.now += READ_S
        target.assert_empty()
        assert target.steps_of("r")[0] == 1
        source.assert_empty()  # as soon as it hears of the end
        for engine in (source, target):
            engine.executor.shutdown()
