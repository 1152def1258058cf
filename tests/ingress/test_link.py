import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.events import LinkEnd
from serve_app.core.load import EngineLoad
from serve_app.errors import ServingError
from serve_app.ingress.fleet.link import MAX_TOGETHER, ReplicaLink
from serve_app.links.protocol.connection import LinkState
from serve_app.links.protocol.errors import AuthenticationFailed, HandshakeTimeout, PeerClosed
from serve_app.links.protocol.messages import Heartbeat
from serve_app.replica import pipe
from tests.doubles.fake_engine import CAPABILITIES
from tests.doubles.fleet import in_loop, settings, start_replica, until
from tests.doubles.probe import Probe, port_of, silent_listener

TOKEN = b"sixteen bytes or more"


@in_loop
async def test_a_dial_ends_with_an_open_link_that_knows_its_peer() -> None:
    replica = await start_replica(settings(), "a", token=TOKEN)
    probe = Probe(token=TOKEN)
    link = await probe.connect(replica.lease.port)
    assert (link.is_open(), link.replica_id, probe.opened) == (True, "a", 1)
    assert link.connection.peer is not None
    assert (link.connection.peer.credit, link.connection.peer.capabilities) == (2048, CAPABILITIES)
    await until(lambda: probe.messages)
    assert probe.messages == [Heartbeat(0, 0, 0, 0.0, draining=False, drain_left_s=0.0, sleeping=False)]
    link.close("test_over", "enough")
    await until(lambda: probe.lost)
    await until(lambda: not list(replica.server.open_links()))
    assert (probe.lost, probe.ended) == (["enough"], [LinkEnd.ENDED_HERE])
    await replica.close()


@pytest.mark.parametrize(
    ("changes", "peer_code"),
    [
        ({"model": "other"}, "wrong_model"),
        ({"fingerprint": "0" * 16}, "fingerprint_mismatch"),
        ({"vllm_version": "0.31.0"}, "version_mismatch"),
    ],
)
@in_loop
async def test_a_replica_that_is_not_the_expected_one_says_why(changes: dict[str, Any], peer_code: str) -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe(**changes)
    with pytest.raises(PeerClosed) as refusal:
        await probe.connect(replica.lease.port)
    assert refusal.value.peer_code == peer_code
    assert (probe.opened, probe.lost, probe.link.connection.state) == (0, [], LinkState.CLOSED)
    await replica.close()


@in_loop
async def test_a_replica_with_another_token_is_refused_and_learns_why() -> None:
    replica = await start_replica(settings(), "a", token=TOKEN)
    probe = Probe(token=b"another token, as long")
    with pytest.raises(AuthenticationFailed):
        await probe.connect(replica.lease.port)
    await until(lambda: not replica.server._links)
    assert (probe.opened, probe.lost) == (0, [])
    await replica.close()


@in_loop
async def test_the_first_frames_of_a_burst_do_not_wait_for_its_last() -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe()
    link = await probe.connect(replica.lease.port)
    written: list[bytes] = []
    stands_in: Any = SimpleNamespace(write=written.append, is_closing=lambda: False, get_write_buffer_size=lambda: 0)
    transport, link._transport = link._transport, stands_in
    for _ in range(MAX_TOGETHER + 1):
        link.write(b"x")
    assert written == [b"x" * MAX_TOGETHER]
    await asyncio.sleep(0)
    assert written == [b"x" * MAX_TOGETHER, b"x"]
    transport.abort()
    await until(lambda: probe.lost)
    await replica.close()


@in_loop
async def test_frames_of_one_turn_of_the_loop_are_one_write_and_go_before_a_goodbye() -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe()
    link = await probe.connect(replica.lease.port)
    written: list[bytes] = []
    stands_in: Any = SimpleNamespace(
        write=written.append, close=lambda: None, is_closing=lambda: False, get_write_buffer_size=lambda: 0
    )
    transport, link._transport = link._transport, stands_in
    link.write(b"one ")
    link.write(b"two")
    await asyncio.sleep(0)
    link.write(b"three ")
    link.close("test_over", "enough")
    await asyncio.sleep(0)
    assert written[0] == b"one two"
    assert (len(written), written[1].startswith(b"three "), b"test_over" in written[1]) == (2, True, True)
    transport.abort()
    await until(lambda: probe.lost)
    await replica.close()


@in_loop
async def test_one_ingress_too_many_learns_why_it_is_refused() -> None:
    replica = await start_replica(settings(protocol={"max_ingresses": 2}), "a")
    first, second, third = Probe(), Probe(), Probe()
    for probe in (first, second):
        await probe.connect(replica.lease.port)
    await until(lambda: first.messages and second.messages)
    with pytest.raises(PeerClosed, match="all 2 ingress slots are taken"):
        await third.connect(replica.lease.port)
    first.link.close("test_over", "")
    await until(lambda: len(replica.server._links) == 1)
    await Probe().connect(replica.lease.port)
    await replica.close()


