"""These tests link both ends with certificates, on both event loops.

Both ends use `TlsConnection`; some tests put the TLS of the event loop at one end.
"""

import asyncio
import contextlib
import errno
import logging
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from serve_app.config import TlsSettings
from serve_app.links.protocol.errors import HandshakeTimeout, PeerClosed, ProtocolError
from serve_app.links.protocol.messages import Outputs
from serve_app.links.tls import LinkTls, ingress_tls, replica_tls
from serve_app.replica import pipe
from serve_app.replica.server import MAX_UNPROVED
from tests.doubles.certificates import make_tls
from tests.doubles.fleet import FakeReplica, fleet, in_loop, settings, start_replica, until
from tests.doubles.probe import Probe, port_of, silent_listener


@pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
def _on_each_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy() if request.param == "uvloop" else None)
    yield
    asyncio.set_event_loop_policy(None)


class Recorder:
    """An engine that keeps the messages that it gets."""

    def __init__(self) -> None:
        self.received: list[pipe.ToEngine] = []

    def send(self, message: pipe.ToEngine) -> None:
        self.received.append(message)


def replicas(tls: TlsSettings) -> LinkTls:
    side = replica_tls(tls)
    assert side is not None
    return side


def ingresses(tls: TlsSettings) -> LinkTls:
    side = ingress_tls(tls)
    assert side is not None
    return side


def replace_files(tls: TlsSettings, by: TlsSettings, *names: str) -> None:
    """Replace the files of ``tls`` by those of ``by``."""
    for name in names or ("cert_file", "key_file", "ca_file"):
        shutil.copy(getattr(by, name), getattr(tls, name))


async def linked(replica: FakeReplica, tls: LinkTls) -> Probe:
    probe = Probe()
    await probe.connect(replica.lease.port, tls=tls.context())
    await until(lambda: probe.messages)
    return probe


def test_without_certificates_there_is_no_tls() -> None:
    assert (replica_tls(None), ingress_tls(None)) == (None, None)


