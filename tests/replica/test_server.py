"""A replica's listener runs with a fake engine behind it; the peers are real links and raw connections."""

import asyncio
import contextlib
import math
from pathlib import Path

import pytest
import ray

from serve_app.config import parse_settings
from serve_app.core.load import EngineLoad
from serve_app.errors import ListenFailed
from serve_app.host import descriptors
from serve_app.ingress.fleet.link import dial
from serve_app.links.protocol.connection import IngressConnection, LinkState
from serve_app.links.protocol.errors import HandshakeTimeout, MalformedMessage, PeerClosed
from serve_app.links.protocol.frames import FrameDecoder
from serve_app.links.protocol.messages import Goodbye, Heartbeat, Message, Outputs, decode_message
from serve_app.replica import pipe, server
from serve_app.replica.deployment import reachable_address
from serve_app.replica.server import MAX_UNPROVED, ReplicaIdentity, ReplicaServer
from tests.doubles.fake_engine import answer
from tests.doubles.fleet import FakeReplica, fleet, in_loop, settings, start_replica, until
from tests.doubles.probe import Probe
from tests.replica.linked import add, linked, recorded


@in_loop
async def test_a_fixed_port_is_listened_on_and_a_taken_one_is_named() -> None:
    first = await start_replica(settings(), "a")
    model = {"model": "/models/tiny", "replicas_per_node": 1}
    fixed = parse_settings({"models": {"tiny": model}, "protocol": {"port": first.port}})
    with pytest.raises(ListenFailed, match=rf"^cannot listen on 127.0.0.1:{first.port}: .*; set protocol.port to a free port$"):
        await start_replica(fixed, "b")
    await first.close()
    second = await start_replica(fixed, "b")
    assert second.port == first.port
    await second.close()


@in_loop
async def test_replicas_that_share_a_gpu_listen_on_one_port_after_the_other() -> None:
    first = await start_replica(settings(), "a")
    fixed = parse_settings({"models": {"tiny": {"model": "/m", "replicas_per_node": 1}}, "protocol": {"port": first.port}})
    second = ReplicaServer(ReplicaIdentity("b", model="tiny"), fixed.protocol, b"", first.engine, first.engine.ready)
    with pytest.raises(ListenFailed, match=rf":{first.port}: .*; set protocol.port to a free port$"):
        await second.listen(1)
    assert first.port < await second.listen(8) < first.port + 8
    await second.close("drained", "the test is over")
    await first.close()
    assert await second.listen(8) == first.port
    await second.close("drained", "the test is over")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
@in_loop
async def test_a_replica_on_every_address_is_reached_by_either_family(tmp_path: Path, loopback: str) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    protocol = {"host": "::", "cluster_token_file": str(tmp_path / "token")}
    replica = await start_replica(settings(protocol=protocol), "a")
    probe = Probe()
    assert (await dial((loopback, replica.port), probe.new_link, timeout_s=30.0, tls=None)).is_open()
    await replica.close()


@pytest.mark.parametrize(
    ("host", "address"), [("0.0.0.0", "fd00::1"), ("::", "fd00::1"), ("fd00::2", "fd00::2"), ("127.0.0.1", "127.0.0.1")]
)
def test_the_lease_of_a_replica_on_every_address_has_its_nodes_address(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "fd00::1")
    assert reachable_address(host) == address


def goodbyes(wire: bytes) -> list[Message]:
    return [decode_message(body) for body in FrameDecoder(1 << 20).receive_data(wire)]


@in_loop
async def test_two_ingresses_get_each_its_own_outputs() -> None:
    values = settings()
    replica = await start_replica(values, "a")
    async with fleet(values) as one, fleet(values) as two:
        for f in (one, two):
            f.client.set_members([replica.lease])
            await until(f.client.is_ready)
        first = await one.front.add("r1", [1], max_tokens=2)
        second = await two.front.add("r2", [2], max_tokens=2)
        await until(lambda: len(replica.engine.running) == 2)
        assert replica.server.num_attempts() == 2
        replica.engine.step(2)
        await until(lambda: first.finished and second.finished)
        assert (first.token_ids, second.token_ids) == (answer([1], 2), answer([2], 2))
        assert replica.server.num_attempts() == 0
    await replica.close()


