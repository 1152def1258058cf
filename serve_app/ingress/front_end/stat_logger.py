"""vLLM's Prometheus logger becomes one that several models of a process can have.

vLLM's logger expects to be alone in its process: each new logger unregisters every ``vllm:`` collector. Here the models of one ingress
share the collectors; vLLM labels every series with ``model_name``.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.core import REGISTRY, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics import loggers

from serve_app.ingress.books.lazy_histogram import LazyHistogram


def _shared(cls: type) -> Any:
    """Return a stand-in for a prometheus class that returns the existing collector of a name, if there is one."""
    made: dict[str, Any] = {}

    def collector(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in made:
            made[name] = cls(name, *args, **kwargs)
        return made[name]

    return staticmethod(collector)


class Caches(Collector):
    """The collector of `vllm:cache_config_info`: the KV cache of a replica of each model, in the labels. Gateways read it."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}
        """vLLM's CacheConfig by model. The links write into it what replicas report."""

    def collect(self) -> Iterator[Metric]:
        rows = [{"model_name": model, "engine": "0", **config.metrics_info()} for model, config in self.of.items()]
        if rows:
            family = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(rows[0]))
            for row in rows:
                family.add_metric([str(value) for value in row.values()], 1.0)
            yield family


def shared_stat_logger(caches: Caches) -> Any:
    """Return a class of vLLM's Prometheus logger. Each model makes one logger, and all loggers share the collectors."""
    shared = {"_gauge_cls": _shared(Gauge), "_counter_cls": _shared(Counter), "_histogram_cls": _shared(LazyHistogram)}

    def sharing(part: type) -> Any:
        """Return ``part`` of vLLM's logger with stand-ins for the prometheus classes that it uses."""
        return type(part.__name__, (part,), {name: cls for name, cls in shared.items() if hasattr(part, name)})

    class StatLogger(sharing(loggers.PrometheusStatLogger)):  # type: ignore[misc]  # a class made at run time
        _spec_decoding_cls = sharing(loggers.SpecDecodingProm)
        _kv_connector_cls = sharing(loggers.KVConnectorProm)
        _ec_connector_cls = sharing(loggers.ECConnectorProm)
        _perf_metrics_cls = sharing(loggers.PerfMetricsProm)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            unregister = loggers.unregister_vllm_metrics
            loggers.unregister_vllm_metrics = lambda: None  # it would remove the series of the other models
            try:
                super().__init__(*args, **kwargs)
            finally:
                loggers.unregister_vllm_metrics = unregister
            self.stats_beside: Callable[[], Any] = lambda: None
            """Returns the statistics of tokens that vLLM was not given."""

        def log_metrics_info(self, type: str, config_obj: Any) -> None:
            """Show the cache of this model as its replicas report it, which vLLM's own gauge does not know when it is made."""
            caches.of[self.vllm_config.model_config.served_model_name] = config_obj

        def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
            """Do what vLLM's method does, but add tokens that vLLM was not given, and observe all gaps between tokens at once."""
            if (beside := self.stats_beside()) is not None:
                iteration_stats = _sum(beside, iteration_stats)
            gaps: list[float] = []
            if iteration_stats is not None:
                gaps, iteration_stats.inter_token_latencies_iter = iteration_stats.inter_token_latencies_iter, []
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            if gaps:
                self.histogram_inter_token_latency[engine_idx].observe_all(gaps)

    return StatLogger


def _sum(written: Any, stats: Any) -> Any:
    """Return the sum of both statistics; ``stats`` is None if vLLM had no output."""
    if not written.num_generation_tokens:
        return stats
    if stats is None:
        return written
    stats.num_generation_tokens += written.num_generation_tokens
    stats.num_preempted_reqs += written.num_preempted_reqs
    stats.inter_token_latencies_iter += written.inter_token_latencies_iter
    return stats


CACHES = Caches()
REGISTRY.register(CACHES)
SharedPrometheusStatLogger = shared_stat_logger(CACHES)
