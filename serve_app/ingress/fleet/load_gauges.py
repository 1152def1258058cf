"""`LoadGauges` shows vLLM's gauges the load of the whole fleet, which is one engine to them."""

from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from serve_app.core.fleet import FleetState


class LoadGauges:
    """The load of the whole fleet, which replaces one engine's load in the ``SchedulerStats`` for vLLM's gauges."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self._shown = self._load()

    def show(self, stats: Any) -> None:
        """Put the load of the fleet into a step's stats, and leave the step's counters as they are."""
        self._shown = stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage = self._load()
        stats.num_skipped_waiting_reqs = 0  # a replica counts skipped requests as waiting

    def changes(self) -> SchedulerStats | None:
        """Return stats if the load differs from the last one shown: after the last step, no other step would show that the load ended."""
        if self._load() == self._shown:
            return None
        stats = SchedulerStats()
        self.show(stats)
        return stats

    def _load(self) -> tuple[int, int, float]:
        """Return running and waiting requests of the whole fleet, and the used share of the fullest KV cache."""
        replicas = self._fleet.replicas.values()
        running = sum(r.load.running for r in replicas)
        waiting = sum(r.load.waiting for r in replicas) + len(self._fleet.waiting)
        return running, waiting, max((r.load.kv_usage for r in replicas), default=0.0)