@in_loop
async def test_messages_go_to_the_engine_with_the_slot_of_their_link() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        _, probe = await linked(replica), await linked(replica)
        add(probe, "r@0")
        probe.link.write(probe.link.connection.send_add("s@1", [b"request"], 7, kv=b"kv"))
        probe.link.write(probe.link.connection.send_hand_over("s@1"))
        probe.link.write(probe.link.connection.send_free_kv("earlier@0"))
        probe.link.write(probe.link.connection.send_abort(["r@0", "unknown@3"]))
        await until(lambda: len(received) == 5)
    assert received == [
        pipe.AddToEngine(1, "r@0", [b"request"], 0),
        pipe.AddToEngine(1, "s@1", [b"request"], 7, b"kv"),
        pipe.HandOverInEngine(["s@1"]),
        pipe.FreeKvInEngine(["earlier@0"]),
        pipe.AbortInEngine(["r@0", "unknown@3"]),
    ]
    await replica.close()


@in_loop
async def test_what_a_lost_ingress_left_unfinished_is_aborted() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        probe = await linked(replica)
        for attempt_id in ("r1@0", "r0@0", "done@0"):
            add(probe, attempt_id)
        await until(lambda: replica.server.num_attempts() == 3)
        replica.engine.emit_outputs(0, [b"step"], finished=["done@0"])
        replica.relay.cut()
        await until(lambda: len(received) == 4)
    assert received[3] == pipe.AbortInEngine(["r0@0", "r1@0"])
    assert replica.server.num_attempts() == 0
    replica.engine.emit_outputs(0, [b"for no link"])
    await replica.close()


@pytest.mark.parametrize(("second", "credit", "code"), [("r@0", 8, "duplicate_attempt"), ("other@0", 1, "credit_exceeded")])
@in_loop
async def test_an_ingress_that_breaks_the_rules_of_attempts_is_cut_off(second: str, credit: int, code: str) -> None:
    replica = await start_replica(settings(protocol={"credit": credit}), "a")
    with recorded(replica) as received:
        guilty = await linked(replica)
        frame = guilty.link.connection.send_add("r@0", [b"request"])
        guilty.link.connection.attempts.clear()
        guilty.link.write(frame + guilty.link.connection.send_add(second, [b"request"]))
        await until(lambda: guilty.lost)
        assert guilty.lost[0].startswith(f"the peer closed the link ({code})")
        # The first was taken in the same piece of data: the link's end aborts it.
        await until(lambda: not replica.server._links)
        assert [m for m in received if isinstance(m, pipe.AbortInEngine)] == [pipe.AbortInEngine(["r@0"])]
    await replica.close()


@pytest.mark.parametrize("fault", [b"", b"\0\0\0\1\xc1"], ids=["goodbye", "protocol-error"])
@in_loop
async def test_an_abort_that_came_in_one_piece_with_the_links_end_reaches_the_engine(fault: bytes) -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        probe = await linked(replica)
        for attempt_id in ("aborted@0", "left@0"):
            add(probe, attempt_id)
        await until(lambda: len(received) == 2)
        connection = probe.link.connection
        abort = connection.send_abort(["aborted@0"])
        probe.link.write(abort + (fault or connection.close("ingress_stopped", "")))
        await until(lambda: not replica.server._links)
        assert received[2:] == [pipe.AbortInEngine(["aborted@0"]), pipe.AbortInEngine(["left@0"])]
    await replica.close()


@in_loop
async def test_a_heartbeat_reports_the_load_and_a_drain_is_reported_at_once() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        probe = await linked(replica)
        add(probe, "r@0")
        await until(lambda: received)
        replica.server.on_engine_message(pipe.StepOutputs(5, EngineLoad(9, 3, 2, 1.5), 0.0, [], b"no such slot", 1))
        replica.server.start_drain(60.0)
        await until(lambda: len(probe.messages) == 2)
    before, after = probe.messages
    assert before == Heartbeat(0, 0, 0, 0.0, draining=False, drain_left_s=0.0, sleeping=False)
    assert isinstance(after, Heartbeat)
    assert 0.0 < after.drain_left_s <= 60.0
    assert after == Heartbeat(9, 3, 2, 1.0, draining=True, drain_left_s=after.drain_left_s, sleeping=False)
    await replica.close()


