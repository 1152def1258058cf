"""The script of the uninstall hook works against an API server that speaks KubeRay's paths."""

import importlib.util
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chart.render import CHART, at, render
from tests.serving import serving

SPEC = importlib.util.spec_from_file_location("uninstall", CHART / "files" / "uninstall.py")
assert SPEC is not None
assert SPEC.loader is not None
uninstall: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(uninstall)

SERVICES = "/apis/ray.io/v1/namespaces/serving/rayservices/demo"
CLUSTERS = "/apis/ray.io/v1/namespaces/serving/rayclusters?labelSelector=ray.io/originated-from-cr-name%3Ddemo"


class FakeApi(ThreadingHTTPServer):
    """One RayService, demo; its cluster is listed ``lists`` times after the deletion."""

    annotations: dict[str, str] | None
    lists: float = 1
    calls: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        if self.path == CLUSTERS:
            self.server.lists -= 1
            items = [{"metadata": {"name": "demo-abcde"}}] if self.server.lists >= 0 else []
            return self._answer({"items": items})
        self._service({"metadata": {"annotations": self.server.annotations}})

    def do_DELETE(self) -> None:
        self._service({"status": "Success"})

    def _service(self, body: dict[str, Any]) -> None:
        if self.path != SERVICES or self.server.annotations is None:
            return self.send_error(404)
        self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        if self.headers["authorization"] != "Bearer secret":
            return self.send_error(401)
        self.server.calls.append(f"{self.command} {self.path.rpartition('/namespaces/serving/')[2].partition('?')[0]}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi(("127.0.0.1", 0), _Handler)) as server:
        server.calls = []
        server.annotations = {"meta.helm.sh/release-name": "demo"}
        yield server


def run(api: FakeApi, account: Path, timeout_s: float = 60) -> int:
    (account / "token").write_text("secret\n")
    (account / "namespace").write_text("serving")
    return int(uninstall.main(["demo", str(timeout_s), f"http://127.0.0.1:{api.server_port}", str(account)]))


def test_the_service_is_deleted_and_its_clusters_are_waited_for(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(api, tmp_path) == 0
    assert api.calls == ["GET rayservices/demo", "DELETE rayservices/demo", "GET rayclusters", "GET rayclusters"]
    said = capsys.readouterr().out.splitlines()
    assert "Waiting up to 60 s until the streams in demo-abcde have ended" in said[0]
    assert "run helm uninstall again, with --timeout 5m" in said[0]
    assert "are gone" in said[1]


def test_a_service_that_is_gone_already_is_no_error(api: FakeApi, tmp_path: Path) -> None:
    api.annotations = None
    api.lists = 0
    assert run(api, tmp_path) == 0
    assert api.calls == ["GET rayclusters"]


def test_a_service_that_helm_did_not_install_is_left_alone(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.annotations = {}
    assert run(api, tmp_path) == 0
    assert api.calls == ["GET rayservices/demo"]
    assert "left alone" in capsys.readouterr().err


def test_clusters_that_stay_do_not_hold_the_uninstall_up(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.lists = float("inf")
    assert run(api, tmp_path, timeout_s=0) == 0
    assert "demo-abcde still there" in capsys.readouterr().err


def test_it_runs_only_where_redis_has_to_be_cleaned() -> None:
    assert "uninstall" not in render().of("Job")
    job = render(at("gcsFaultTolerance.enabled", True)).of("Job")["uninstall"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"


def test_helm_prints_what_it_waits_for_where_its_own_time_ends_first() -> None:
    job = render(at("gcsFaultTolerance.enabled", True)).of("Job")["uninstall"]
    assert job["metadata"]["annotations"]["helm.sh/hook-output-log-policy"] == "hook-failed"


def test_the_script_ends_before_its_job_is_stopped_and_the_job_before_helm_gives_up() -> None:
    job = render(at("gcsFaultTolerance.enabled", True)).of("Job")["uninstall"]["spec"]
    script_s = float(job["template"]["spec"]["containers"][0]["args"][1])
    assert script_s < job["activeDeadlineSeconds"] < 300
