import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.loggers import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from serve_app.checkpoints import make_tiny_llama
from serve_app.config import parse_settings
from serve_app.core.events import BlocksReported, HeartbeatArrived, LinkOpened, RequestArrived, RequestsAborted
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.load import EngineLoad
from serve_app.core.request import Resume
from serve_app.engine_args import frontend_engine_args
from serve_app.ingress.books.lazy_histogram import MAX_WAITING, LazyHistogram
from serve_app.ingress.books.metrics import Configured, FleetCollector
from serve_app.ingress.fleet.load_gauges import LoadGauges
from serve_app.ingress.front_end.stat_logger import Caches, shared_stat_logger
from tests.doubles.fleet import MODEL, Fleet, in_loop, until
from tests.doubles.fleet import fleet as fleet_on_loopback
from tests.ingress.fake_fronts import ingress, post


def busy_fleet() -> FleetState:
    """Two replicas, one of them full; one request waits, one was aborted."""
    fleet = FleetState(FleetSettings(model="tiny"))
    for replica_id, running, waiting, kv_usage, draining in (("a", 3, 1, 0.25, False), ("b", 2, 4, 0.75, True)):
        fleet.handle(LinkOpened(replica_id, credit=1), now=0.0)
        fleet.handle(HeartbeatArrived(replica_id, EngineLoad(1, running, waiting, kv_usage), draining=draining), now=0.0)
    for request_id in ("r0", "r1", "r2"):
        fleet.handle(RequestArrived(request_id, 10, 5, Resume.CONTINUE, request_id), now=0.0)
    fleet.handle(RequestsAborted(["r2"]), now=0.0)
    fleet.handle(BlocksReported([("of another", 9.0)]), now=0.0)
    return fleet


def test_the_gpus_of_a_model_are_those_of_its_replicas() -> None:
    registry = CollectorRegistry()
    fleets = [busy_fleet(), FleetState(FleetSettings(model="idle"))]
    registry.register(FleetCollector(fleets, {"tiny": Configured(1, 4, gpus=2), "idle": Configured(0, 1, gpus=8)}))
    assert [registry.get_sample_value("serve_app_gpus", {"model": model}) for model in ("tiny", "idle")] == [4, 0]


def test_a_scrape_shows_every_fleet_and_replica() -> None:
    registry = CollectorRegistry()
    registry.register(FleetCollector([busy_fleet(), FleetState(FleetSettings(model="idle"))], {"tiny": Configured(1, 4)}))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'serve_app_waiting_requests{model="tiny"} 1.0',
        'serve_app_waiting_requests{model="idle"} 0.0',
        'serve_app_outstanding_tokens{model="tiny"} 30.0',
        'serve_app_outstanding_tokens{model="idle"} 0.0',
        'serve_app_quarantined_fingerprints{model="tiny"} 1.0',
        'serve_app_quarantined_fingerprints{model="idle"} 0.0',
        'serve_app_engine_requests_total{model="tiny",outcome="aborted"} 1.0',
        'serve_app_routed_total{model="tiny",reason="load"} 1.0',
        'serve_app_resumptions_total{model="tiny"} 0.0',
        'serve_app_resumptions_total{model="idle"} 0.0',
        'serve_app_moved_total{model="tiny"} 0.0',
        'serve_app_moved_total{model="idle"} 0.0',
        'serve_app_kv_read_tokens_total{model="tiny"} 0.0',
        'serve_app_kv_read_tokens_total{model="idle"} 0.0',
        'serve_app_kv_read_bytes_total{model="tiny"} 0.0',
        'serve_app_kv_read_bytes_total{model="idle"} 0.0',
        'serve_app_expected_prefix_hit_tokens_total{model="tiny"} 0.0',
        'serve_app_expected_prefix_hit_tokens_total{model="idle"} 0.0',
        'serve_app_low_priority_waiting{at="ingress",model="tiny"} 0.0',
        'serve_app_low_priority_waiting{at="replica",model="tiny"} 0.0',
        'serve_app_low_priority_waiting{at="ingress",model="idle"} 0.0',
        'serve_app_low_priority_waiting{at="replica",model="idle"} 0.0',
        'serve_app_replica_bound{bound="min",model="tiny"} 1.0',
        'serve_app_replica_bound{bound="max",model="tiny"} 4.0',
        'serve_app_gpus{model="tiny"} 0.0',
        'serve_app_replica_held{model="tiny",replica="a"} 1.0',
        'serve_app_replica_held{model="tiny",replica="b"} 0.0',
        'serve_app_replica_outstanding_tokens{model="tiny",replica="a"} 15.0',
        'serve_app_replica_outstanding_tokens{model="tiny",replica="b"} 0.0',
        'serve_app_replica_running{model="tiny",replica="a"} 3.0',
        'serve_app_replica_running{model="tiny",replica="b"} 2.0',
        'serve_app_replica_waiting{model="tiny",replica="a"} 1.0',
        'serve_app_replica_waiting{model="tiny",replica="b"} 4.0',
        'serve_app_replica_kv_usage{model="tiny",replica="a"} 0.25',
        'serve_app_replica_kv_usage{model="tiny",replica="b"} 0.75',
        'serve_app_replica_draining{model="tiny",replica="a"} 0.0',
        'serve_app_replica_draining{model="tiny",replica="b"} 1.0',
        'serve_app_replica_steps_total{model="tiny",replica="a"} 1.0',
        'serve_app_replica_steps_total{model="tiny",replica="b"} 1.0',
    ]


