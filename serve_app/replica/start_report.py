"""`StartReport` reports how a replica started: to Serve, to its lease, as a gauge, and once in its log."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import ReplicaContext

from serve_app.membership import AWAY
from serve_app.replica.cold_start import ColdStart, EnginePhases

logger = logging.getLogger(__name__)

_SERVE_LIMIT_S = 10.0
_FIRST_TOKEN_LIMIT_S = 300.0
"""After this time the start is logged without a first token: no request came."""
_START_TIME = 19
"""Index among the fields after the command's name in /proc/PID/stat (proc(5), field 22): ticks from boot to the process's creation."""


class StartReport:
    """The report of a replica that has just begun to listen; ``began`` and ``engine_ready`` are monotonic times of this process."""

    def __init__(self, who: Mapping[str, str], *, began: float, engine_ready: float, engine: EnginePhases) -> None:
        self._who = dict(who)
        self._listening = time.monotonic()
        self._began_at = time.time() - (self._listening - began)
        self.start: ColdStart | None = None
        """Known once Serve has answered when it asked for the replica, or failed to answer. It is set once, so readers count each start
        once."""
        self._measured = ColdStart.measured(
            process_created_at(),
            self._began_at,
            began=began,
            engine_ready=engine_ready,
            listening=self._listening,
            engine=engine,
        )

    def load(self) -> dict[str, Any]:
        """Return the start for the lease, empty until it is known."""
        return {} if self.start is None else {"start_s": round(self.start.start_s, 3), "cold_start": self.start.phases()}

    async def run(
        self,
        asked: Awaitable[float | None],
        first_output: asyncio.Event,
        show: Callable[[Mapping[str, float]], None],
        *,
        limit_s: float = _FIRST_TOKEN_LIMIT_S,
    ) -> None:
        """Add the phases that are known only later; log the start after the first tokens, or without them after ``limit_s``."""
        start = self._measured
        try:
            self.start = start = start.asked(await asked, began_at=self._began_at)
            show(start.phases())
            async with asyncio.timeout(limit_s):
                await first_output.wait()
            self.start = start = replace(start, first_token_s=time.monotonic() - self._listening)
            show(start.phases())
        except TimeoutError:
            pass
        finally:
            logger.info("cold start: %s", json.dumps(start.record(**self._who)))


async def asked_at(replica: ReplicaContext) -> float | None:
    """Return the wall-clock time at which Serve's controller asked Ray for this replica; None if it does not answer.

    Ray itself only knows when an actor began to run, not when it was asked for.
    """
    try:
        async with asyncio.timeout(_SERVE_LIMIT_S):
            controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            details = await controller.get_deployment_details.remote(replica.app_name, replica.deployment)
    except (*AWAY, AttributeError) as exc:
        logger.warning("Serve does not say when it asked for this replica: %s: %s", type(exc).__name__, exc)
        return None
    times = [r.start_time_s for r in details.replicas if r.replica_id == replica.replica_id.unique_id]
    return times[0] if times and times[0] > 0 else None


def process_created_at() -> float:
    """Return the wall-clock time of this process's creation, to a tick of 10 ms.

    psutil's is up to a second off: it adds the ticks to the time of boot, which the kernel gives in whole seconds.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START_TIME])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