@pytest.mark.parametrize(("kept", "wait_s", "least_s"), [([], math.inf, 0.0), (["r@0"], 0.3, 0.3)])
@in_loop
async def test_a_drain_lasts_until_kv_that_was_handed_over_can_have_been_read(
    monkeypatch: pytest.MonkeyPatch, kept: list[str], wait_s: float, least_s: float
) -> None:
    monkeypatch.setattr(server, "_WAIT_FOR_READS_S", wait_s)
    replica = await start_replica(settings(), "a")
    with recorded(replica):
        ended = asyncio.get_running_loop().time()
        replica.server.on_engine_message(pipe.StepOutputs(0, EngineLoad(1), 0.0, ["r@0"], b"", 1, kept))
        await replica.server.drain(60.0)
    assert asyncio.get_running_loop().time() - ended >= least_s
    await replica.close()


@in_loop
async def test_a_drain_ends_when_the_ingresses_have_said_that_all_kv_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_WAIT_FOR_READS_S", math.inf)
    replica = await start_replica(settings(), "a")
    with recorded(replica):
        probe = await linked(replica)
        replica.server.on_engine_message(pipe.StepOutputs(1, EngineLoad(1), 0.0, ["r@0", "s@0"], b"", 0, ["r@0", "s@0"]))
        draining = asyncio.create_task(replica.server.drain(60.0))
        probe.link.write(probe.link.connection.send_free_kv("s@0"))
        await until(lambda: replica.server.kept == {"r@0"})
        assert not draining.done()
        probe.link.write(probe.link.connection.send_free_kv("r@0"))
        await draining
    await replica.close()


@in_loop
async def test_a_drain_that_begins_between_connection_and_hello_is_in_the_challenge() -> None:
    replica = await start_replica(settings(), "a")
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
    await until(lambda: replica.server._unproved)
    replica.server.start_drain(60.0)
    ingress = Probe().new_connection()
    writer.write(ingress.initiate())
    while ingress.peer is None:
        ingress.receive_data(await reader.read(1 << 16))
    assert ingress.peer.draining
    writer.close()
    await replica.close()


@in_loop
async def test_the_first_output_is_one_with_tokens_that_goes_to_an_ingress() -> None:
    replica = await start_replica(settings(), "a")
    await linked(replica)
    for slot, num_outputs in ((5, 1), (0, 0)):  # for no link, and the load without outputs
        replica.server.on_engine_message(pipe.StepOutputs(slot, EngineLoad(1, 1, 0, 0.5), 0.0, [], b"", num_outputs))
        assert not replica.server.first_output.is_set()
    replica.engine.emit_outputs(0, [b"token"])
    assert replica.server.first_output.is_set()
    await replica.close()


@in_loop
async def test_a_slow_reader_is_cut_off_at_the_limit_and_no_other() -> None:
    limits = {"max_frame_bytes": 1 << 20, "send_buffer_bytes": 1 << 20, "heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 0.5}
    replica = await start_replica(settings(protocol=limits), "a")
    slow, other = await linked(replica), await linked(replica)
    slow.pause()
    for _ in range(32):  # more than the buffers of four sockets hold
        replica.engine.emit_outputs(0, [b"x" * (1 << 19)])

    def one_is_cut_off() -> bool:
        for probe in (slow, other):
            probe.link.write(probe.link.connection.ping())  # neither is silent
        return len(replica.server._links) == 1

    await until(one_is_cut_off)
    replica.engine.emit_outputs(1, [b"y"])
    await until(lambda: len(other.messages) == 2)
    assert other.messages[1] == Outputs([b"y"])
    await replica.close()


@in_loop
async def test_outputs_that_are_together_larger_than_the_send_buffer_cost_no_link() -> None:
    replica = await start_replica(settings(protocol={"max_frame_bytes": 1 << 20, "send_buffer_bytes": 1 << 20}), "a")
    probe = await linked(replica)
    for _ in range(32):  # no await between them: the first has not left when the last is written
        replica.engine.emit_outputs(0, [b"x" * (1 << 19)])
    await until(lambda: len(probe.messages) == 1 + 32)
    assert probe.link.is_open()
    await replica.close()


@in_loop
async def test_a_peer_that_says_nothing_gets_a_goodbye() -> None:
    replica = await start_replica(settings(protocol={"handshake_timeout_s": 0.05}), "a")
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.lease.port)
    late = HandshakeTimeout(limit_s=0.05)
    assert goodbyes(await reader.read()) == [Goodbye("handshake_timeout", str(late))]
    await until(lambda: not replica.server._links)
    writer.close()
    await replica.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\0\0\0"])