def test_a_scrape_shows_how_long_resumed_requests_stood_still() -> None:
    fleet = busy_fleet()
    for gap_s in (0.2, 0.25, 3.0, 99.0):
        fleet.failover.gaps.add("continue", gap_s)
    registry = CollectorRegistry()
    registry.register(FleetCollector([fleet]))
    name, labels = "serve_app_resume_gap_seconds", {"model": "tiny", "way": "continue"}
    ends = ("0.1", "0.25", "2.0", "4.0", "60.0", "+Inf")
    assert [registry.get_sample_value(f"{name}_bucket", {**labels, "le": end}) for end in ends] == [0.0, 2.0, 2.0, 3.0, 3.0, 4.0]
    assert registry.get_sample_value(f"{name}_count", labels) == 4.0
    assert registry.get_sample_value(f"{name}_sum", labels) == 102.45


def test_the_gauges_of_a_step_become_the_fleets() -> None:
    stats = SimpleNamespace(
        num_running_reqs=1,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.1,
        prefix_cache_stats="the step's own",
    )
    LoadGauges(busy_fleet()).show(stats)
    assert stats == SimpleNamespace(
        num_running_reqs=5,
        num_waiting_reqs=6,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.75,
        prefix_cache_stats="the step's own",
    )
    LoadGauges(FleetState(FleetSettings(model="idle"))).show(stats)
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)


def test_a_load_that_ends_between_two_steps_is_shown_once() -> None:
    fleet = busy_fleet()
    gauges = LoadGauges(fleet)
    assert gauges.changes() is None
    fleet.handle(HeartbeatArrived("a", EngineLoad(2, 0, 0, 0.0), draining=False), now=1.0)
    assert gauges.changes() == SchedulerStats(num_running_reqs=2, num_waiting_reqs=5, kv_cache_usage=0.75)
    assert gauges.changes() is None


@in_loop
async def test_vllms_gauges_follow_a_load_to_its_end() -> None:
    async with fleet_on_loopback() as f:
        await f.join("a")
        for running in (3, 0):
            await until(partial(is_shown, f, running))


def is_shown(f: Fleet, running: int) -> bool:
    """Return whether vLLM's newest stats have this load, which the replica reports: again and again, as its own heartbeats do."""
    f.client.fleet.handle(HeartbeatArrived("a", EngineLoad(1, running, 0, 0.0), draining=False), now=time.monotonic())
    return bool(f.front.stats) and f.front.stats[-1].num_running_reqs == running


@pytest.fixture
def no_vllm_collectors() -> Iterator[None]:
    """Take them away before and after: those of one logger are in the way of another one's, of this module's tests or of another's."""
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


