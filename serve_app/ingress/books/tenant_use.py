"""Tenant use is the series by tenant: tokens, GPU-seconds and refusals, counted at the end of each HTTP request, and the longest waits."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from prometheus_client import Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serve_app.books import series
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_report import LongestWait, longest_waits
from serve_app.errors import CannotStartInTime, NoFreePlace, QuotaExceeded, ServingError
from serve_app.ingress.books.shown_names import ShownNames
from serve_app.ingress.exchange.engine_requests import Totals
from serve_app.ingress.exchange.exchange import Exchange

_tokens = series.counter("tenant_tokens")
_gpu_seconds = series.counter("tenant_gpu_seconds")
_refusals = series.counter("tenant_refusals")


@cache
def _of_tokens(tenant: str, model: str) -> tuple[Counter, Counter, Counter]:
    return (
        _tokens.labels(tenant, model, "prompt"),
        _tokens.labels(tenant, model, "cached"),
        _tokens.labels(tenant, model, "output"),
    )


@cache
def _of_gpus(tenant: str, model: str) -> Counter:
    return _gpu_seconds.labels(tenant, model)


def _reason(error: ServingError) -> str | None:
    """Return by which limit a request was refused; None for an error that refuses nothing, and for a line that is tried again."""
    match error:
        case QuotaExceeded():
            return error.quota
        case CannotStartInTime():
            return error.limit
        case NoFreePlace():
            return None
    return error.code if error.http_status in (429, 503) else None


class TenantUse:
    """The counters of all tenants."""

    def __init__(self, names: ShownNames) -> None:
        self._names = names

    def note(self, exchange: Exchange, totals: Totals, gpu_s: float | None) -> None:
        """Count what a request has used, or why it was refused. A request that no engine answered used nothing."""
        if exchange.tenant is None:
            return
        if exchange.error is not None and (reason := _reason(exchange.error)) is not None:
            _refusals.labels(self._names.shown(exchange.tenant), reason).inc()
        if not totals.num_answered:
            return
        labels = (self._names.shown(exchange.tenant), exchange.model)
        prompt, cached, output = _of_tokens(*labels)
        prompt.inc(exchange.requests.prompt_tokens)
        cached.inc(totals.cached_tokens or 0)
        output.inc(totals.output_tokens)
        if gpu_s is not None:
            _of_gpus(*labels).inc(gpu_s)


class TenantWaits(Collector):
    """A collector that finds each tenant's longest wait when it is scraped, so tokens pay nothing for it.

    Args:
        clock: The clock of the fleets' events.
    """

    def __init__(self, fleets: Iterable[FleetState], names: ShownNames, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleets = list(fleets)
        self._names = names
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield both series with a sample for each model and each tenant that waits for it."""
        waited, limits = series.gauge_family("tenant_longest_wait_seconds"), series.gauge_family("tenant_wait_limit_seconds")
        for fleet in self._fleets:
            for tenant, wait in self._shown(longest_waits(fleet, self._clock())).items():
                waited.add_metric([tenant, fleet.settings.model], wait.waited_s)
                if wait.limit_s is not None:
                    limits.add_metric([tenant, fleet.settings.model], wait.limit_s)
        yield from (waited, limits)

    def _shown(self, waits: dict[str, LongestWait]) -> dict[str, LongestWait]:
        """Return the waits by shown name. All tenants without a name of their own have the longest of their waits, with its limit."""
        shown: dict[str, LongestWait] = {}
        for tenant, wait in waits.items():
            name = self._names.shown(tenant)
            shown[name] = max(wait, shown.get(name, wait), key=lambda each: each.waited_s)
        return shown