@in_loop
async def test_garbage_closes_the_connection_and_the_replica_serves_on(garbage: bytes) -> None:
    replica = await start_replica(settings(), "a")
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.lease.port)
    writer.write(garbage)
    writer.write_eof()
    (goodbye,) = goodbyes(await reader.read())
    assert isinstance(goodbye, Goodbye)
    writer.close()
    await linked(replica)
    await replica.close()


async def handshake_begun(replica: FakeReplica) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, IngressConnection]:
    """Return a connection, past the relay, whose Challenge has come and whose Proof waits to be sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
    connection = Probe().new_connection()
    writer.write(connection.initiate())
    while connection.state is LinkState.HANDSHAKE:
        connection.receive_data(await reader.read(1 << 16))
    return reader, writer, connection


@in_loop
async def test_connections_that_prove_nothing_keep_no_ingress_out_and_the_oldest_is_dropped() -> None:
    replica = await start_replica(settings(protocol={"max_ingresses": 2}), "a")
    idle = [await asyncio.open_connection("127.0.0.1", replica.port) for _ in range(MAX_UNPROVED + 1)]
    with contextlib.suppress(ConnectionError):
        assert await idle[0][0].read() == b""
    probe = await linked(replica)
    assert (probe.link.is_open(), len(replica.server._unproved)) == (True, MAX_UNPROVED - 1)
    for _, writer in idle:
        writer.close()
    await until(lambda: not replica.server._unproved)
    await replica.close()


@in_loop
async def test_with_few_descriptors_left_each_connection_drops_the_oldest_one_that_has_proved_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = await start_replica(settings(), "a")
    old = [await asyncio.open_connection("127.0.0.1", replica.port) for _ in range(3)]
    await until(lambda: len(replica.server._unproved) == 3)
    monkeypatch.setattr(descriptors, "limit", lambda: old[0][1].get_extra_info("socket").fileno() + descriptors.SPARE)
    for reader, _ in old:
        probe = await linked(replica)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert probe.link.is_open()
    assert (len(replica.server._unproved), len(list(replica.server.open_links()))) == (0, 3)
    for _, writer in old:
        writer.close()
    await replica.close()


@in_loop
async def test_of_two_handshakes_for_the_last_slot_the_slower_is_refused_and_starts_nothing() -> None:
    replica = await start_replica(settings(protocol={"max_ingresses": 2}), "a")
    with recorded(replica) as received:
        await linked(replica)
        reader, writer, slower = await handshake_begun(replica)
        first = await linked(replica)
        writer.write(slower.data_to_send() + slower.send_add("r@0", [b"request"]))
        with pytest.raises(PeerClosed) as refusal:
            slower.receive_data(await reader.read())
        await until(lambda: not replica.server._unproved)
    assert (refusal.value.peer_code, received) == ("slots_exhausted", [])
    assert first.link.is_open()
    writer.close()
    await replica.close()


@in_loop
async def test_a_stop_says_goodbye_on_every_link_and_accepts_no_other() -> None:
    replica = await start_replica(settings(), "a")
    probes = [await linked(replica), await linked(replica)]
    await replica.server.close("drained", "the replica stopped")
    await until(lambda: all(p.lost for p in probes))
    assert [p.lost for p in probes] == [["the peer closed the link (drained): 'the replica stopped'"]] * 2
    with pytest.raises((OSError, MalformedMessage)):  # refused, or reset by the relay in front
        await Probe().connect(replica.lease.port)
    await replica.close()


@in_loop
async def test_heartbeats_continue_until_cancelled() -> None:
    limits = {"heartbeat_interval_s": 0.01, "heartbeat_timeout_s": 60.0}
    replica = await start_replica(settings(protocol=limits), "a")
    probe = await linked(replica)
    heartbeats = asyncio.create_task(replica.server.heartbeats())
    await until(lambda: len(probe.messages) > 3)
    heartbeats.cancel()
    with pytest.raises(asyncio.CancelledError):
        await heartbeats
    assert probe.link.is_open()
    await replica.close()