@in_loop
async def test_both_sides_of_one_authority_have_an_encrypted_link(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    probe = await linked(replica, ingresses(tls))
    assert probe.link._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    await replica.close()


@in_loop
async def test_frames_of_any_length_arrive_whole_in_both_directions(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    probe = await linked(replica, ingresses(tls))
    replica.server.engine = engine = Recorder()
    pieces = [b"x" * length for length in (1, 1 << 14, 3 << 20)]
    for number, piece in enumerate(pieces):
        probe.link.write(probe.link.connection.send_add(f"r@{number}", [piece]))
    await until(lambda: len(engine.received) == len(pieces))
    assert [bytes(add.buffers[0]) for add in engine.received if isinstance(add, pipe.AddToEngine)] == pieces
    probe.messages.clear()
    for piece in pieces:
        replica.engine.emit_outputs(0, [piece])
    await until(lambda: len(probe.messages) == len(pieces))
    assert [bytes(outputs.buffers[0]) for outputs in probe.messages if isinstance(outputs, Outputs)] == pieces
    await replica.close()


@in_loop
async def test_certificates_of_another_authority_are_refused(tmp_path: Path) -> None:
    ours, theirs = make_tls(tmp_path, "ours"), make_tls(tmp_path, "theirs")
    replica = await start_replica(settings(), "a", tls=replicas(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        await Probe().connect(replica.lease.port, tls=ingresses(theirs).context())
    await replica.close()


@in_loop
async def test_a_peer_without_a_certificate_is_refused_and_both_sides_say_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="serve_app")
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    anonymous = ssl.create_default_context(cafile=str(tls.ca_file))
    anonymous.check_hostname = False
    probe = Probe()
    with pytest.raises(OSError, match="CERTIFICATE_REQUIRED"):  # in TLS 1.3 the refusal comes after the client's handshake
        await probe.connect(replica.lease.port, tls=anonymous)
    assert probe.opened == 0
    assert "TLS failed: [SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE]" in caplog.text
    await until(lambda: not replica.server._unproved)
    await replica.close()


@in_loop
async def test_a_peer_that_speaks_no_tls_is_refused(tmp_path: Path) -> None:
    replica = await start_replica(settings(), "a", tls=replicas(make_tls(tmp_path, "fleet")))
    probe = Probe()
    with pytest.raises((OSError, ProtocolError)):
        await probe.connect(replica.lease.port)
    assert probe.opened == 0
    await replica.close()


@in_loop
async def test_a_replica_that_speaks_no_tls_is_refused(tmp_path: Path) -> None:
    replica = await start_replica(settings(), "a")
    probe = Probe()
    with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"):
        await probe.connect(replica.lease.port, tls=ingresses(make_tls(tmp_path, "fleet")).context())
    assert (probe.opened, probe.lost) == (0, [])
    await replica.close()


@in_loop
async def test_a_replica_that_hangs_up_before_the_end_of_tls_fails_the_dial(tmp_path: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    probe = Probe()
    with pytest.raises(ConnectionResetError, match="before the TLS handshake was over"):
        await probe.connect(port_of(server), tls=ingresses(make_tls(tmp_path, "fleet")).context())
    assert (probe.opened, probe.lost) == (0, [])
    server.close()


@in_loop
async def test_a_replica_that_does_not_finish_tls_is_left_after_the_limit(tmp_path: Path) -> None:
    server, readers = await silent_listener()
    with pytest.raises(HandshakeTimeout):
        await Probe().connect(port_of(server), tls=ingresses(make_tls(tmp_path, "fleet")).context(), timeout_s=0.5)
    with contextlib.suppress(ConnectionError):
        await readers[0].read()  # to the end of the stream
    server.close()


@in_loop
async def test_a_running_replica_takes_replaced_files_for_its_next_link(tmp_path: Path) -> None:
    tls, old, new = (make_tls(tmp_path, name) for name in ("fleet", "old", "new"))
    replace_files(tls, old)
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    before = await linked(replica, ingresses(old))
    replace_files(tls, new)
    await linked(replica, ingresses(new))
    with pytest.raises(ssl.SSLCertVerificationError):
        await Probe().connect(replica.lease.port, tls=ingresses(old).context())
    assert before.link.is_open()
    await replica.close()


@in_loop
async def test_a_running_ingress_takes_replaced_files_for_its_next_link(tmp_path: Path) -> None:
    tls, old, new = (make_tls(tmp_path, name) for name in ("fleet", "old", "new"))
    replace_files(tls, old)
    async with fleet(tls=ingresses(tls)) as under_test:
        await under_test.join("a", tls=replicas(old))
        replace_files(tls, new)
        await under_test.join("b", tls=replicas(new))
        assert sorted(under_test.client.fleet.replicas) == ["a", "b"]
        for replica in under_test.replicas.values():
            await replica.close()


def test_half_a_renewal_is_reported_once_and_changes_nothing_until_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="serve_app")
    tls, new = make_tls(tmp_path, "fleet"), make_tls(tmp_path, "new")
    side = replicas(tls)
    before = side.context()
    replace_files(tls, new, "cert_file", "ca_file")
    assert [side.context() for _ in range(3)] == [before] * 3
    tls.key_file.unlink()
    assert [side.context() for _ in range(3)] == [before] * 3
    replace_files(tls, new, "key_file")
    after = side.context()
    assert after is not before
    assert side.context() is after
    assert [(r.levelname, r.getMessage().rpartition("; ")[2]) for r in caplog.records] == [
        *[("ERROR", "the certificate read before stays in use")] * 2,
        ("INFO", "the next link uses them"),
    ]


def without_descriptors() -> ssl.SSLContext:
    raise OSError(errno.EMFILE, "Too many open files")


def test_files_that_could_not_be_read_once_are_read_again_though_they_do_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, new = make_tls(tmp_path, "fleet"), make_tls(tmp_path, "new")
    side = replicas(tls)
    before = side.context()
    replace_files(tls, new)
    with monkeypatch.context() as patch:
        patch.setattr(side, "_read", without_descriptors)
        assert side.context() is before
    assert side.context() is not before


@in_loop
async def test_connections_that_never_finish_tls_keep_no_ingress_out_and_the_oldest_is_dropped(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    idle = [await asyncio.open_connection("127.0.0.1", replica.port) for _ in range(MAX_UNPROVED + 1)]
    with contextlib.suppress(ConnectionError):
        assert await idle[0][0].read() == b""
    assert len(replica.server._unproved) == MAX_UNPROVED
    probe = await linked(replica, ingresses(tls))
    assert (probe.link.is_open(), len(replica.server._unproved)) == (True, MAX_UNPROVED - 1)
    for _, writer in idle:
        writer.close()
    await until(lambda: not replica.server._unproved)
    await replica.close()


@in_loop
async def test_a_peer_that_does_not_finish_tls_is_dropped_after_the_time_of_a_handshake(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(protocol={"handshake_timeout_s": 0.1}), "a", tls=replicas(tls))
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
    writer.write(b"\x16\x03\x01")  # how a TLS handshake begins
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await until(lambda: not replica.server._unproved)
    writer.close()
    await replica.close()


@in_loop
async def test_a_peer_that_finishes_tls_and_no_more_gets_the_goodbye_of_a_late_one(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(protocol={"handshake_timeout_s": 1.0}), "a", tls=replicas(tls))
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port, ssl=ingresses(tls).context(), server_hostname="")
    probe = Probe().new_connection()
    with pytest.raises(PeerClosed) as late:
        probe.receive_data(await reader.read())
    assert late.value.peer_code == HandshakeTimeout.code
    await until(lambda: not replica.server._unproved)
    writer.close()
    await replica.close()


@in_loop
async def test_an_ingress_too_many_gets_the_reason(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(protocol={"max_ingresses": 2}), "a", tls=replicas(tls))
    first = [await linked(replica, ingresses(tls)) for _ in range(2)]
    third = Probe()
    with pytest.raises(PeerClosed, match="slots_exhausted"):
        await third.connect(replica.lease.port, tls=ingresses(tls).context())
    assert third.opened == 0, "a link that opens would get requests"
    await until(lambda: not replica.server._unproved)
    assert all(probe.link.is_open() for probe in first)
    await replica.close()


@in_loop
async def test_a_silent_ingress_that_does_not_read_either_is_gone_as_soon(tmp_path: Path) -> None:
    """A peer that has disappeared would not answer the end of TLS, so the replica does not wait for that."""
    tls = make_tls(tmp_path, "fleet")
    limits = {"heartbeat_interval_s": 0.01, "ingress_timeout_s": 1.0}
    replica = await start_replica(settings(protocol=limits), "a", tls=replicas(tls))
    probe = await linked(replica, ingresses(tls))
    replica.server.engine = engine = Recorder()
    probe.link.write(probe.link.connection.send_add("r@0", [b"request"]))
    await until(lambda: engine.received)
    replica.relay.freeze()
    async with asyncio.timeout(10.0):  # the TLS of asyncio and of uvloop would wait 30 s
        await until(lambda: pipe.AbortInEngine(["r@0"]) in engine.received)
    await replica.close()


@in_loop
async def test_a_replica_that_reads_again_in_time_keeps_its_link(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    replica.server.engine = engine = Recorder()
    probe = Probe(send_buffer_bytes=1 << 20, stuck_after_s=60.0)
    link = await probe.connect(replica.lease.port, tls=ingresses(tls).context())
    replica.relay.freeze()
    num_sent = 0
    while link.can_send():
        link.write(link.connection.send_add(f"r{num_sent}@0", [b"x" * (1 << 18)]))
        num_sent += 1
        await asyncio.sleep(0)
    replica.relay.thaw()
    await until(lambda: len(engine.received) == num_sent)
    assert (probe.lost, probe.room, link.can_send()) == ([], 1, True)
    await replica.close()


@in_loop
async def test_a_replica_that_reads_slowly_and_steadily_keeps_its_link(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    replica.server.engine = Recorder()
    probe = Probe(send_buffer_bytes=8 << 20, stuck_after_s=1.0)
    link = await probe.connect(replica.lease.port, tls=ingresses(tls).context())
    replica.relay.pause_s = 0.01  # at most 6.25 MiB/s: to read what waits takes longer than the link's patience
    num_sent = 0
    while probe.room < 2 and not probe.lost:
        if link.can_send():
            link.write(link.connection.send_add(f"r{num_sent}@0", [b"x" * (1 << 18)]))
            num_sent += 1
        await asyncio.sleep(0)
    assert probe.lost == []
    await replica.close()


@in_loop
async def test_an_ingress_that_reads_again_in_time_keeps_its_link(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(
        settings(protocol={"max_frame_bytes": 1 << 20, "send_buffer_bytes": 1 << 20}), "a", tls=replicas(tls)
    )
    probe = await linked(replica, ingresses(tls))
    num_before = len(probe.messages)
    replica.relay.freeze()
    for _ in range(32):  # more than the buffers of four sockets hold
        replica.engine.emit_outputs(0, [b"x" * (1 << 19)])
    replica.relay.thaw()
    await until(lambda: len(probe.messages) == num_before + 32)
    assert probe.link.is_open()
    await replica.close()


@in_loop
async def test_a_replica_that_stops_says_goodbye(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=replicas(tls))
    probe = await linked(replica, ingresses(tls))
    replica.engine.emit_outputs(0, [b"last"])
    await replica.server.close("drained", "the replica stopped")
    await until(lambda: probe.lost)
    assert probe.lost == ["the peer closed the link (drained): 'the replica stopped'"]
    await replica.close()
