"""The supervisors of an engine's nodes find each other, and each end of their connection notices the end of the other."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serve_app.core.health import ProcessUse
from serve_app.errors import EngineDied, EngineOutOfMemory, EngineStartFailed
from serve_app.links.protocol.frames import encode_frame
from serve_app.links.tls import LinkTls, ingress_tls, replica_tls
from serve_app.replica import cord as cord_module
from serve_app.replica import members as members_module
from serve_app.replica.cord import Beat, Challenge, Cord, Ended, Hello, Message, Serves, proof
from serve_app.replica.members import Members
from tests.doubles.certificates import make_tls
from tests.doubles.fleet import in_loop, until

HERE = "127.0.0.1"


@dataclass
class Member:
    """The other end of a cord, with what it heard and why it ended."""

    cord: Cord
    heard: list[Message] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


async def join(port: int, secret: bytes, rank: int, *, silence_s: float = 60.0, tls: LinkTls | None = None) -> Member:
    member: Member

    def hear(cord: Cord, message: Message) -> None:
        if isinstance(message, Challenge):
            cord.send(Hello(proof(secret, message.nonce, rank), rank))
        else:
            member.heard.append(message)

    cord = Cord(
        silence_s=silence_s,
        beat=lambda: Beat({7: ProcessUse(float(rank), stopped=False)}),
        on_message=hear,
        on_lost=lambda _, reason: member.lost.append(reason),
    )
    member = Member(cord)
    end = cord.end_of(None if tls is None else tls.context(), server_side=False)
    await asyncio.get_running_loop().create_connection(lambda: end, HERE, port)
    return member


@asynccontextmanager
async def two_members(*, silence_s: float = 60.0) -> AsyncIterator[tuple[Members, list[Member], list[str]]]:
    """Two members that have joined, and the losses that the first node hears of."""
    members, lost = Members(2, silence_s=silence_s), list[str]()
    port = await members.listen(HERE)
    joined = [await join(port, members.secret, rank) for rank in (1, 2)]
    await members.all_joined()
    members.watch(lambda loss: lost.append(loss.reason))
    try:
        yield members, joined, lost
    finally:
        members.close()
        for member in joined:
            member.cord.close()


@in_loop
async def test_processes_of_other_nodes_have_ids_of_their_own() -> None:
    async with two_members() as (members, _, lost):
        await until(lambda: len(members.uses()) == 2)
        assert members.uses() == {(rank << 32) + 7: ProcessUse(float(rank), stopped=False) for rank in (1, 2)}
        assert lost == []


@in_loop
async def test_the_first_member_that_ends_is_named_and_only_once() -> None:
    async with two_members() as (members, joined, lost):
        joined[1].cord.send(Ended("a worker process has ended"))
        await until(lambda: lost)
        cords = list(members._cords.values())
        for member in joined:
            member.cord.close()
        await until(lambda: all(cord._over for cord in cords))
        assert lost == ["node 2 of the engine: a worker process has ended"]


@pytest.mark.parametrize(("out_of_memory", "lost_as"), [(True, EngineOutOfMemory), (False, EngineDied)])
@in_loop
async def test_a_member_says_whether_the_kernel_ended_its_part_for_lack_of_memory(
    out_of_memory: bool, lost_as: type[EngineDied]
) -> None:
    members, losses = Members(1, silence_s=60.0), list[EngineDied]()
    member = await join(await members.listen(HERE), members.secret, 1)
    await members.all_joined()
    members.watch(losses.append)
    member.cord.send(Ended("a process was killed", out_of_memory))
    await until(lambda: losses)
    assert [(type(loss), loss.reason) for loss in losses] == [(lost_as, "node 1 of the engine: a process was killed")]
    members.close()


@in_loop
async def test_members_hear_when_the_engine_serves() -> None:
    async with two_members() as (members, joined, _):
        members.tell_that_it_serves()
        await until(lambda: all(Serves() in member.heard for member in joined))
        assert [sum(message == Serves() for message in member.heard) for member in joined] == [1, 1]


@in_loop
async def test_with_certificates_members_join_and_end_over_tls(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    members, losses = Members(1, silence_s=60.0, tls=replica_tls(tls)), list[EngineDied]()
    member = await join(await members.listen(HERE), members.secret, 1, tls=ingress_tls(tls))
    await members.all_joined()
    assert member.cord._transport is not None
    assert member.cord._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    members.watch(losses.append)
    await until(members.uses)
    member.cord.send(Ended("a worker process has ended"))
    member.cord.close()
    await until(lambda: losses)
    assert [loss.reason for loss in losses] == ["node 1 of the engine: a worker process has ended"]
    members.close()


@pytest.mark.parametrize("certificates", ["none", "of another authority"])
@in_loop
async def test_who_has_no_certificate_of_the_authority_cannot_join_even_with_the_secret(
    certificates: str, tmp_path: Path
) -> None:
    members = Members(1, silence_s=60.0, tls=replica_tls(make_tls(tmp_path, "fleet")))
    port = await members.listen(HERE)
    tls = None if certificates == "none" else ingress_tls(make_tls(tmp_path, "other"))
    stranger = await join(port, members.secret, 1, tls=tls)
    await until(lambda: stranger.lost and not members._strangers)
    assert members._cords == {}
    members.close()


@in_loop
async def test_a_connection_that_ends_is_a_loss() -> None:
    async with two_members() as (_, joined, lost):
        joined[0].cord.close()
        await until(lambda: lost)
        assert lost == ["node 1 of the engine: its connection ended"]


@in_loop
async def test_a_loss_before_anybody_watches_is_reported_to_the_first_who_does() -> None:
    members, lost = Members(1, silence_s=60.0), list[str]()
    member = await join(await members.listen(HERE), members.secret, 1)
    await members.all_joined()
    member.cord.send(Ended("no such file"))
    await until(lambda: members._lost)
    members.watch(lambda loss: lost.append(loss.reason))
    members.close()
    assert lost == ["node 1 of the engine: no such file"]


@in_loop
async def test_a_member_that_ends_before_the_last_has_joined_fails_the_start() -> None:
    members = Members(2, silence_s=60.0)
    member = await join(await members.listen(HERE), members.secret, 1)
    await until(lambda: members._cords)
    member.cord.send(Ended("no such file"))
    with pytest.raises(EngineStartFailed, match="node 1 of the engine: no such file"):
        await members.all_joined()
    members.close()


@in_loop
async def test_members_that_are_let_go_end_and_nothing_is_reported_as_lost() -> None:
    async with two_members() as (members, joined, lost):
        members.close()
        await until(lambda: all(member.lost for member in joined))
        assert [member.lost for member in joined] == [["its connection ended"]] * 2
        assert lost == []


@pytest.mark.parametrize(("secret", "rank"), [(b"guessed", 1), (None, 0), (None, 2)])
@in_loop
async def test_a_stranger_is_refused_and_a_member_can_still_join(secret: bytes | None, rank: int) -> None:
    members = Members(1, silence_s=60.0)
    port = await members.listen(HERE)
    stranger = await join(port, secret or members.secret, rank)
    await until(lambda: stranger.lost)
    member = await join(port, members.secret, 1)
    await members.all_joined()
    members.close()
    member.cord.close()


async def connect(port: int) -> tuple[Cord, asyncio.Future[bytes], asyncio.Future[str]]:
    """Return an end that answers nothing, the nonce that it will hear, and why it will end."""
    loop = asyncio.get_running_loop()
    nonce, end = loop.create_future(), loop.create_future()

    def hear(_: Cord, message: Message) -> None:
        if isinstance(message, Challenge):
            nonce.set_result(message.nonce)

    cord = Cord(silence_s=60.0, beat=Beat, on_message=hear, on_lost=lambda _, reason: end.set_result(reason))
    await loop.create_connection(lambda: cord, HERE, port)
    return cord, nonce, end


@in_loop
async def test_a_proof_that_was_overheard_does_not_fit_another_connection() -> None:
    members = Members(1, silence_s=60.0)
    port = await members.listen(HERE)
    (honest, nonce, _), (thief, _, refused) = await connect(port), await connect(port)
    hello = Hello(proof(members.secret, await nonce, 1), 1)
    thief.send(hello)
    await until(lambda: refused.done() or members._cords)
    assert members._cords == {}
    honest.send(hello)
    await members.all_joined()
    members.close()
    honest.close()


@in_loop
async def test_the_oldest_of_too_many_strangers_is_dropped_and_a_member_can_still_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "MAX_STRANGERS", 2)
    members = Members(1, silence_s=60.0)
    port = await members.listen(HERE)
    strangers = [await connect(port) for _ in range(3)]
    await strangers[0][2]
    assert len(members._strangers) == 2
    member = await join(port, members.secret, 1)
    await strangers[1][2]
    await members.all_joined()
    members.close()
    member.cord.close()


@in_loop
async def test_a_stranger_that_is_let_go_before_its_connection_is_made_does_not_stay() -> None:
    cord = Cord(silence_s=60.0, beat=Beat, on_message=lambda *_: None, on_lost=lambda *_: None)
    cord.close()
    server = await asyncio.get_running_loop().create_server(lambda: cord, HERE, 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read(1) == b""
    writer.close()
    server.close()


@in_loop
async def test_the_rank_of_another_member_is_refused() -> None:
    members = Members(2, silence_s=60.0)
    port = await members.listen(HERE)
    first = await join(port, members.secret, 2)
    await until(lambda: 2 in members._cords)
    double = await join(port, members.secret, 2)
    await until(lambda: double.lost)
    second = await join(port, members.secret, 1)
    await members.all_joined()
    assert (first.lost, second.lost) == ([], [])
    members.close()
    first.cord.close()
    second.cord.close()


@in_loop
async def test_once_all_have_joined_strangers_are_let_go_and_nothing_listens_any_more() -> None:
    members = Members(1, silence_s=60.0)
    port = await members.listen(HERE)
    stranger = Cord(silence_s=60.0, beat=Beat, on_message=lambda *_: None, on_lost=lambda *_: None)
    await asyncio.get_running_loop().create_connection(lambda: stranger, HERE, port)
    await until(lambda: members._strangers)
    member = await join(port, members.secret, 1)
    await members.all_joined()
    member.cord.send(Hello(b"", 1))  # a second one changes nothing
    await until(lambda: stranger._over)
    with pytest.raises(ConnectionRefusedError):
        await join(port, members.secret, 1)
    await until(lambda: members.uses())
    assert member.lost == []
    members.close()
    member.cord.close()


@pytest.mark.parametrize("body", [b"\x92\x03\xa1\xff", b"\x94\x01\xc4\x01x\x01" + b"\x91" * 100_000], ids=["text", "depth"])
@in_loop
async def test_what_no_decoder_can_read_ends_the_connection_without_a_traceback(body: bytes) -> None:
    untold = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: untold.append(context))
    members = Members(1, silence_s=60.0)
    reader, writer = await asyncio.open_connection(HERE, await members.listen(HERE))
    writer.write(encode_frame(body))
    await reader.read()
    assert untold == []
    members.close()
    writer.close()


@in_loop
async def test_a_beat_that_fails_ends_the_connection_since_nobody_would_judge_the_other_end() -> None:
    def failing() -> Beat:
        raise ValueError("no process table")

    members, lost = Members(1, silence_s=60.0), list[str]()
    cord = Cord(silence_s=60.0, beat=failing, on_message=lambda *_: None, on_lost=lambda _, reason: lost.append(reason))
    await asyncio.get_running_loop().create_connection(lambda: cord, HERE, await members.listen(HERE))
    await until(lambda: lost)
    assert lost == ["this supervisor could not tell how it is: ValueError('no process table')"]
    members.close()


@in_loop
async def test_a_supervisor_that_falls_silent_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cord_module, "BEAT_S", 0.02)
    monkeypatch.setattr(cord_module, "_MAX_GAP_S", 0.04)  # no busy machine makes the other member look silent
    async with two_members(silence_s=0.4) as (_, joined, lost):
        joined[1].cord._beating.cancel()  # type: ignore[union-attr]  # as if its process were stopped
        await until(lambda: lost)
        assert lost[0].startswith("node 2 of the engine: its supervisor was silent for ")


CUT_OFF = """
import asyncio, subprocess, time
from tests.doubles.fleet import until
from tests.replica.test_cord import HERE, join
from serve_app.replica.members import Members

async def main():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    members, lost = Members(1, silence_s=600.0), []
    member = await join(await members.listen(HERE), members.secret, 1, silence_s=600.0)
    await members.all_joined()
    members.watch(lambda loss: lost.append(loss.reason))
    await until(members.uses)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began = time.monotonic()
    await until(lambda: lost and member.lost)
    print(*lost, *member.lost, f"{time.monotonic() - began:.2f} s", sep="\\n")

asyncio.run(main())
"""


def in_a_network_of_its_own(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["unshare", "-Urn", *command], capture_output=True, text=True, check=False)


@pytest.mark.skipif(in_a_network_of_its_own("ip", "link", "set", "lo", "up").returncode != 0, reason="no network namespaces here")
def test_both_ends_notice_a_network_that_carries_nothing_any_more() -> None:
    done = in_a_network_of_its_own(sys.executable, "-c", CUT_OFF)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    first, second, _ = done.stdout.splitlines()
    assert first == "node 1 of the engine: its connection was lost: [Errno 110] Connection timed out"
    assert second == "its connection was lost: [Errno 110] Connection timed out"
