"""The ingress deployment runs one ingress replica in Ray Serve: front ends, links to the fleet, the HTTP listener, and the drain."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from serve_app.config import Settings, parse_settings
from serve_app.config.timeouts import serve_shutdown_s
from serve_app.environment import clean
from serve_app.host.core_files import leave_no_core_file
from serve_app.host.logs import log_configuration, use_serve_handlers
from serve_app.host.sigterm import OrderlyEnd
from serve_app.host.tasks import raise_failure
from serve_app.host.vllm_start import settle, without_collection
from serve_app.ingress.serve_targets import ServeTargets
from serve_app.membership import Lease, Membership

logger = logging.getLogger(__name__)


class Ingress:
    """One ingress replica. Serve starts, places, scales and stops it; HTTP requests arrive at its own listener."""

    async def __init__(self, settings: Mapping[str, Any], *_replicas: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        # Imported here, because the command line and Serve's controller import this module and need no vLLM (0.5 GB, 8 s of CPU).
        with without_collection():
            from serve_app.ingress.http.shared_port import fleet_id, refuse_another_fleets_port
            from serve_app.ingress.runtime import IngressRuntime

        use_serve_handlers()
        leave_no_core_file()
        self.settings: Settings = parse_settings(settings)
        log_configuration(self.settings)
        clean(os.environ)
        self.replica_id = serve.get_replica_context().replica_id.unique_id
        self._epoch = time.time_ns()
        own_fleet = fleet_id(self.settings.name, ray.get_runtime_context().gcs_address)
        self._membership = Membership(self.settings.name, self.settings.membership)
        self._targets = ServeTargets(self.settings.name, self.settings.models.values())
        self._runtime = await IngressRuntime.build(
            self.settings,
            ingress_id=self.replica_id,
            fleet_id=own_fleet,
            report=self._report,
            exchange_shares=self._membership.exchange_shares,
        )
        await refuse_another_fleets_port(self.settings.ingress, own_fleet)
        settle()
        await self._runtime.listener.start()
        self._renewing = asyncio.create_task(self._membership.keep(self._lease), name="lease")
        self._tasks = [
            self._renewing,
            *self._runtime.start(),
            asyncio.create_task(self._runtime.prepare_grammars(), name="grammars"),
            asyncio.create_task(self._membership.watch(self._runtime.set_members), name="membership"),
        ]
        self._end = OrderlyEnd(self._drain, serve_shutdown_s(self.settings))
        self._end.begin_at_sigterm()

    def _lease(self) -> Lease:
        app = self._runtime.app
        return Lease(
            member_id=self.replica_id,
            role="ingress",
            model="",
            host=self.settings.ingress.host,
            port=self.settings.ingress.port,
            epoch=self._epoch,
            pid=os.getpid(),
            vllm_version=self._runtime.vllm_version,
            state="draining" if app.draining else "ready",
            load={"streams": app.num_running, "models": self._runtime.describe()} | self._runtime.keys_file_state(),
            quarantined=self._runtime.quarantined(),
            condemned=self._runtime.condemned(),
        )

    async def _report(self) -> dict[str, Any]:
        """Return the lease board's report, with targets and starting replicas by model if Serve's controller answers.

        Raises:
            LeaseBoardSilent: The board does not answer.
        """
        return {**await self._membership.report(), "models": await self._targets.ask()}

    def check_health(self) -> None:
        """Raise if the replica is broken. Serve calls this every few seconds."""
        self._runtime.listener.check()
        raise_failure(self._tasks)
        for name, front in self._runtime.front_ends.items():
            if not front.engine.is_running:
                raise RuntimeError(f"the front end of {name!r} has stopped")
        self._end.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return numbers only: Serve stops collecting at the first wrong type. Names contain the model; all but gauges count up."""
        streams = float(self._runtime.app.num_running)
        return {"streams": streams, "cpu_s": time.process_time(), **self._runtime.autoscaling_stats()}

    async def __del__(self) -> None:
        """Drain: become unready and leave the lease board, then refuse connections and wait for running requests, within Serve's limit."""
        if (end := getattr(self, "_end", None)) is not None:
            await end.drained()

    async def _drain(self) -> None:
        runtime = self._runtime
        runtime.app.draining = True
        logger.info("draining %d requests", runtime.app.num_running)
        self._tasks.remove(self._renewing)
        self._renewing.cancel()
        await self._membership.release(self.replica_id)
        await asyncio.sleep(self.settings.ingress.unready_s)
        await runtime.drain(self.settings.timeouts.drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._renewing, *self._tasks, return_exceptions=True)
