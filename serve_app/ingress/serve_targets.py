"""`ServeTargets` asks Serve's controller, for people who watch the fleet, how many replicas each model is to have and which start."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from serve_app.autoscaling.rules import replica_deployment
from serve_app.config import ModelSettings
from serve_app.membership import AWAY

logger = logging.getLogger(__name__)

LIMIT_S = 1.0
"""How long Serve's controller may take. After this time the fleet is shown without its answer."""


class ServeTargets:
    """The deployments of one application's models."""

    def __init__(self, application: str, models: Iterable[ModelSettings]) -> None:
        self._application = application
        self._deployments = {model.name: replica_deployment(model) for model in models}
        self._controller: asyncio.Future[Any] | None = None

    async def ask(self) -> dict[str, Any]:
        """Return target and starting replicas by model; empty if the controller does not answer within `LIMIT_S`."""
        try:
            async with asyncio.timeout(LIMIT_S):
                controller = await self._handle()
                calls = [self._details(controller, deployment) for deployment in self._deployments.values()]
                return dict(zip(self._deployments, await asyncio.gather(*calls), strict=True))
        except (*AWAY, LookupError, AttributeError) as exc:  # LookupError: Serve builds the application anew
            logger.debug("Serve does not report its targets: %s: %s", type(exc).__name__, exc)
            if not isinstance(exc, TimeoutError):  # after a late answer the handle is still valid
                self._controller = None
            return {}

    async def _handle(self) -> Any:
        """Return a handle of the controller. With Ray's control store away, one thread waits for it, however often this is called.

        A look-up that has failed is followed by another.
        """
        if self._controller is None or (self._controller.done() and self._controller.exception() is not None):
            look = asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            self._controller = asyncio.ensure_future(look)
        return await asyncio.shield(self._controller)

    async def _details(self, controller: Any, deployment: str) -> dict[str, Any]:
        details = await controller.get_deployment_details.remote(self._application, deployment)
        starting = [
            # Serve knows the machine once the replica's process runs there.
            {"replica_id": r.replica_id, "since": r.start_time_s, "host": r.node_ip or ""}
            for r in details.replicas
            if r.state == "STARTING"
        ]
        return {"target": details.target_num_replicas, "starting": starting}
