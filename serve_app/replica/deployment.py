"""`Replica` is the Ray Serve deployment of one replica: an engine core process, its listener, its lease, its drain."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.metrics import Gauge
from ray.serve.schema import ReplicaRank

from serve_app.config import Settings, cluster_token, parse_settings
from serve_app.config.timeouts import serve_shutdown_s
from serve_app.environment import clean
from serve_app.errors import EngineLost
from serve_app.host.core_files import leave_no_core_file
from serve_app.host.logs import log_configuration, use_serve_handlers
from serve_app.host.sigterm import OrderlyEnd
from serve_app.host.tasks import raise_failure
from serve_app.links.tls import replica_tls
from serve_app.membership import Lease, Membership
from serve_app.replica import pipe
from serve_app.replica.forks import servers_here
from serve_app.replica.group import Group
from serve_app.replica.oom import OomOrder
from serve_app.replica.process import EngineProcess
from serve_app.replica.server import ReplicaIdentity, ReplicaServer
from serve_app.replica.side_channel import SideChannel, reserve
from serve_app.replica.sleeper import Sleeper, host_bytes
from serve_app.replica.start_report import StartReport, asked_at

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.2


def reachable_address(host: str) -> str:
    """Return the address at which ingresses reach a replica that listens on ``host``: with a wildcard, the address of its node."""
    return ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else host


class Replica:
    """One engine. Serve starts, places, replaces and stops it; requests come over its own listener."""

    async def __init__(self, settings: Mapping[str, Any], model_name: str) -> None:  # type: ignore[misc]  # Serve awaits it
        began = time.monotonic()
        use_serve_handlers()
        leave_no_core_file()
        self.settings: Settings = parse_settings(settings)
        log_configuration(self.settings)
        clean(os.environ)
        self.model = self.settings.models[model_name]
        context = serve.get_replica_context()
        self.replica_id = context.replica_id.unique_id
        self._oom_order = OomOrder()
        self._oom_order.set_rank(context.rank.local_rank)
        self._tasks: list[asyncio.Task[Any]] = []
        self._lost: EngineLost | None = None
        self._server: ReplicaServer | None = None
        self._start_report: StartReport | None = None
        self._side_channel: SideChannel | None = None
        self._group: Group | None = None
        self._membership = Membership(self.settings.name, self.settings.membership)
        self._sleeper: Sleeper | None = None
        self._end = OrderlyEnd(self._drain, serve_shutdown_s(self.settings))
        self._drain_s = self.settings.timeouts.drain_s
        self._engine = EngineProcess(self.settings.health, on_message=self._from_engine, on_lost=self._engine_lost)
        if self.model.sleep is not None:
            self._sleeper = Sleeper(self.model, self.settings.timeouts, self._membership, self.replica_id)
            self._tasks.append(running := asyncio.create_task(self._sleeper.run(), name="sleeper"))
            await self._sleeper.get_place(running)
            began = time.monotonic()  # waiting for the GPU belongs to the phases before
        ready = await self._start_engine(settings)
        engine_ready = time.monotonic()
        self._epoch = time.time_ns()
        identity = ReplicaIdentity(self.replica_id, model=self.model.name)
        protocol = self.settings.protocol
        tls = replica_tls(protocol.tls)
        self._server = ReplicaServer(identity, protocol, cluster_token(self.settings), self._engine, ready, tls)
        self._port = await self._server.listen(self.model.num_sharing())
        if self._group is not None:
            self._group.members.tell_that_it_serves()
        who = {"model": self.model.name, "replica": self.replica_id}
        report = self._start_report = StartReport(who, began=began, engine_ready=engine_ready, engine=ready.phases)
        self._start_gauge = Gauge("serve_app_cold_start_seconds", "What each phase of the start took.", ("model", "phase"))
        if self._sleeper is not None:
            self._sleeper.begin(self._engine, self._server, await asyncio.to_thread(host_bytes, self.model))
        self._tasks += [
            asyncio.create_task(self._server.heartbeats(), name="heartbeats"),
            asyncio.create_task(self._membership.keep(self._lease), name="lease"),
            asyncio.create_task(report.run(asked_at(context), self._server.first_output, self._show_start), name="start"),
        ]
        self._end.begin_at_sigterm()
        if self._group is not None:
            self._tasks.append(asyncio.create_task(self._end_with_a_node(self._group), name="nodes"))

    async def _start_engine(self, settings: Mapping[str, Any]) -> pipe.EngineReady:
        from serve_app.checkpoints import resolve_model
        from serve_app.config import default_cache_dir, inherited_environment

        environment = inherited_environment()
        if (kv := self.model.kv).is_on:
            host = reachable_address(self.settings.protocol.host)
            self._side_channel = reserve(host, kv.side_ports(), f"models.{self.model.name}.kv.port")
            environment.update(self._side_channel.environment())
        if self.model.has_shards():
            self._group = Group(self.model, self.settings.protocol, silence_s=self.settings.health.eject_after_s)
            await self._group.form(settings, limit_s=self.settings.timeouts.engine_start_s)
        return await self._engine.start(
            self.model,
            asyncio.to_thread(resolve_model, self.model.model, default_cache_dir()),
            environment=environment,
            timeout_s=self.settings.timeouts.engine_start_s,
            max_frame_bytes=self.settings.protocol.max_frame_bytes,
            measures_itself=self.settings.ingress.counts_gpu_time,
            node=None if self._group is None else self._group.node,
            members=None if self._group is None else self._group.members,
            servers=servers_here(ray.get_runtime_context().get_node_id()) if self.model.warm_start else None,
        )

    async def _end_with_a_node(self, group: Group) -> None:
        node, left_s = await group.drained_node()
        self._drain_s = min(self._drain_s, left_s)
        self._end.begin(f"Ray drains node {node} of the engine")

    def _show_start(self, phases: Mapping[str, float]) -> None:
        for phase, seconds in phases.items():
            self._start_gauge.set(seconds, {"model": self.model.name, "phase": phase})

    def _from_engine(self, message: pipe.FromEngine) -> None:
        if self._server is not None:
            self._server.on_engine_message(message)

    def _engine_lost(self, error: EngineLost) -> None:
        """End this process: Serve notices the death of an actor at once, an unhealthy actor only after three checks."""
        self._lost = error
        logger.error("engine lost (%s): %s", error.code, error)
        self._tasks.append(asyncio.create_task(self._end_process(error), name="end"))

    async def _end_process(self, error: EngineLost) -> None:
        if self._server is not None:
            await self._server.close(error.code, str(error))
            await asyncio.sleep(_LAST_WORDS_S)
        os._exit(1)

    def _lease(self) -> Lease:
        assert self._server is not None
        assert self._start_report is not None
        return Lease(
            member_id=self.replica_id,
            role="replica",
            model=self.model.name,
            release=self.model.release(),
            adapters=tuple(adapter.number(name) for name, adapter in self.model.adapters.items()),
            host=reachable_address(self.settings.protocol.host),
            port=self._port,
            epoch=self._epoch,
            pid=os.getpid(),
            vllm_version=self._server.ready.vllm_version,
            state="draining" if self._server.draining and not self._server.sleeping else "ready",
            load={
                "engine_pid": self._engine.pid,
                "links": sum(1 for _ in self._server.open_links()),
                "attempts": self._server.num_attempts(),
                **self._server.load.report(),
                **self._start_report.load(),
                **({} if self._sleeper is None else {"sleep": str(self._sleeper.phase), **self._sleeper.report()}),
                **({} if (measured := self._server.ready.measured) is None else {"step_costs": asdict(measured)}),
            },
        )

    def check_health(self) -> None:
        """Serve calls this every few seconds. The engine's progress is not checked here: `EngineProcess` judges it."""
        raise_failure(self._tasks)
        if self._lost is not None:
            raise self._lost
        self._end.check()

    def reconfigure(self, user_config: None, rank: ReplicaRank) -> None:
        """Serve calls this after the start, and whenever this replica's rank within its deployment changes."""
        self._oom_order.set_rank(rank.local_rank, self._engine.pid)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics for the autoscaler: numbers only, because one wrong type switches Serve's collection off."""
        if self._server is None or self._start_report is None:
            return {}
        return {
            **{name: float(value) for name, value in self._server.load.report().items()},
            "busy_s": self._server.busy_s,
            **({} if self._sleeper is None else self._sleeper.report()),
            "max_num_seqs": float(self._server.ready.max_num_seqs),
            **({} if (measured := self._server.ready.measured) is None else measured.report()),
            **({} if (start := self._start_report.start) is None else {"cold_start_s": start.start_s}),
        }

    async def __del__(self) -> None:
        """Drain: take nothing new, wait until all attempts have ended or moved away, then stop the engine. Serve limits the time."""
        if self._server is None:
            await self._engine.stop()
        else:
            await self._end.drained()

    async def _drain(self) -> None:
        assert self._server is not None
        logger.info("draining %d attempts", self._server.num_attempts())
        can_run = self._sleeper is None or self._sleeper.end()
        await self._server.drain(self._drain_s if can_run else 0.0)
        if self._sleeper is not None:
            await self._engine.stop()  # before the tasks end, with which its place on the GPU goes to another replica
        for task in self._tasks:
            task.cancel()
        await self._membership.release(self.replica_id)
        await self._server.close("drained", "the replica stopped")
        await self._engine.stop()
