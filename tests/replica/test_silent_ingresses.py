"""A replica ends the link of a silent ingress after a time, and at once when the ingress has a new link; the peers are real links."""

import asyncio

import pytest

from serve_app.links.protocol.connection import LinkState
from serve_app.links.protocol.errors import PeerClosed
from serve_app.replica import pipe
from tests.doubles.fleet import in_loop, settings, start_replica, until
from tests.doubles.probe import Probe
from tests.replica.linked import add, linked, recorded


@in_loop
async def test_a_silent_ingress_is_cut_off_and_its_attempts_are_aborted() -> None:
    limits = {"heartbeat_interval_s": 0.01, "ingress_timeout_s": 1.0}
    replica = await start_replica(settings(protocol=limits), "a")
    with recorded(replica) as received:
        probe = await linked(replica)
        add(probe, "r@0")
        await until(lambda: probe.lost)
        assert probe.lost == ["the peer closed the link (silent_peer): 'nothing heard for 1 s'"]
        await until(lambda: pipe.AbortInEngine(["r@0"]) in received)
    await replica.close()


@in_loop
async def test_an_ingress_of_which_only_parts_of_a_message_come_is_cut_off() -> None:
    replica = await start_replica(settings(protocol={"heartbeat_interval_s": 0.01, "ingress_timeout_s": 1.0}), "a")
    probe = await linked(replica)
    one = probe.link.connection.send_add("r@0", [b"x" * 100_000])
    for at in range(len(one)):
        if probe.lost:
            break
        probe.link.write(one[at : at + 1])
        await asyncio.sleep(0.01)
    assert probe.lost == ["the peer closed the link (silent_peer): 'nothing heard for 1 s'"]
    await replica.close()


@in_loop
async def test_an_ingress_may_be_silent_for_longer_than_a_replica() -> None:
    limits = {"heartbeat_interval_s": 0.01, "heartbeat_timeout_s": 0.1}
    replica = await start_replica(settings(protocol=limits), "a")
    probe = await linked(replica)
    await asyncio.sleep(0.5)
    assert probe.link.is_open()
    await replica.close()


@in_loop
async def test_a_silent_ingress_that_does_not_read_either_is_gone_as_soon() -> None:
    limits = {"heartbeat_interval_s": 0.01, "ingress_timeout_s": 1.0}
    replica = await start_replica(settings(protocol=limits), "a")
    with recorded(replica) as received:
        probe = await linked(replica)
        add(probe, "r@0")
        await until(lambda: received)
        replica.relay.freeze()
        for _ in range(32):  # more than the buffers of two sockets hold
            replica.engine.emit_outputs(0, [b"x" * (1 << 20)])
        await until(lambda: pipe.AbortInEngine(["r@0"]) in received)
    await replica.close()


@in_loop
async def test_a_new_link_of_an_ingress_ends_its_earlier_one() -> None:
    replica = await start_replica(settings(), "a")
    with recorded(replica) as received:
        earlier, other = await linked(replica, ingress_id="i"), await linked(replica)
        add(earlier, "r@0")
        await until(lambda: received)
        again = await linked(replica, ingress_id="i")
        await until(lambda: pipe.AbortInEngine(["r@0"]) in received)
        await until(lambda: earlier.lost)
        assert again.link.is_open()
        assert other.link.is_open()
    await replica.close()


@in_loop
async def test_an_ingress_whose_earlier_link_has_the_last_slot_gets_this_slot() -> None:
    """The replica notices only after `ingress_timeout_s` that the earlier link is dead."""
    replica = await start_replica(settings(protocol={"max_ingresses": 2}), "a")
    with recorded(replica) as received:
        earlier, other = await linked(replica, ingress_id="i"), await linked(replica)
        add(earlier, "r@0")
        await until(lambda: received)
        again = await linked(replica, ingress_id="i")
        add(again, "r@1")
        await until(lambda: len(received) == 3)
        assert received[1:] == [pipe.AbortInEngine(["r@0"]), pipe.AddToEngine(0, "r@1", [b"request"], 0)]
        await until(lambda: earlier.lost)
        with pytest.raises(PeerClosed, match="slots_exhausted"):
            await Probe().connect(replica.lease.port)
        assert (again.link.is_open(), other.link.is_open(), replica.server.num_attempts()) == (True, True, 1)
    await replica.close()


@in_loop
async def test_nobody_ends_a_link_by_the_name_of_its_ingress_alone() -> None:
    replica = await start_replica(settings(protocol={"max_ingresses": 2}), "a")
    probes = [await linked(replica, ingress_id="i"), await linked(replica)]
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
    impostor = Probe(ingress_id="i").new_connection()
    writer.write(impostor.initiate())
    while impostor.state is LinkState.HANDSHAKE:
        impostor.receive_data(await reader.read(1 << 16))
    assert [probe.link.is_open() for probe in probes] == [True, True]
    writer.close()
    await until(lambda: not replica.server._unproved)
    assert len(list(replica.server.open_links())) == 2
    await replica.close()
