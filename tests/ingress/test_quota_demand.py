"""Requests that a tenant's quota refuses are no demand for the autoscaler, and the ingress reports their number beside the demand."""

import json
from pathlib import Path
from typing import Any, cast

import httpx

from serve_app.autoscaling.policy import load_at_ingresses
from serve_app.checkpoints import make_tiny_llama
from serve_app.core.tenants import Tenant
from serve_app.errors import QuotaExceeded
from serve_app.ingress.books.books import Books
from serve_app.ingress.exchange.exchange import Exchange
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.runtime import IngressRuntime
from tests.doubles.fleet import MODEL, in_loop
from tests.ingress.serving import application
from tests.ingress.tenants import caller, digest, of_file

KEY = "sk-of-the-tenant-red"
FILE = json.dumps({"tenants": {"red": {"keys": [{"id": "r", "sha256": digest(KEY)}], "limits": {"tokens_per_minute": 100}}}})


def load_of(app: IngressApp) -> dict[str, Any]:
    """Return what the autoscaler learns of the model from all that this ingress has counted."""
    stats = IngressRuntime(app, cast(Any, None), cast(Any, app.front_ends), cast(Any, None)).autoscaling_stats()
    return load_at_ingresses(app.front_ends[MODEL].model, {"i": (0.0, stats)}, stats)


@in_loop
async def test_a_refusal_by_a_quota_is_counted_beside_the_demand(tmp_path: Path) -> None:
    tenants = of_file(tmp_path / "tenants.yaml", FILE)
    async with application(make_tiny_llama(tmp_path / "tiny"), AppLimits(10 << 20), tenants=tenants) as (app, _, _):
        transport, headers = httpx.ASGITransport(app), {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress", headers=headers) as http:

            async def status(prompt: list[int] | list[list[int]]) -> int:
                ask = {"model": MODEL, "prompt": prompt, "max_tokens": 10, "ignore_eos": True}
                return (await http.post("/v1/completions", json=ask)).status_code

            assert await status([5] * 50) == 200
            demand = load_of(app)
            assert (demand["requests"], demand["over_quota"], demand["over_quota_unread"]) == (1.0, 0.0, 0.0)
            assert await status([5] * 60) == 429
            assert await status([[5] * 20] * 2) == 429, "one HTTP request, with a list of prompts"
            assert load_of(app) == {**demand, "over_quota": 2.0}
            assert await status([5] * 30) == 200, "the quota is used up"
            demand = load_of(app)
            assert await status([5]) == 429, "before it is read"
            assert load_of(app) == {**demand, "over_quota_unread": 1.0}


def test_a_line_of_a_batch_that_a_quota_refuses_is_not_counted() -> None:
    """It is tried again, and its batch counts by its deadline."""
    books = Books()
    for background in (True, False):
        exchange = Exchange("/v1/completions", caller(Tenant("red")), background=background)
        exchange.model = "m"
        exchange.fail(QuotaExceeded("red", "tokens_per_minute", 9, 9, 1, 1.0))
        books.end(exchange)
    assert books.over_quota == {"m": 1}
