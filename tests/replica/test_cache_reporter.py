"""Each ingress hears over its link what a replica has cached, all of it on a new link, and an ingress's routing follows."""

from serve_app.core.cached_points import BlocksRemoved, BlocksStored
from serve_app.core.prompt_hashes import hash_points
from serve_app.links.protocol.messages import CacheDigest
from serve_app.replica import pipe
from tests.doubles.fake_engine import CAPABILITIES
from tests.doubles.fleet import FakeReplica, fleet, in_loop, settings, start_replica, until
from tests.doubles.probe import Probe
from tests.replica.linked import linked

BLOCK = CAPABILITIES.block_size
IDS = list(range(3 * BLOCK))
POINTS = hash_points(IDS, BLOCK)


def stored(begin: int, end: int) -> BlocksStored:
    return BlocksStored("GPU", list(range(begin, end)), begin - 1 if begin else None, IDS[begin * BLOCK : end * BLOCK])


def report(replica: FakeReplica, *reports: BlocksStored | BlocksRemoved) -> None:
    replica.server.on_engine_message(pipe.CacheChanged(list(reports)))


def digests(probe: Probe) -> list[CacheDigest]:
    return [message for message in probe.messages if isinstance(message, CacheDigest)]


@in_loop
async def test_a_replica_without_reports_sends_no_digest_and_one_with_them_sends_changes_together() -> None:
    replica = await start_replica(settings(), "a")
    probe = await linked(replica)
    replica.server.send_heartbeats()
    await until(lambda: len(probe.messages) >= 2)
    assert digests(probe) == []
    report(replica, stored(0, 1))
    report(replica, stored(1, 2))
    await until(lambda: digests(probe))
    report(replica, stored(2, 3), BlocksRemoved("GPU", [1]))
    await until(lambda: len(digests(probe)) >= 2)
    assert digests(probe) == [CacheDigest(0, True, POINTS[:2], []), CacheDigest(1, False, [], [POINTS[1], POINTS[2]])]
    late = await linked(replica)
    await until(lambda: digests(late))
    assert digests(late) == [CacheDigest(0, True, POINTS[:1], [])]
    await replica.close()


@in_loop
async def test_a_link_that_was_full_is_told_all_when_it_has_room() -> None:
    limits = {"max_frame_bytes": 1 << 20, "send_buffer_bytes": 1 << 20, "heartbeat_timeout_s": 60.0}
    replica = await start_replica(settings(protocol=limits), "a")
    slow, other = await linked(replica, max_frame_bytes=1 << 20), await linked(replica, max_frame_bytes=1 << 20)
    report(replica, stored(0, 1))
    await until(lambda: digests(slow) and digests(other))
    slow.pause()
    for _ in range(32):  # more than the buffers of four sockets hold
        replica.engine.emit_outputs(0, [b"x" * (1 << 19)])
    assert replica.server._links[0].is_full()
    report(replica, stored(1, 2))
    await until(lambda: len(digests(other)) >= 2)
    slow.link._transport.resume_reading()
    await until(lambda: len(digests(slow)) >= 2)
    assert digests(slow) == [CacheDigest(0, True, POINTS[:1], []), CacheDigest(1, True, POINTS[:2], [])]
    assert digests(other) == [CacheDigest(0, True, POINTS[:1], []), CacheDigest(1, False, [POINTS[1]], [])]
    await replica.close()


@in_loop
async def test_an_ingress_knows_what_others_asked_and_forgets_it_with_the_link() -> None:
    async with fleet() as under_test:
        await under_test.join("a", "b")
        index = under_test.client.fleet._routing.index  # type: ignore[attr-defined]
        report(under_test.replicas["b"], stored(0, 3))
        await until(lambda: index.count("b", POINTS) == 3)
        assert index.deepest(POINTS) == (3, {"b"})
        under_test.replicas["b"].relay.cut()
        await until(lambda: index.count("b", POINTS) == 0)
        await until(lambda: index.count("b", POINTS) == 3)
