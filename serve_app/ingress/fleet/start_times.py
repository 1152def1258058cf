"""Start times of a model's replicas, which their leases report, become events for the fleet."""

import logging
import math
from collections.abc import Iterable, Iterator

from serve_app.config import ModelSettings
from serve_app.core.events import StartMeasured
from serve_app.membership import Lease

logger = logging.getLogger(__name__)


class StartTimes:
    """The start times of one model. A warning is logged once if the first replica takes longer to start than a request waits for it."""

    def __init__(self, model: ModelSettings, *, no_replica_s: float) -> None:
        self._model = model
        self._no_replica_s = no_replica_s
        self._warned = False

    def events(self, leases: Iterable[Lease]) -> Iterator[StartMeasured]:
        """Yield an event for each lease with a ``start_s``: seconds from being scheduled to ready."""
        for lease in leases:
            start_s = lease.load.get("start_s")
            if isinstance(start_s, int | float) and 0 < start_s < math.inf:
                self._warn_if_too_long(start_s)
                yield StartMeasured(lease.member_id, float(start_s))

    def _warn_if_too_long(self, start_s: float) -> None:
        if self._warned or self._model.replicas.min > 0 or start_s <= self._no_replica_s:
            return
        self._warned = True
        logger.warning(
            "a replica of %s took %.1f s to start and timeouts.no_replica_s is %g: with replicas.min 0 the requests that start "
            "the first one are refused before it is there; set timeouts.no_replica_s to %d or more, or replicas.min to 1",
            self._model.name,
            start_s,
            self._no_replica_s,
            math.ceil(1.2 * start_s),  # starts vary, and a request also waits for the decision to start a replica
        )
