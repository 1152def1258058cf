"""Tenant use is the series of tokens, GPU-seconds and refusals by tenant, counted at the end of each HTTP request."""

from functools import cache

from prometheus_client import Counter

from serve_app.books import series
from serve_app.errors import QuotaExceeded
from serve_app.ingress.exchange.engine_requests import Totals
from serve_app.ingress.exchange.exchange import Exchange

MAX_TENANTS = 200
"""How many tenants get series of their own at an ingress: each has four for each model that it asks."""
OTHERS = "others"
"""The label of all further tenants."""

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


class TenantUse:
    """The series of all tenants. The first ``max_tenants`` that come get series of their own; the others share one."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._known: set[str] = set()

    def note(self, exchange: Exchange, totals: Totals, gpu_s: float | None) -> None:
        """Count what a request has used, or that a quota refused it. A request that no engine answered used nothing."""
        if exchange.tenant is None:
            return
        if isinstance(exchange.error, QuotaExceeded):
            _refusals.labels(self._shown(exchange.tenant), exchange.error.quota).inc()
        if not totals.num_answered:
            return
        labels = (self._shown(exchange.tenant), exchange.model)
        prompt, cached, output = _of_tokens(*labels)
        prompt.inc(exchange.requests.prompt_tokens)
        cached.inc(totals.cached_tokens or 0)
        output.inc(totals.output_tokens)
        if gpu_s is not None:
            _of_gpus(*labels).inc(gpu_s)

    def _shown(self, tenant: str) -> str:
        if tenant not in self._known and len(self._known) < self._max_tenants:
            self._known.add(tenant)
        return tenant if tenant in self._known else OTHERS
