"""Alertmanager reads examples/monitoring/alertmanager.yaml, and an alert of a real Prometheus reaches a receiver."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import wait_until
from tests.monitoring.expressions import rules
from tests.ports import free_port
from tests.serving import serving
from tools.observe import alertmanager, prometheus, tool, write_prometheus

EXAMPLE = Path(__file__).parents[2] / "examples" / "monitoring" / "alertmanager.yaml"
HINT = "is neither on the PATH nor in build/prometheus; run tools/fetch-prometheus build/prometheus"
amtool = pytest.mark.skipif(tool("amtool") is None, reason=f"amtool {HINT}")


def ask_amtool(*arguments: str) -> str:
    done = subprocess.run([str(tool("amtool")), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@amtool
def test_alertmanager_takes_the_example() -> None:
    assert "2 receivers" in ask_amtool("check-config", str(EXAMPLE))


@amtool
def test_critical_alerts_reach_the_pager_and_warnings_wait_for_the_morning() -> None:
    severities = {str(rule["labels"]["severity"]) for rule in rules() if "alert" in rule}  # type: ignore[index]
    reached = {
        severity: ask_amtool("config", "routes", "test", f"--config.file={EXAMPLE}", f"severity={severity}", "job=j").strip()
        for severity in severities
    }
    assert reached == {"critical": "pager", "warning": "morning"}


@contextmanager
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a webhook, and the messages that it was sent."""
    messages: list[dict[str, Any]] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            messages.append({"path": self.path, **told})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with serving(HTTPServer(("127.0.0.1", 0), Webhook)) as server:
        yield f"http://127.0.0.1:{server.server_port}", messages


@pytest.mark.slow
@pytest.mark.skipif(
    tool("prometheus-alertmanager") is None or not Path("/usr/share/prometheus/alertmanager/default.tmpl").exists(),
    reason="Debian's Alertmanager runs only where it is installed, beside its templates in /usr/share: apt install prometheus-alertmanager",
)
@pytest.mark.skipif(tool("prometheus") is None, reason=f"prometheus {HINT}")
def test_a_service_that_is_down_reaches_the_pager(tmp_path: Path) -> None:
    nobody, port, managers_port = free_port(), free_port(), free_port()
    config = write_prometheus(tmp_path / "prometheus", f"127.0.0.1:{nobody}", every_s=1, alerts_to=f"127.0.0.1:{managers_port}")
    written = yaml.safe_load((tmp_path / "prometheus" / "rules.yaml").read_text())
    for group in written["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)  # it is 2 minutes
    (tmp_path / "prometheus" / "rules.yaml").write_text(yaml.safe_dump(written))
    with receiver() as (url, messages):
        example = (
            EXAMPLE.read_text().replace("https://pager.example.com", f"{url}/pager").replace("https://chat.example.com", url)
        )
        (tmp_path / "alertmanager.yaml").write_text(example.replace("group_wait: 30s", "group_wait: 1s"))
        with alertmanager(tmp_path / "alertmanager.yaml", managers_port), prometheus(config, port):
            wait_until(lambda: bool(messages), limit_s=120, what="a message to the receiver", every_s=0.5)
    (first, *_) = messages
    assert (first["path"], first["receiver"], first["status"]) == ("/pager/hook", "pager", "firing")
    assert [alert["labels"]["alertname"] for alert in first["alerts"]] == ["ServeAppDown"]
