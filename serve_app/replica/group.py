"""`Group` makes one engine of the nodes of a replica's placement group: an actor on each node but the first, which joins the replica."""

import asyncio
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

import ray
from ray._private import worker
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.config import ModelSettings, ProtocolSettings, parse_settings
from serve_app.engine_args import PROCESS_ENVIRONMENT, NodeOfEngine
from serve_app.environment import clean
from serve_app.errors import EngineStartFailed
from serve_app.host.core_files import leave_no_core_file
from serve_app.host.foreign_errors import in_one_line
from serve_app.host.logs import log_configuration
from serve_app.links.tls import ingress_tls, replica_tls
from serve_app.membership import AWAY
from serve_app.replica.members import Members
from serve_app.replica.oom import OomOrder
from serve_app.replica.shard import Shard, Summons
from serve_app.replica.side_channel import reserve

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_GCS_S = 5.0
"""Limit of one question to Ray."""


class ReadyPort:
    """Listens at a fixed ``protocol.port`` once the engine serves: the readiness probe of a shard's pod is that of a replica's pod.

    Each connection is closed at once. Without a fixed port there is no probe, and nothing listens.
    """

    def __init__(self, protocol: ProtocolSettings) -> None:
        self._protocol = protocol
        self._opening: asyncio.Task[asyncio.Server] | None = None

    def open(self) -> None:
        if self._protocol.port:
            self._opening = asyncio.create_task(self._listen(), name="ready-port")
            self._opening.add_done_callback(_log_failure)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(_Hangup, self._protocol.host, self._protocol.port)


class _Hangup(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _log_failure(opening: asyncio.Task[asyncio.Server]) -> None:
    if not opening.cancelled() and (exc := opening.exception()) is not None:
        logger.error("this pod will not become ready: no port for its readiness probe: %s", in_one_line(exc))


class ShardActor:
    """Runs one `Shard` in a bundle of the replica's placement group. Ray ends it with the replica, and its cord does so sooner."""

    async def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def run(self, settings: Mapping[str, Any], model_name: str, summons: Mapping[str, Any]) -> str:
        """Work until the engine ends, then end this process, so that Ray can give the GPUs away. Return why it could not join.

        Args:
            summons: The fields of `Summons`, with the rank and the address of the first node in place of ``node``.
        """
        parsed = parse_settings(settings)
        log_configuration(parsed)
        leave_no_core_file()
        clean(os.environ)
        OomOrder().set_rank(0)
        rank, first_address, first_port = summons["rank"], summons["first_address"], summons["first_port"]
        node = NodeOfEngine(rank, ray.util.get_node_ip_address(), first_address, first_port)
        joining = Summons(node, summons["port"], summons["secret"], summons["silence_s"])
        ready_port = ReadyPort(parsed.protocol)
        try:
            tls = ingress_tls(parsed.protocol.tls)  # it connects, as an ingress does
            reason = await Shard(parsed.models[model_name], joining, tls=tls, on_serves=ready_port.open).run()
        except OSError as exc:
            return f"it cannot join: {in_one_line(exc)}"
        logger.info("node %d of an engine of %s ends: %s", rank, model_name, reason)
        os._exit(0)


async def first_draining(nodes: Set[str], look: Callable[[], Mapping[str, int]], *, every_s: float) -> tuple[str, int]:
    """Wait until ``look`` shows one of these nodes, and return it with what it shows. A look that fails, as while Ray's head restarts,
    is repeated."""
    while True:
        try:
            draining = await asyncio.to_thread(look)
            if found := nodes & draining.keys():
                return min(found), draining[min(found)]
        except AWAY as exc:
            logger.warning("no look at the nodes that Ray drains: %s", in_one_line(exc))
        await asyncio.sleep(every_s)


class Group:
    """The nodes of one engine. Made by the replica's actor, which is on the first."""

    def __init__(self, model: ModelSettings, protocol: ProtocolSettings, *, silence_s: float) -> None:
        self._model = model
        self._silence_s = silence_s
        self.members = Members(model.nodes - 1, silence_s=silence_s, tls=replica_tls(protocol.tls))
        address = ray.util.get_node_ip_address()
        self._first_port = reserve(address, range(1), f"models.{model.name}.nodes")  # kept until the workers have bound it
        self.node = NodeOfEngine(0, address, address, self._first_port.port)
        self._actors: list[Any] = []
        self._nodes = set[str]()
        """Ray's ids of the members' nodes."""

    async def form(self, settings: Mapping[str, Any], *, limit_s: float) -> None:
        """Start an actor in each other bundle, and wait until all have joined.

        Raises:
            EngineStartFailed: One has ended, or not all joined within ``limit_s``. None is left.
        """
        try:
            port = await self.members.listen(self.node.address)
        except OSError as exc:
            raise EngineStartFailed(model=self._model.name, reason=f"no port for its other nodes: {in_one_line(exc)}") from exc
        summons = {
            "port": port,
            "secret": self.members.secret,
            "silence_s": self._silence_s,
            "first_address": self.node.first_address,
            "first_port": self.node.first_port,
        }
        runs = [asyncio.ensure_future(self._summon(rank, settings, summons)) for rank in range(1, self._model.nodes)]
        joined = asyncio.ensure_future(self.members.all_joined())
        try:
            done, _ = await asyncio.wait([joined, *runs], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if joined not in done:
                for run in done:
                    run.result()
                raise EngineStartFailed(model="", reason=f"not all nodes joined within {limit_s:g} s")
            await joined
        except AWAY as exc:  # from Ray, or from the member
            self.members.close()
            raise EngineStartFailed(model=self._model.name, reason=in_one_line(exc)) from exc
        except EngineStartFailed as failed:
            self.members.close()
            raise EngineStartFailed(model=self._model.name, reason=failed.reason) from None
        finally:
            joined.cancel()
            for run in runs:
                run.cancel()

    async def drained_node(self) -> tuple[str, float]:
        """Wait until Ray drains the node of a member; return its id and the seconds until it ends, which may be infinite.

        Serve migrates an actor only by the actor's own node.
        """
        gcs = worker.global_worker.gcs_client
        look = functools.partial(gcs.get_draining_nodes, timeout=_GCS_S)  # node -> Unix time in ms, 0 without a deadline
        node, ends_at_ms = await first_draining(self._nodes, look, every_s=_LOOK_EVERY_S)
        return node, max(0.0, ends_at_ms / 1000 - time.time()) if ends_at_ms else math.inf

    async def _summon(self, rank: int, settings: Mapping[str, Any], summons: Mapping[str, Any]) -> None:
        model = self._model
        place = PlacementGroupSchedulingStrategy(ray.util.get_current_placement_group(), placement_group_bundle_index=rank)
        actor = (
            ray.remote(ShardActor)
            .options(
                num_cpus=model.num_cpus,
                num_gpus=model.gpus_per_node(),
                resources=dict(model.resources),
                scheduling_strategy=place,
                runtime_env={"env_vars": dict(PROCESS_ENVIRONMENT)},
            )
            .remote()
        )
        self._actors.append(actor)  # Ray ends an actor that no handle names
        self._nodes.add(await actor.node_id.remote())
        said = await actor.run.remote(dict(settings), model.name, {**summons, "rank": rank})
        raise EngineStartFailed(model=model.name, reason=f"node {rank} of the engine: {said}")