@in_loop
async def test_a_peer_that_says_nothing_is_left_after_the_limit() -> None:
    server, readers = await silent_listener()
    with pytest.raises(HandshakeTimeout):
        await Probe().connect(port_of(server), timeout_s=0.5)
    await readers[0].read()  # to the end of the stream
    server.close()


@in_loop
async def test_a_cancelled_dial_leaves_no_connection() -> None:
    server, readers = await silent_listener()
    probe = Probe()
    dialing = asyncio.create_task(probe.connect(port_of(server)))
    await until(lambda: readers)
    dialing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialing
    await until(lambda: probe.link._opened.done())
    assert isinstance(probe.link._opened.exception(), ConnectionError)
    assert (probe.opened, probe.lost) == (0, [])
    server.close()


@in_loop
async def test_an_end_of_the_connection_before_the_handshake_is_an_error_of_the_dial() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    probe = Probe()
    with pytest.raises((ServingError, ConnectionError)):
        await probe.connect(port_of(server))
    assert (probe.opened, probe.lost) == (0, [])
    server.close()


@in_loop
async def test_no_process_at_the_address_is_an_os_error() -> None:
    server, _ = await silent_listener()
    port = port_of(server)
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await Probe().connect(port)


@in_loop
async def test_a_replica_that_does_not_read_is_cut_off_at_the_limit() -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe(send_buffer_bytes=1 << 20)
    link = await probe.connect(replica.lease.port)
    replica.relay.freeze()
    await fill(link)
    await until(lambda: probe.lost)
    assert re.fullmatch(r"\d+ bytes unread, limit 1048576, and no fewer than 0.1 s before", probe.lost[0])
    assert (probe.ended, probe.room) == ([LinkEnd.UNRESPONSIVE], 0)
    await replica.close()


@in_loop
async def test_a_replica_that_reads_again_in_time_keeps_its_link_and_the_ingress_hears_of_the_room() -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe(send_buffer_bytes=1 << 20, stuck_after_s=60.0)
    link = await probe.connect(replica.lease.port)
    replica.relay.freeze()
    await fill(link)
    replica.relay.thaw()
    await until(lambda: probe.room)
    assert (link.can_send(), probe.lost) == (True, [])
    await replica.close()


async def fill(link: ReplicaLink) -> None:
    """Send aborts until no attempt may be sent."""
    ids = [f"{n:0256}" for n in range(4000)]
    while link.can_send():
        link.write(link.connection.send_abort(ids))
        await asyncio.sleep(0)


@in_loop
async def test_an_error_of_the_replica_ends_an_open_link_once_with_its_reason() -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe()
    link = await probe.connect(replica.lease.port)
    await until(lambda: probe.messages)
    replica.engine.emit_outputs(0, [b"x"])
    await replica.server.close("engine_dead", "out of memory")
    await until(lambda: probe.lost)
    assert probe.lost == ["the peer closed the link (engine_dead): 'out of memory'"]
    assert probe.ended == [LinkEnd.ENGINE_DIED]
    assert not link.is_open()
    assert [type(m).__name__ for m in probe.messages] == ["Heartbeat", "Outputs"]
    link.write(b"dropped")
    await replica.close()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("drained", LinkEnd.SAID_GOODBYE),
        ("silent_peer", LinkEnd.SAID_GOODBYE),
        ("engine_dead", LinkEnd.ENGINE_DIED),
        ("malformed_message", LinkEnd.MISUNDERSTOOD),
    ],
)
@in_loop
async def test_the_code_of_a_goodbye_shows_whether_the_engine_died(code: str, end: LinkEnd) -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe()
    await probe.connect(replica.lease.port)
    await until(lambda: probe.messages)
    await replica.server.close(code, "")
    await until(lambda: probe.lost)
    assert probe.ended == [end]
    await replica.close()


@in_loop
async def test_bytes_that_are_no_message_end_the_link_as_misunderstood_and_a_cut_one_has_broken_off() -> None:
    replica = await start_replica(settings(), "a")
    garbled, cut = Probe(), Probe()
    for probe in (garbled, cut):
        await probe.connect(replica.lease.port)
        await until(lambda probe=probe: probe.messages)  # type: ignore[misc]
    replica.server.on_engine_message(pipe.StepOutputs(0, EngineLoad(1), 0.0, [], b"\0\0\0\1\xc1", 1))
    await until(lambda: garbled.lost)
    replica.relay.cut()
    await until(lambda: cut.lost)
    assert (garbled.ended, cut.ended) == ([LinkEnd.MISUNDERSTOOD], [LinkEnd.BROKE_OFF])
    await replica.close()
