"""An ingress is built from its configuration, with a fake front end, and reports numbers to the autoscaler."""

import asyncio
import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY
from starlette.types import Receive, Scope, Send

from serve_app.autoscaling.policy import load_at_ingresses
from serve_app.config import parse_settings
from serve_app.core.events import LinkEnd, PoolsPlanned
from serve_app.core.load import EngineLoad
from serve_app.core.lost_replicas import LostReplicas
from serve_app.core.request import RequestState, Resume
from serve_app.core.tally import Tally
from serve_app.errors import ConfigError
from serve_app.ingress.books import metrics
from serve_app.ingress.exchange.held_answer import current_exchange
from serve_app.ingress.http.callers import IN_FORCE
from serve_app.ingress.runtime import IngressRuntime
from serve_app.membership import Lease
from tests.core.helpers import Output, arrived, fleet_of, outputs, run
from tests.doubles.fleet import in_loop, until
from tests.ingress.fake_fronts import call, echo, front
from tests.ingress.issuer import issuing
from tests.ingress.tenants import digest


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and note an engine request that took 2 s to its first token."""
    exchange = current_exchange()
    assert exchange is not None
    first = RequestState("r", 5, 5, Resume.CONTINUE)
    exchange.requests.add(first, "answer")
    first.arrived_at, first.trail.first_token_at = 10.0, 12.0
    await echo(scope, receive, send)


async def waiting_front(*args: Any) -> Any:
    """A front end whose client waits for ever in `run`."""
    built = front("built", answer)
    cast(Any, built.client).run = asyncio.Event().wait
    return built


@in_loop
async def test_an_ingress_shows_latencies_of_as_many_keys_as_its_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fake_front(*args: Any) -> Any:
        return front("built", answer)

    (tmp_path / "keys").write_text("0123456789abcdef")
    monkeypatch.setattr(IngressRuntime, "_front_end", fake_front)
    monkeypatch.setattr(metrics, "register", lambda *args: None)
    ingress = {"api_keys_file": str(tmp_path / "keys"), "key_latencies": 1}
    settings = parse_settings({"models": {"built": {"model": "/m"}}, "ingress": ingress})
    built = await IngressRuntime.build(settings, ingress_id="i", fleet_id="f")
    request: Any = {"json": {"model": "built"}, "headers": {"authorization": "Bearer 0123456789abcdef"}}
    response = await call(built.app, "POST", "/v1/completions", **request)
    assert response.status_code == 200
    (shown,) = {
        (sample.labels["key"] == "others", sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "serve_app_key_ttft_seconds_sum" and sample.labels["model"] == "built"
    }
    assert shown == (False, 2.0)


@in_loop
async def test_an_ingress_reports_the_replicas_that_it_has_lost_and_no_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, built_front = LostReplicas("built"), front("built")
    built_front.client.links = cast(Any, SimpleNamespace(lost=lost))

    async def fake_front(*args: Any) -> Any:
        return built_front

    async def report() -> dict[str, Any]:
        load = {"running": 1, "tenants_file_change": (1, "tenants.blue.weight: is 0")}
        return {"members": [{"replica_id": "a", "state": "ready", "load": load}], "decisions": [], "models": {}}

    monkeypatch.setattr(IngressRuntime, "_front_end", fake_front)
    monkeypatch.setattr(metrics, "register", lambda *args: None)
    settings = parse_settings({"models": {"built": {"model": "/m"}}})
    built = await IngressRuntime.build(settings, ingress_id="i", fleet_id="f", report=report)
    lost.lose("a", LinkEnd.ENGINE_DIED, "why", time=5.0)
    answered = (await call(built.app, "GET", "/fleet")).json()
    assert answered["members"] == [{"replica_id": "a", "state": "lost", "load": {"running": 1}}], "any tenant may read it"
    assert answered["lost"] == [{"replica_id": "a", "model": "built", "time": 5.0, "cause": "why"}]


@in_loop
async def test_an_ingress_follows_the_tenants_file_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(key: str, model: str) -> None:
        tenants = {"team": {"keys": [{"id": "k", "sha256": digest(key)}], "models": [model]}}
        file.write_text(json.dumps({"tenants": tenants}))

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await call(built.app, "POST", "/v1/completions", json={"model": "built"}, headers=headers)).status_code

    async def logged(said: str) -> None:
        await until(lambda: any(said in record.getMessage() for record in caplog.records))

    caplog.set_level(logging.INFO)
    file = tmp_path / "tenants.yaml"
    monkeypatch.setattr(IngressRuntime, "_front_end", waiting_front)
    monkeypatch.setattr(metrics, "register", lambda *args: None)
    settings = parse_settings({"models": {"built": {"model": "/m"}}, "ingress": {"tenants_file": str(file)}})
    file.write_text("tenants: {team: {keyz: []}}")
    with pytest.raises(ConfigError, match=r"tenants\.team\.keyz: unknown key; did you mean keys\?"):
        await IngressRuntime.build(settings, ingress_id="i", fleet_id="f")
    write("first", "built")
    built = await IngressRuntime.build(settings, ingress_id="i", fleet_id="f")
    assert (await status("first"), await status("second")) == (200, 401)
    tasks = built.start()
    file.write_text("tenants: {team: {keyz: []}}")
    await logged("stay in force")
    assert (await status("first"), await status("second")) == (200, 401), "the new file has a mistake"
    assert IN_FORCE._value.get() == 0
    write("second", "bulit")
    await logged("tenants.team.models[0]: is 'bulit', no served model; did you mean built?")
    await logged("tenants with such models keep those they had; all else is in force, 1 API keys")
    assert (await status("first"), await status("second")) == (401, 200), (
        "the old key may be revoked, and the team has the model it had"
    )
    assert (IN_FORCE._value.get(), built.keys_file_state()["tenants_file_in_force"]) == (0, False)
    write("second", "built")
    await logged("has changed")
    assert (await status("first"), await status("second")) == (401, 200)
    change = (file.stat().st_mtime_ns, f"{file} has changed: 1 API keys are in force")
    assert IN_FORCE._value.get() == 1
    assert built.keys_file_state() == {"tenants_file_in_force": True, "tenants_file_change": change}
    for task in tasks:
        task.cancel()


@in_loop
async def test_an_ingress_fetches_the_keys_of_the_issuer_of_its_configuration_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IngressRuntime, "_front_end", waiting_front)
    monkeypatch.setattr(metrics, "register", lambda *args: None)
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {red: {}}")
    with issuing() as issuer:
        oidc = {"issuer": issuer.url, "audience": "serve-app", "tenant_claim": "groups"}
        values = {"models": {"built": {"model": "/m"}}, "ingress": {"tenants_file": str(file), "oidc": oidc}}
        built = await IngressRuntime.build(parse_settings(values), ingress_id="i", fleet_id="f")
        tasks = built.start()
        await until(lambda: issuer.num_readings > 0)
        asked: list[tuple[dict[str, Any], int]] = [({}, 200), ({"groups": ["blue"]}, 403), ({"aud": "another"}, 401)]
        for claims, expected in asked:
            headers = {"authorization": f"Bearer {issuer.token(**claims)}"}
            found = await call(built.app, "POST", "/v1/completions", json={"model": "built"}, headers=headers)
            assert found.status_code == expected
        assert issuer.num_readings == 1
        for task in tasks:
            task.cancel()


def test_the_autoscaler_finds_all_that_an_ingress_reports() -> None:
    fleet = fleet_of("a", credit=2)
    lines = [replace(arrived(f"b{number}"), background=True) for number in range(2)]
    run(fleet, *lines, arrived("r0"), outputs("a", Output("b0@0", [5])))
    fleet.replicas["a"].load = EngineLoad(waiting=1)  # b1, by the last heartbeat
    model = parse_settings({"models": {"m": {"model": "/m"}}}).models["m"]
    fronts: Any = {"m": SimpleNamespace(client=SimpleNamespace(fleet=fleet), model=model)}
    batches = SimpleNamespace(lines_per_s=lambda: {"m": 0.5, "other": 1.0})
    app: Any = SimpleNamespace(books=SimpleNamespace(over_quota=Counter({"m": 3, "other": 4, "": 5})))
    stats = IngressRuntime(app, cast(Any, None), fronts, cast(Any, None), cast(Any, batches)).autoscaling_stats()
    assert (stats["lines_held/m"], stats["lines_queued/m"], stats["draining/m"]) == (2.0, 1.0, 0.0)
    counted = dict.fromkeys(Tally.__dataclass_fields__, 0.0) | {
        "requests": 1.0,
        "prompt_tokens": 2.0,
        "prefilled_tokens": 2.0,
        "output_tokens": 1.0,
        "lines": 1.0,
        "line_prompt_tokens": 2.0,
        "line_output_tokens": 1.0,
    }
    not_counted = {"over_quota": 3.0, "over_quota_unread": 5.0}
    others = {**not_counted, "waiting": 1.0, "lines_per_s": 0.5}
    assert load_at_ingresses(model, {"i": (0.0, stats)}, stats) == {**counted, **others}


def test_an_ingress_learns_from_the_leases_how_a_models_replicas_divide_into_pools() -> None:
    handled: list[Any] = []
    client = SimpleNamespace(set_members=lambda members: None, handle=handled.append)
    scaled = {"model": "/m", "replicas": {"min": 1, "max": 4}}
    fronts: Any = {"m": SimpleNamespace(client=client, model=parse_settings({"models": {"m": scaled}}).models["m"])}
    app: Any = SimpleNamespace(books=SimpleNamespace(learn_step_costs=list, step_costs=lambda name: None), canaries={})
    runtime = IngressRuntime(app, cast(Any, None), fronts, cast(Any, None))
    lease = Lease("a", "replica", "m", "10.0.0.1", 4000, epoch=1, pid=11)
    runtime.set_members([lease, replace(lease, member_id="o", model="other", prefill_share=0.5)])
    assert handled == []
    runtime.set_members([replace(lease, prefill_share=0.25)])
    assert handled == [PoolsPlanned(0.25)]
    fixed = {"model": "/m", "replicas": {"min": 3, "max": 3}}
    fronts["m"].model = parse_settings({"models": {"m": fixed}}).models["m"]
    runtime.set_members([replace(lease, prefill_share=0.5)])
    assert handled == [PoolsPlanned(0.25)], "a share from before the number was fixed"
