"""The tokens and GPU-seconds of a tenant are counted at the end of each request, for a bounded number of tenants."""

from prometheus_client import REGISTRY

from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Tenant
from serve_app.ingress.books.tenant_use import OTHERS, TenantUse
from serve_app.ingress.exchange.exchange import Exchange
from tests.ingress.tenants import caller


def note(use: TenantUse, tenant: str | None, model: str, *, output_tokens: int = 3, gpu_s: float | None = 0.5) -> None:
    exchange = Exchange("/v1/completions", None if tenant is None else caller(Tenant(tenant)))
    exchange.model = model
    request = RequestState("r", 10, 5, Resume.CONTINUE, emitted_ids=[7] * output_tokens)
    request.trail.cached_tokens = 4
    exchange.requests.add(request, "answer")
    use.note(exchange, exchange.requests.totals("complete"), gpu_s)


def used(tenant: str, model: str) -> list[float | None]:
    tokens = [{"tenant": tenant, "model": model, "kind": kind} for kind in ("prompt", "cached", "output")]
    found = [REGISTRY.get_sample_value("serve_app_tenant_tokens_total", labels) for labels in tokens]
    return [*found, REGISTRY.get_sample_value("serve_app_tenant_gpu_seconds_total", {"tenant": tenant, "model": model})]


def test_a_tenant_has_its_tokens_and_gpu_seconds_by_model() -> None:
    use = TenantUse()
    note(use, "team", "use-1")
    note(use, "team", "use-1", output_tokens=5, gpu_s=None)
    note(use, "team", "use-2")
    assert used("team", "use-1") == [20.0, 8.0, 8.0, 0.5]
    assert used("team", "use-2") == [10.0, 4.0, 3.0, 0.5]


def test_who_has_no_tenant_or_was_not_answered_has_no_series() -> None:
    use = TenantUse()
    note(use, None, "use-3")
    note(use, "refused", "use-3", output_tokens=0)
    assert not [s for metric in REGISTRY.collect() for s in metric.samples if s.labels.get("model") == "use-3"]


def test_further_tenants_share_the_series_of_the_others() -> None:
    use = TenantUse(max_tenants=2)
    for tenant in ("a", "b", "c", "d", "a"):
        note(use, tenant, "use-4")
    assert [used(tenant, "use-4")[0] for tenant in ("a", "b", "c", "d", OTHERS)] == [20.0, 10.0, None, None, 20.0]