@pytest.mark.usefixtures("no_vllm_collectors")
def test_models_share_vllms_collectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    path = str(make_tiny_llama(tmp_path / "tiny"))
    stat_logger = shared_stat_logger(Caches())  # the module's own may have made collectors for another test, which are gone now
    for name in ("a", "b"):
        (model,) = parse_settings({"models": {name: {"model": path}}}).models.values()
        stat_logger(AsyncEngineArgs(**frontend_engine_args(model, path)).create_engine_config(), [0])
    for series in ("vllm:num_requests_running", "vllm:estimated_flops_per_gpu_total"):
        values = [REGISTRY.get_sample_value(series, {"model_name": name, "engine": "0"}) for name in ("a", "b")]
        assert values == [0.0, 0.0]


@in_loop
async def test_a_replica_that_lost_its_engine_is_counted_with_the_reason_and_one_that_stopped_is_not() -> None:
    def lost(reason: str) -> float:
        return REGISTRY.get_sample_value("serve_app_engines_lost_total", {"model": MODEL, "reason": reason}) or 0.0

    reasons = {code: lost(code) for code in ("engine_dead", "engine_out_of_memory", "engine_silent", "drained", "made_up")}
    async with fleet_on_loopback() as fleet:
        await fleet.join(*"abcde")
        for replica_id, code in zip("abcde", reasons, strict=True):
            await fleet.replicas[replica_id].server.close(code, "why")
        await until(lambda: not fleet.client.fleet.replicas)
    assert {code: lost(code) - before for code, before in reasons.items()} == {
        "engine_dead": 1,
        "engine_out_of_memory": 1,
        "engine_silent": 1,
        "drained": 0,
        "made_up": 0,
    }


@pytest.mark.parametrize("num", [204, 3 * MAX_WAITING])
def test_a_lazy_histogram_shows_what_prometheus_own_shows(num: int) -> None:
    chosen = random.Random(1)
    values = [chosen.expovariate(5.0) for _ in range(num - 4)] + [0.1, 0.5, 0.0, 100.0]
    lazy = LazyHistogram("gaps", "", ["model"], buckets=(0.1, 0.5, 1.0), registry=None)
    own = Histogram("gaps", "", ["model"], buckets=(0.1, 0.5, 1.0), registry=None)
    for value in values:
        own.labels("m").observe(value)
        lazy.labels("m").observe(value)
    own.labels("m").observe(7.0)
    lazy.labels("m").observe_all([7.0])
    for _ in range(2):  # a look takes nothing away
        wanted, found = (
            {(s.name, s.labels.get("le")): s.value for s in next(iter(h.collect())).samples if s.name != "gaps_created"}
            for h in (own, lazy)
        )
        assert found == pytest.approx(wanted)
        assert found["gaps_count", None] == len(values) + 1


def test_answers_of_the_ingress_itself_count_as_http_requests_too() -> None:
    def counted(handler: str, status: str) -> float:
        labels = {"method": "none" if handler == "none" else "POST", "status": status, "handler": handler}
        return REGISTRY.get_sample_value("http_requests_total", labels) or 0.0

    app = ingress()
    before = counted("none", "4xx"), counted("/v1/completions", "4xx"), counted("/v1/completions", "2xx")
    assert post(app, "/no/such/route").status_code == 404
    assert post(app, json={"model": "unknown"}).status_code == 404
    assert post(app, content=b"x" * 2000).status_code == 413
    assert post(app, json={"model": "tiny"}).status_code == 200
    after = counted("none", "4xx"), counted("/v1/completions", "4xx"), counted("/v1/completions", "2xx")
    assert [now - was for now, was in zip(after, before, strict=True)] == [1, 2, 1]


def test_the_cache_of_each_model_is_that_which_its_replicas_report() -> None:
    caches = Caches()
    sizes: dict[str, str | None] = {"num_gpu_blocks": None}
    caches.of["red"] = SimpleNamespace(metrics_info=lambda: {"block_size": "16", **sizes})
    caches.of["blue"] = SimpleNamespace(metrics_info=lambda: {"block_size": "16", "num_gpu_blocks": "7"})
    sizes["num_gpu_blocks"] = "512"  # a replica has joined
    (family,) = caches.collect()
    assert family.name == "vllm:cache_config_info"
    assert [(s.labels["model_name"], s.labels["num_gpu_blocks"], s.value) for s in family.samples] == [
        ("red", "512", 1.0),
        ("blue", "7", 1.0),
    ]
