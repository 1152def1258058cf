"""This module runs a fleet on the loopback interface: real links between a ``FleetClient`` and ``ReplicaServer``s with fake engines."""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec

from serve_app.config import Settings, parse_settings
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.links.tls import LinkTls
from serve_app.membership import Lease
from serve_app.replica.server import ReplicaIdentity, ReplicaServer
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.fake_front_end import FakeFrontEnd

P = ParamSpec("P")
MODEL = "tiny"
_LIMIT_S = 240.0  # only ends a test that hangs
_numbers = itertools.count(1)


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def limited() -> None:
            async with asyncio.timeout(_LIMIT_S):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


async def until(holds: Callable[[], object]) -> None:
    """Let the loop run until ``holds``; the test's own limit ends the wait."""
    while not holds():
        await asyncio.sleep(0)


def settings(**sections: dict[str, Any]) -> Settings:
    """Return settings with one simulated model; ``sections`` replace those of the file."""
    model = {"model": "/models/tiny", "simulated": {"profile": "a10g-llama-8b"}}
    return parse_settings({"models": {MODEL: model}, **sections})


class Relay:
    """A TCP relay in front of a replica. ``cut`` ends its connections, ``freeze`` holds all bytes back until ``thaw``.

    ``pause_s`` is the wait after each read of at most 64 KiB.
    """

    def __init__(self, port: int) -> None:
        self.pause_s = 0.0
        self._target = port
        self._refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def refuse(self) -> None:
        """Cut all connections and accept no new ones."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Accept connections again."""
        self._refusing = False

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.close()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers += [writer, there_writer]
        for source, target in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._flowing.wait()
                await asyncio.sleep(self.pause_s)
                target.write(data)
                await target.drain()
        with contextlib.suppress(OSError, RuntimeError):
            target.write_eof()  # the other direction may stay open


@dataclass
class FakeReplica:
    """A replica and the relay in front of it; the lease names the relay, ``port`` is the replica's own."""

    engine: FakeEngine
    server: ReplicaServer
    relay: Relay
    lease: Lease
    port: int

    async def close(self) -> None:
        await self.relay.close()
        await self.server.close("test_over", "")

    def stop_listening(self) -> None:
        """Behave like a dead process: nothing listens at the address, and open connections are gone."""
        self.relay.refuse()


async def start_replica(
    values: Settings, replica_id: str, *, token: bytes = b"", tls: LinkTls | None = None, engine: FakeEngine | None = None
) -> FakeReplica:
    engine = engine or FakeEngine()
    identity = ReplicaIdentity(replica_id, model=MODEL)
    server = ReplicaServer(identity, values.protocol, token, engine, engine.ready, tls)
    engine.connect(server.on_engine_message)
    port = await server.listen()
    relay = Relay(port)
    lease = Lease(replica_id, "replica", MODEL, "127.0.0.1", await relay.listen(), epoch=1, pid=0)
    return FakeReplica(engine, server, relay, lease, port)


@dataclass
class Fleet:
    """An ingress without HTTP: ``front`` adds requests, ``client`` is under test."""

    settings: Settings
    front: FakeFrontEnd
    client: FleetClient
    replicas: dict[str, FakeReplica]

    async def join(self, *replica_ids: str, **kwargs: Any) -> None:
        """Start these replicas and wait for their links."""
        for replica_id in replica_ids:
            self.replicas[replica_id] = await start_replica(self.settings, replica_id, **kwargs)
        self.client.set_members([r.lease for r in self.replicas.values()])
        await until(lambda: set(replica_ids) <= self.client.fleet.replicas.keys())

    def running(self, replica_id: str) -> list[str]:
        """Return the attempts that the replica's engine runs."""
        return list(self.replicas[replica_id].engine.running)


@contextlib.asynccontextmanager
async def fleet(values: Settings | None = None, *, run: bool = True, tls: LinkTls | None = None) -> AsyncIterator[Fleet]:
    """Run a fleet without replicas. ``run``: the client ticks and pings."""
    values = values or settings()
    client = FleetClient(values, values.models[MODEL], ingress_id=f"ingress-{next(_numbers)}", token=b"", tls=tls)
    front = FakeFrontEnd(client)
    jobs: list[Awaitable[None]] = [front.run(), *([client.run()] if run else [])]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    under_test = Fleet(values, front, client, {})
    try:
        yield under_test
        assert [t for t in tasks if t.done()] == []
        client.fleet.validate()
    finally:
        client.set_members([])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.shutdown()
        for replica in under_test.replicas.values():
            await replica.close()
