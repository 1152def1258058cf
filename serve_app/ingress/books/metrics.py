"""Metrics are the Prometheus series of an ingress: vLLM's own of HTTP, and those of the fleet."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client.core import REGISTRY, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from prometheus_fastapi_instrumentator import metrics as http_metrics

from serve_app.books import series
from serve_app.core.canary import CanaryState
from serve_app.core.events import LinkEnd
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_report import describe, low_priority_waiting
from serve_app.core.gaps import BOUNDS_S, Gaps
from serve_app.host.surroundings import ClockSteps, free_threads
from serve_app.ingress.books.shown_names import ShownNames
from serve_app.ingress.books.tenant_use import TenantWaits
from serve_app.links.protocol.messages import ENGINE_LOST

# vLLM's own HTTP series are made here, before any vLLM app, so that the middleware of an app finds them and counts nothing.
http_metrics.default(registry=REGISTRY)
_http: dict[str, Any] = {
    name: REGISTRY._names_to_collectors[f"http_{name}"]
    for name in ("requests_total", "request_size_bytes", "response_size_bytes", "request_duration_seconds")
}
_http_seconds: Any = REGISTRY._names_to_collectors["http_request_duration_highr_seconds"]


@cache
def _http_series(method: str, path: str) -> tuple[Any, Any, Any]:
    sizes = _http["request_size_bytes"].labels(path), _http["response_size_bytes"].labels(path)
    return *sizes, _http["request_duration_seconds"].labels(method, path)


@cache
def _http_requests(method: str, path: str, status_class: int) -> Any:
    return _http["requests_total"].labels(method, f"{status_class}xx", path)


def count_http(
    path: str, headers: Iterable[tuple[bytes, bytes]], head: Mapping[str, Any], duration_s: float, method: str = "POST"
) -> None:
    """Count a request as vLLM's middleware does, which sees only the requests that reach one of several models.

    Args:
        path: The route; "none" for a path or method without one.
        headers: The headers of the request.
        head: The answer's ``http.response.start``; empty if the client disconnected before.
    """
    size_in, size_out, seconds = _http_series(method, path)
    _http_requests(method, path, head.get("status", 200) // 100).inc()
    size_in.observe(_content_length(headers))
    size_out.observe(_content_length(head.get("headers", ())))
    _http_seconds.observe(duration_s)
    seconds.observe(duration_s)


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


_engines_lost = series.counter("engines_lost")
_links_lost = series.counter("links_lost")


def count_goodbye(model: str, code: str) -> None:
    """Count a goodbye whose code says that the replica's engine is lost. A replica ends before its own series could be scraped."""
    if code in ENGINE_LOST:
        _engines_lost.labels(model, code).inc()


def count_lost_link(model: str, end: LinkEnd) -> None:
    """Count the end of a link, at either side."""
    _links_lost.labels(model, end.name.lower()).inc()


FREE_DISK = series.gauge("free_disk_bytes")
FREE_DISK.set_function(lambda: shutil.disk_usage(tempfile.gettempdir()).free)
FREE_THREADS = series.gauge("free_threads")
FREE_THREADS.set_function(free_threads)
CLOCK_STEPS = series.gauge("clock_steps_seconds")
CLOCK_STEPS.set_function(ClockSteps().seconds)

_COUNTS = ("resumptions", "moved", "kv_read_tokens", "kv_read_bytes")
"""Series without labels but the model, named as in `core.fleet_report.describe`."""
_REPLICA_GAUGES = ("held", "outstanding_tokens", "running", "waiting", "kv_usage", "draining")
"""Keys that `describe` has for a replica; each becomes a series ``serve_app_replica_NAME``."""


class Configured(NamedTuple):
    """The configuration of a model's replicas: how many at least and at most, and GPUs of each."""

    least: int
    most: int
    gpus: int = 0


