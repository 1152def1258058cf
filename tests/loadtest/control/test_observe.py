"""These tests scrape a target's own figures from a real HTTP server that plays recorded pages."""

import json
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from loadtest.control.observe import Observer, fleet_values, metrics_values, pod_values, ray_token, serve_values
from loadtest.plan.scenario import Observe
from loadtest.records import ServerSample
from loadtest.wire.target import Target
from tests.loadtest.scripted import Peer, Server, certificate_for_loopback

# Recorded from vllm 0.32.0's PrometheusStatLogger, most series left out.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.75
vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 80.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 60.0
vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 20.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7952857156574411e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 37.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 6.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 4.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 2.0
vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 8.0
vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 80.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.75
vllm:request_queue_time_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} 0.5
vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 1.0
vllm:request_decode_time_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="tiny"} 5.0
"""
VALUES = {
    "running": 3.0, "waiting": 5.0, "kv_usage": 0.75, "preemptions": 2.0, "prompt_tokens": 80.0, "output_tokens": 37.0,
    "requests_ok": 7.0, "requests_failed": 2.0, "requests_rejected": 8.0, "ttft_s_count": 2.0, "ttft_s_sum": 0.75,
    "queue_s_count": 4.0, "queue_s_sum": 0.5, "prefill_s_count": 4.0, "prefill_s_sum": 1.0, "decode_s_count": 4.0, "decode_s_sum": 5.0,
}  # fmt: skip
# A page as ray.serve.schema.ServeInstanceDetails makes it, without unused fields.
SERVE = {
    "controller_info": {},
    "proxies": {},
    "applications": {
        "chat": {
            "name": "chat",
            "status": "DEPLOYING",
            "deployments": {
                "Ingress": {"target_num_replicas": 1, "replicas": [{"replica_id": "i", "state": "RUNNING"}]},
                "Replica": {
                    "status": "UPSCALING",
                    "target_num_replicas": 3,
                    "replicas": [
                        {"replica_id": "a", "state": "RUNNING"},
                        {"replica_id": "b", "state": "STARTING"},
                        {"replica_id": "c", "state": "STOPPING"},
                    ],
                },
            },
        }
    },
}
REPLICAS = {
    "replicas_desired/Ingress": 1.0, "replicas_ready/Ingress": 1.0, "replicas_desired/Replica": 3.0, "replicas_ready/Replica": 1.0,
}  # fmt: skip


class Pages(BaseHTTPRequestHandler):
    pages: dict[str, tuple[int, str]]
    released: threading.Event
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        status, body = self.pages.get(self.path, (404, "not found"))
        self.keys.append(self.headers.get("Authorization"))
        if body == "never":
            self.released.wait(60)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[dict[str, tuple[int, str]]]:
    """A dict from path to answer, served at ``pages["url"][1]``."""
    pages: dict[str, tuple[int, str]] = {}
    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Pages,), {"pages": pages, "released": released}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    pages["url"] = 0, f"http://127.0.0.1:{server.server_address[1]}"
    yield pages
    released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def sampled(observe: Observe, url: str, t_s: float = 4.5, api_key: str = "") -> list[ServerSample]:
    observer = Observer(observe, Target(url, api_key))
    try:
        return observer.sample(t_s)
    finally:
        observer.close()


def test_series_of_vllm_get_the_common_names() -> None:
    assert metrics_values(VLLM) == VALUES


def test_series_that_came_through_ray_get_the_same_names() -> None:
    tags = '{Component="core_worker",NodeAddress="10.0.0.1",ReplicaId="a{b}\\"c",'
    page = VLLM.replace("vllm:", "ray_vllm_").replace("{", tags)
    assert metrics_values(page) == VALUES
    # Ray can show counters as gauges as well (metrics_agent.py), under the name without the suffix.
    gauges = "".join(f"{line}\n".replace("_total{", "{") for line in page.splitlines() if "_total{" in line)
    assert metrics_values(page + gauges) == VALUES


def test_models_and_engines_are_added_up_and_the_fullest_cache_counts() -> None:
    page = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    page += 'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.7\nvllm:num_requests_waiting NaN\n'
    assert metrics_values(page) == {"running": 7.0, "kv_usage": 0.7}


def test_the_fleets_own_outcomes_go_before_the_engines() -> None:
    fleet = (
        'serve_app_requests_total{model="m",outcome="complete"} 9.0\nserve_app_requests_total{model="m",outcome="failed"} 1.0\n'
    )
    fleet += 'serve_app_replica_held{model="m",replica="a"} 2.0\nserve_app_replica_held{model="m",replica="b"} 3.0\n'
    assert metrics_values(fleet) == {"requests_ok": 9.0, "requests_failed": 1.0, "requests_rejected": 0.0, "held": 5.0}
    both = metrics_values(fleet + VLLM)
    assert (both["requests_ok"], both["requests_failed"], both["requests_rejected"]) == (7.0, 1.0, 0.0)


def test_replicas_are_desired_by_target_and_ready_when_they_run() -> None:
    assert serve_values(SERVE) == REPLICAS
    assert serve_values({"applications": {}}) == {}


def pod(phase: str, ready: str | None = None, **metadata: str) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    return {"metadata": metadata, "status": {"phase": phase, **({"conditions": conditions} if ready else {})}}


PODS = [pod("Running", "True"), pod("Running", "True"), pod("Running", "False"), pod("Pending"), pod("Failed")]
COUNTS = {"pods_ready": 2.0, "pods_pending": 1.0, "pods_starting": 1.0}


def test_pods_are_ready_starting_or_pending() -> None:
    assert pod_values([*PODS, pod("Running", "True", deletionTimestamp="now")]) == COUNTS


def test_pods_are_listed_through_a_proxy_of_kubectl(pages: dict[str, tuple[int, str]]) -> None:
    pages["/api/v1/namespaces/y/pods?labelSelector=app%3Dx&limit=500"] = 200, json.dumps({"items": PODS})
    observe = Observe(metrics_url="none", kubernetes_selector="app=x", kubernetes_namespace="y", kubernetes_url=pages["url"][1])
    assert sampled(observe, "http://127.0.0.1:1") == [ServerSample(4.5, "kubernetes", COUNTS)]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ((200, "<html>hello</html>"), "does not answer as the Kubernetes API: does `kubectl proxy` listen there?"),
        ((200, '{"items": [1]}'), "does not answer as the Kubernetes API"),
        ((403, '{"message": "pods is forbidden"}'), "RuntimeError: the Kubernetes API says 403: pods is forbidden"),
        ((403, '{"message": "\\ud800"}'), r"says 403: \ud800"),
    ],
)
def test_what_is_no_list_of_pods_is_told(pages: dict[str, tuple[int, str]], page: tuple[int, str], said: str) -> None:
    pages["/api/v1/namespaces/default/pods?labelSelector=app%3Dx&limit=500"] = page
    observe = Observe(metrics_url="none", kubernetes_selector="app=x", kubernetes_url=pages["url"][1])
    assert said in sampled(observe, "http://127.0.0.1:1")[0].error


def test_all_sources_are_sampled_at_one_time(pages: dict[str, tuple[int, str]]) -> None:
    url = pages["url"][1]
    pages["/metrics"] = 200, VLLM
    pages["/api/serve/applications/"] = 200, json.dumps(SERVE)
    pages["/fleet"] = 200, json.dumps(FLEET)
    assert sampled(Observe(serve_status=True, ray_dashboard_url=f"{url}/", fleet=True), f"{url}/v1/") == [
        ServerSample(4.5, "metrics", VALUES),
        ServerSample(4.5, "serve", REPLICAS),
        ServerSample(4.5, "fleet", fleet_values(FLEET)),
    ]


def test_sources_can_be_switched_off_or_lie_elsewhere(pages: dict[str, tuple[int, str]]) -> None:
    pages["/elsewhere"] = 200, VLLM
    assert sampled(Observe(metrics_url="none"), "http://127.0.0.1:1") == []
    assert sampled(Observe(metrics_url=f"{pages['url'][1]}/elsewhere"), "http://127.0.0.1:1")[0].values == VALUES


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ((500, "broken"), "HTTPStatusError: .*500"),
        ((200, "<html>hello</html>"), "ValueError: .* has no series"),
        ((200, "vllm:num_requests_running{} three"), "ValueError"),
        (
            (200, 2 * 'vllm:num_requests_running{engine="0"} 1e308\n'),
            "ValueError: running is inf, which is not finite",
        ),
        ((200, "never"), "ReadTimeout"),
    ],
)
def test_what_goes_wrong_is_in_the_sample(pages: dict[str, tuple[int, str]], page: tuple[int, str], error: str) -> None:
    pages["/metrics"] = page
    [sample] = sampled(Observe(), pages["url"][1])
    assert (sample.t_s, sample.values) == (4.5, {})
    assert re.match(error, sample.error)


@pytest.mark.parametrize(("model", "after", "error"), [("m", "NaN", "is nan"), ("\\ud800", "1", "has half of a surrogate pair")])
def test_what_no_file_can_hold_is_an_error_of_its_source(
    pages: dict[str, tuple[int, str]], model: str, after: str, error: str
) -> None:
    member = f'{{"role": "replica", "model": "{model}", "state": "ready"}}'
    pages["/fleet"] = 200, f'{{"members": [{member}], "decisions": [{{"model": "{model}", "after": {after}}}]}}'
    [sample] = sampled(Observe(metrics_url="none", fleet=True), pages["url"][1])
    assert (sample.values, error in sample.error) == ({}, True), sample


def test_an_unreachable_target_and_a_dashboard_that_answers_nonsense_are_told(pages: dict[str, tuple[int, str]]) -> None:
    pages["/api/serve/applications/"] = 200, '{"applications": {"chat": {}}}'
    metrics, serve = sampled(Observe(serve_status=True, ray_dashboard_url=pages["url"][1]), "http://127.0.0.1:1")
    assert metrics.error.startswith("ConnectError")
    assert serve.error == "KeyError: 'deployments'"


def test_pods_without_a_cluster_are_an_error_of_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    [sample] = sampled(Observe(metrics_url="none", kubernetes_selector="app=x"), "http://127.0.0.1:1")
    assert sample.source == "kubernetes"
    assert "where `kubectl proxy` runs" in sample.error


def test_rays_token_is_looked_for_where_ray_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert ray_token() == ""
    (tmp_path / "token").write_text("from a file\n")
    assert ray_token() == "from a file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from the environment")
    assert ray_token() == "from the environment"


def test_the_targets_own_page_gets_the_key_and_no_other(pages: dict[str, tuple[int, str]]) -> None:
    pages["/metrics"] = 200, VLLM
    url = pages["url"][1]
    Pages.keys.clear()
    assert sampled(Observe(), f"{url}/v1", api_key="secret")[0].values == VALUES
    assert sampled(Observe(metrics_url=f"{url}/metrics"), "http://127.0.0.1:1", api_key="secret")[0].values == VALUES
    assert Pages.keys == ["Bearer secret", None]


def test_certificates_are_those_of_the_system_as_for_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate := certificate_for_loopback(tmp_path))
    body = VLLM.encode()

    def script(peer: Peer) -> None:
        peer.answer(f"HTTP/1.1 200 OK\nContent-Length: {len(body)}\n", body)

    server = Server(script, script, tls=context)
    url = server.url.replace("http:", "https:")
    assert "certificate verify failed" in sampled(Observe(), url)[0].error
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert sampled(Observe(), url)[0].values == VALUES
    server.join()


def member(role: str, model: str, state: str, **models: dict[str, int]) -> dict[str, Any]:
    return {"role": role, "model": model, "state": state, "load": {"models": models}}


FLEET = {
    "time": 9.0,
    "members": [
        member("ingress", "", "ready", chat={}, idle={}),
        member("replica", "chat", "ready"),
        member("replica", "chat", "draining"),
        member("replica", "fixed", "ready"),
    ],
    "decisions": [
        {"time": 1.0, "model": "chat", "before": 1, "after": 2, "rule": "demand"},
        {"time": 2.0, "model": "chat", "before": 2, "after": 3, "rule": "queue"},
        {"time": 3.0, "model": "idle", "before": 1, "after": 0, "rule": "low for long"},
    ],
}


def test_an_ingress_tells_what_was_decided_last_and_who_is_ready() -> None:
    assert fleet_values(FLEET) == {
        "replicas_desired/replica-chat": 3.0,
        "replicas_ready/replica-chat": 1.0,
        "replicas_desired/replica-fixed": 1.0,
        "replicas_ready/replica-fixed": 1.0,
        "replicas_desired/replica-idle": 0.0,
        "replicas_ready/replica-idle": 0.0,
    }


REFUSED = "http://127.0.0.1:1"
"""Nothing listens there."""


def asked_twice(observe: Observe, pages: dict[str, tuple[int, str]], then: dict[str, tuple[int, str]]) -> list[list[str]]:
    """Return the sources that answered, or ``SOURCE: ERROR``, at two times; the second time the target has other pages."""
    observer = Observer(observe, Target(pages["url"][1], ""))
    try:
        first = observer.sample(1.0)
        pages |= then
        return [[f"{s.source}: {s.error}" if s.error else s.source for s in samples] for samples in (first, observer.sample(2.0))]
    finally:
        observer.close()


def test_where_no_dashboard_listens_fleet_stands_in_for_the_whole_run(pages: dict[str, tuple[int, str]]) -> None:
    pages["/fleet"] = 200, json.dumps(FLEET)
    observe = Observe(metrics_url="none", serve_status=True, ray_dashboard_url=REFUSED)
    [[dashboard, fleet], later] = asked_twice(observe, pages, {"/fleet": (500, "broken")})
    assert dashboard.startswith("serve: ConnectError")
    assert fleet == "fleet"
    assert [source.split(":")[0] for source in later] == ["fleet"]  # its failures are reported, too


def test_a_dashboard_that_has_answered_is_asked_to_the_end(pages: dict[str, tuple[int, str]]) -> None:
    pages["/fleet"] = 200, json.dumps(FLEET)
    pages["/api/serve/applications/"] = 200, json.dumps(SERVE)
    observe = Observe(metrics_url="none", serve_status=True, ray_dashboard_url=pages["url"][1])
    first, [later] = asked_twice(observe, pages, {"/api/serve/applications/": (500, "broken")})
    assert first == ["serve"]
    assert later.startswith("serve: HTTPStatusError")


def test_a_target_without_fleet_is_asked_for_it_only_in_vain(pages: dict[str, tuple[int, str]]) -> None:
    """Bare vLLM, for example: the report has one sentence, on the dashboard."""
    observe = Observe(metrics_url="none", serve_status=True, ray_dashboard_url=REFUSED)
    found = asked_twice(observe, pages, {})
    assert [[source.split(":")[0] for source in samples] for samples in found] == [["serve"], ["serve"]]
