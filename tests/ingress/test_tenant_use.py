"""A tenant's tokens and GPU-seconds are counted at the end of each request, its waits at a scrape, for a bounded number of tenants."""

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from serve_app.core.events import RequestArrived
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.request import RequestState, Resume
from serve_app.core.tenants import Tenant
from serve_app.errors import BadRequest, CannotStartInTime, NoFreePlace, QueueFull, QuotaExceeded, ServingError
from serve_app.ingress.books.shown_names import OTHERS, ShownNames
from serve_app.ingress.books.tenant_use import TenantUse, TenantWaits
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
    use = TenantUse(ShownNames(9))
    note(use, "team", "use-1")
    note(use, "team", "use-1", output_tokens=5, gpu_s=None)
    note(use, "team", "use-2")
    assert used("team", "use-1") == [20.0, 8.0, 8.0, 0.5]
    assert used("team", "use-2") == [10.0, 4.0, 3.0, 0.5]


def test_who_has_no_tenant_or_was_not_answered_has_no_series() -> None:
    use = TenantUse(ShownNames(9))
    note(use, None, "use-3")
    note(use, "refused", "use-3", output_tokens=0)
    assert not [s for metric in REGISTRY.collect() for s in metric.samples if s.labels.get("model") == "use-3"]


def refused(tenant: str, error: ServingError) -> None:
    exchange = Exchange("/v1/completions", caller(Tenant(tenant)))
    exchange.fail(error)
    TenantUse(ShownNames(9)).note(exchange, exchange.requests.totals("rejected"), None)


def test_refusals_are_counted_by_the_limit_that_refused() -> None:
    for error in (
        QuotaExceeded("lim", "max_concurrent", 1, 1, 1, 1.0),
        QuotaExceeded("lim", "tokens_per_day", 9, 9, 1, 1.0),
        CannotStartInTime(1, 0.0, 9.0, "first_token_s", 2.0, 1.0),
        CannotStartInTime(1, 9.0, 0.0, "refuse_after_s", 8.0, 1.0),
        CannotStartInTime(1, 0.0, 9.0, "refuse_after_s", 8.0, 1.0),
        QueueFull(waiting=1, limit=1, retry_after_s=5.0),
        NoFreePlace(waiting=1, retry_after_s=1.0),
        BadRequest("prompt", "is long"),
    ):
        refused("lim", error)
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    counted = {
        s.labels["reason"]: s.value
        for s in samples
        if s.name == "serve_app_tenant_refusals_total" and s.labels["tenant"] == "lim"
    }
    wanted = {"max_concurrent": 1.0, "tokens_per_day": 1.0, "first_token_s": 1.0, "refuse_after_s": 2.0, "queue_full": 1.0}
    assert counted == wanted


def test_further_tenants_share_the_series_of_the_others() -> None:
    use = TenantUse(ShownNames(2))
    for tenant in ("a", "b", "c", "d", "a"):
        note(use, tenant, "use-4")
    assert [used(tenant, "use-4")[0] for tenant in ("a", "b", "c", "d", OTHERS)] == [20.0, 10.0, None, None, 20.0]


def waiting_fleet(model: str, **arrived_at: float) -> FleetState:
    """Return a fleet without a replica in which a request of each of these tenants waits, for 30 s at most."""
    fleet = FleetState(FleetSettings(model=model))
    for tenant, at in arrived_at.items():
        event = RequestArrived(f"of {tenant}", 10, 5, Resume.CONTINUE, tenant, tenant=tenant, max_wait_s=30.0)
        fleet.handle(event, now=at)
    return fleet


def scraped(*fleets: FleetState, names: ShownNames, now: float) -> list[str]:
    registry = CollectorRegistry()
    registry.register(TenantWaits(fleets, names, lambda: now))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_scrape_shows_each_tenants_longest_wait_for_each_model_and_its_limit() -> None:
    fleets = waiting_fleet("chat", red=1.0, blue=4.0), waiting_fleet("embed", red=6.0), waiting_fleet("idle")
    assert scraped(*fleets, names=ShownNames(9), now=9.0) == [
        'serve_app_tenant_longest_wait_seconds{model="chat",tenant="red"} 8.0',
        'serve_app_tenant_longest_wait_seconds{model="chat",tenant="blue"} 5.0',
        'serve_app_tenant_longest_wait_seconds{model="embed",tenant="red"} 3.0',
        'serve_app_tenant_wait_limit_seconds{model="chat",tenant="red"} 30.0',
        'serve_app_tenant_wait_limit_seconds{model="chat",tenant="blue"} 30.0',
        'serve_app_tenant_wait_limit_seconds{model="embed",tenant="red"} 30.0',
    ]


def test_tenants_that_share_a_name_show_the_longest_of_their_waits() -> None:
    names = ShownNames(1)
    assert names.shown("first") == "first"
    shown = scraped(waiting_fleet("chat", b=2.0, c=3.0, first=4.0), names=names, now=9.0)
    assert shown[:2] == [
        'serve_app_tenant_longest_wait_seconds{model="chat",tenant="others"} 7.0',
        'serve_app_tenant_longest_wait_seconds{model="chat",tenant="first"} 5.0',
    ]
