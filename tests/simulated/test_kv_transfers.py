"""KV transfers take the modelled time, share links, and fail where a source is dead or keeps nothing; nothing here needs an engine."""

import pytest

from serve_app.simulated.exchange import Exchange, MemoryExchange
from serve_app.simulated.kv_transfers import KvTransfers, Read, Report
from serve_app.simulated.transfer import link_from

BLOCK_BYTES = 1_000_000
LINK = link_from({"bandwidth_gbit_s": 8, "latency_us": 0, "bandwidth_efficiency": 1.0})
"""A block takes 1 ms."""
LEASE_S = 30.0


class FakeClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(engine_id: str, exchange: Exchange, clock: FakeClock, time_scale: float = 1.0) -> KvTransfers:
    return KvTransfers(
        engine_id, exchange, link=LINK, time_scale=time_scale, block_bytes=BLOCK_BYTES, lease_s=LEASE_S, clock=clock
    )


def read(name: str, blocks: int, source: str = "a") -> Read:
    return Read(name, tuple(range(1, blocks + 1)), "127.0.0.1", 1, source, f"{name}@0")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def exchange() -> MemoryExchange:
    return MemoryExchange()


def test_a_read_is_over_after_exactly_its_time_and_then_the_source_is_free(exchange: MemoryExchange, clock: FakeClock) -> None:
    source, target = make("a", exchange, clock), make("b", exchange, clock)
    source.keep("r@0", 40)
    target.read(read("r", 40))
    assert target.next_read_at() == pytest.approx(100.040)
    clock.now = 100.0399
    assert (target.report(), source.report()) == (Report(), Report())
    clock.now = 100.0401
    assert target.report() == Report(received={"r"})
    assert source.report() == Report(sent={"r@0"})
    assert (target.report(), source.report(), target.next_read_at()) == (Report(), Report(), None)


def test_a_target_with_a_part_of_the_prompt_reads_only_the_rest(exchange: MemoryExchange, clock: FakeClock) -> None:
    source, target = make("a", exchange, clock), make("b", exchange, clock, time_scale=10.0)
    source.keep("r@0", 40)
    target.read(read("r", 3))
    assert target.next_read_at() == pytest.approx(100.030)


def test_the_slower_link_of_both_decides(exchange: MemoryExchange, clock: FakeClock) -> None:
    source, target = make("a", exchange, clock, time_scale=5.0), make("b", exchange, clock)
    source.keep("r@0", 10)
    target.read(read("r", 10))
    assert target.next_read_at() == pytest.approx(100.050)


def test_reads_of_one_source_follow_each_other(exchange: MemoryExchange, clock: FakeClock) -> None:
    source, *targets = (make(name, exchange, clock) for name in "abc")
    for name, target in zip(("r", "s"), targets, strict=True):
        source.keep(f"{name}@0", 10)
        target.read(read(name, 10))
    assert [target.next_read_at() for target in targets] == pytest.approx([100.010, 100.020])


def test_reads_of_one_target_follow_each_other_and_a_waiting_one_has_its_source_too(
    exchange: MemoryExchange, clock: FakeClock
) -> None:
    one, two, target, other = (make(name, exchange, clock) for name in "abcd")
    one.keep("r@0", 10)
    two.keep("s@0", 10)
    two.keep("t@0", 10)
    target.read(read("r", 10, "a"))
    target.read(read("s", 10, "b"))
    other.read(read("t", 10, "b"))
    assert other.next_read_at() == pytest.approx(100.030)
    clock.now = 100.0101
    assert target.report() == Report(received={"r"})
    assert target.next_read_at() == pytest.approx(100.020)


def test_a_request_that_is_not_kept_or_not_any_more_fails_at_once(exchange: MemoryExchange, clock: FakeClock) -> None:
    source, target = make("a", exchange, clock), make("b", exchange, clock)
    target.read(read("unknown", 3))
    target.read(read("dead", 3, "nobody"))
    assert target.report() == Report(received={"unknown", "dead"}, failed={"unknown", "dead"})
    source.keep("late@0", 3)
    clock.now += LEASE_S
    target.read(read("late", 3))
    assert target.report() == Report(received={"late"}, failed={"late"})
    assert source.report() == Report(sent={"late@0"})


def test_a_lease_ends_during_a_read_and_the_target_does_not_notice(exchange: MemoryExchange, clock: FakeClock) -> None:
    """`HandingOver` computes such a request again: test_kv_hand_over.py."""
    source, target = make("a", exchange, clock), make("b", exchange, clock, time_scale=10_000.0)
    source.keep("r@0", 4)
    target.read(read("r", 4))
    clock.now += LEASE_S
    assert source.report() == Report(sent={"r@0"})
    clock.now += 10.1
    assert target.report() == Report(received={"r"})
    assert source.report() == Report()


def test_a_source_that_dies_during_a_read_fails_it_and_not_those_that_are_over(
    exchange: MemoryExchange, clock: FakeClock
) -> None:
    source, target = make("a", exchange, clock), make("b", exchange, clock)
    for name, blocks in (("short", 1), ("long", 50)):
        source.keep(f"{name}@0", blocks)
        target.read(read(name, blocks))
    clock.now = 100.002
    source.close()
    assert target.report() == Report(received={"short", "long"}, failed={"long"})


def test_a_target_that_needs_no_block_only_frees_the_source(exchange: MemoryExchange, clock: FakeClock) -> None:
    source, target = make("a", exchange, clock), make("b", exchange, clock)
    source.keep("r@0", 4)
    target.read(read("r", 0))
    assert (target.next_read_at(), target.report(), source.report()) == (None, Report(), Report(sent={"r@0"}))