class FleetCollector(Collector):
    """A collector that reads the fleets when it is scraped, so requests pay nothing for it."""

    def __init__(self, fleets: Iterable[FleetState], models: Mapping[str, Configured] = MappingProxyType({})) -> None:
        self._fleets = list(fleets)
        self._models = dict(models)

    def collect(self) -> Iterator[Metric]:
        """Yield each series with a sample for every fleet."""
        described = [(fleet, fleet.settings.model, describe(fleet)) for fleet in self._fleets]
        yield from _counts(described)
        low = series.gauge_family("low_priority_waiting")
        for fleet, model, _ in described:
            for at, count in zip(("ingress", "replica"), low_priority_waiting(fleet), strict=True):
                low.add_metric([model, at], count)
        yield low
        gaps = series.histogram_family("resume_gap_seconds")
        for fleet, model, _ in described:
            _add_gaps(gaps, model, fleet.failover.gaps)
        yield gaps
        bound, gpus = series.gauge_family("replica_bound"), series.gauge_family("gpus")
        for model, configured in self._models.items():
            bound.add_metric([model, "min"], configured.least)
            bound.add_metric([model, "max"], configured.most)
        for fleet, model, _ in described:
            if model in self._models:
                gpus.add_metric([model], len(fleet.replicas) * self._models[model].gpus)
        yield from (bound, gpus)
        yield from _replicas(described)


_Described = Sequence[tuple[FleetState, str, Mapping[str, Any]]]


def _counts(described: _Described) -> Iterator[Metric]:
    """Yield the series with one sample for each model, or for each model and word."""
    for name, key in (("waiting_requests", "waiting"), ("outstanding_tokens",) * 2, ("quarantined_fingerprints", "blocked")):
        family = series.gauge_family(name)
        for _, model, state in described:
            family.add_metric([model], state[key])
        yield family
    for name, key in (
        ("engine_requests", "outcomes"),
        ("routed", "routed"),
        ("hand_overs", "hand_overs"),
        ("hand_overs_asked",) * 2,
    ):
        words = series.counter_family(name)
        for _, model, state in described:
            for word, count in state[key].items():
                words.add_metric([model, word], count)
        yield words
    for name, key in (*((name, name) for name in _COUNTS), ("expected_prefix_hit_tokens", "expected_hit_tokens")):
        counts = series.counter_family(name)
        for _, model, state in described:
            counts.add_metric([model], state[key])
        yield counts
    starts = series.gauge_family("cold_start_p90_seconds")
    for _, model, state in described:
        if state["cold_start_s"] is not None:
            starts.add_metric([model], state["cold_start_s"])
    yield starts


def _replicas(described: _Described) -> Iterator[Metric]:
    for name in _REPLICA_GAUGES:
        family = series.gauge_family(f"replica_{name}")
        for _, model, state in described:
            for replica_id, load in state["replicas"].items():
                family.add_metric([model, replica_id], float(load[name]))
        yield family
    steps = series.counter_family("replica_steps")
    for fleet, model, _ in described:
        for replica in fleet.replicas.values():
            steps.add_metric([model, replica.replica_id], replica.load.step)
    yield steps


def _add_gaps(family: HistogramMetricFamily, model: str, gaps: Gaps) -> None:
    ends = [*map(floatToGoString, BOUNDS_S), "+Inf"]
    for way, counts in gaps.counts.items():
        family.add_metric([model, way], list(zip(ends, accumulate(counts), strict=True)), gaps.sums_s[way])


class CanaryCollector(Collector):
    """A collector that reads the states of canaries when it is scraped."""

    def __init__(self, described: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        self._described = dict(described)

    def collect(self) -> Iterator[Metric]:
        requests, states = series.counter_family("canary_requests"), series.gauge_family("canary_state")
        for name, describe_canary in self._described.items():
            canary = describe_canary()
            requests.add_metric([name, canary["of"]], canary["requests"])
            for state in CanaryState:
                states.add_metric([name, canary["of"], state.value], float(state.value == canary["state"]))
        yield from (requests, states)


def register(
    fleets: Iterable[FleetState],
    canaries: Mapping[str, Callable[[], Mapping[str, Any]]],
    models: Mapping[str, Configured],
    tenants: ShownNames,
) -> None:
    """Register collectors of the fleets, with the configuration of their models, of the canaries by name, and of what tenants wait.

    The counters of lost engines and links begin at zero, because Prometheus sees no increase in a series that begins with 1.
    """
    fleets = list(fleets)
    for fleet in fleets:
        for code in ENGINE_LOST:
            _engines_lost.labels(fleet.settings.model, code)
        for end in LinkEnd:
            _links_lost.labels(fleet.settings.model, end.name.lower())
    REGISTRY.register(FleetCollector(fleets, models))
    REGISTRY.register(CanaryCollector(canaries))
    REGISTRY.register(TenantWaits(fleets, tenants))
