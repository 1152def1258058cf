"""`make observe` runs Prometheus, and Grafana where it is installed, beside a service on this machine, with the chart's rules.

Everything is written below one folder. Both listen on 127.0.0.1 only, and end with this process.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from serve_app.cli.startable import refuse_taken_port
from serve_app.errors import ListenFailed
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import default_facts, filled
from tools.monitoring.rules import rules_file

NAMESPACE, RELEASE = "local", "serve-app"
_UNPACKED = Path("build/prometheus/usr")
"""The folder into which tools/fetch-prometheus unpacks Prometheus."""
_GRAFANA_HOME = Path("/usr/share/grafana")


def tool(name: str) -> str | None:
    """Return the path of a program of Prometheus or Alertmanager, from the PATH or unpacked."""
    return shutil.which(name) or shutil.which(name, path=str(_UNPACKED / "bin"))


def write_prometheus(
    folder: Path, target: str, *, every_s: int = 5, grafana: str = "", runbook: str = "docs/runbook.md", alerts_to: str = ""
) -> Path:
    """Write rules and configuration for a service at ``target``, host:port; return the configuration's path.

    Args:
        every_s: Seconds between two scrapes, and between two evaluations of every rule.
        alerts_to: Host and port of an Alertmanager; without it, only Prometheus shows alerts.
    """
    facts = default_facts(namespace=NAMESPACE, release=RELEASE, grafanaUrl=grafana, runbookUrl=runbook)
    folder.mkdir(parents=True, exist_ok=True)
    rules = filled(rules_file(), facts).replace("interval: 30s", f"interval: {every_s}s")
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    labels = {"namespace": NAMESPACE, "app_kubernetes_io_instance": RELEASE}
    job = {"job_name": facts["job"], "static_configs": [{"targets": [target], "labels": labels}]}
    intervals = {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"}
    written = {"global": intervals, "rule_files": ["rules.yaml"], "scrape_configs": [job]}
    if alerts_to:
        written["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alerts_to]}]}]}
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(written), encoding="utf-8")
    return config


def write_grafana(folder: Path, prometheus: str) -> Path:
    """Write dashboards and provisioning for the Prometheus at this address; return the folder of the provisioning."""
    facts = default_facts(namespace=NAMESPACE, release=RELEASE)
    boards, provisioning = folder / "dashboards", folder / "provisioning"
    for made in (boards, provisioning / "datasources", provisioning / "dashboards"):
        made.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (boards / f"{board.name}.json").write_text(filled(board_file(board), facts), encoding="utf-8")
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": prometheus, "isDefault": True}
    files = {"name": "serve-app", "type": "file", "options": {"path": str(boards.resolve())}}
    for kind, key, value in (("datasources", "datasources", source), ("dashboards", "providers", files)):
        (provisioning / kind / "serve-app.yaml").write_text(json.dumps({"apiVersion": 1, key: [value]}), encoding="utf-8")
    return provisioning


@contextmanager
def prometheus(config: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run Prometheus with this configuration on 127.0.0.1 until the end of the block.

    Raises:
        FileNotFoundError: Prometheus is neither on the PATH nor unpacked.
    """
    if (program := tool("prometheus")) is None:
        raise FileNotFoundError(
            "prometheus is not installed; `tools/fetch-prometheus build/prometheus` unpacks Debian's, or install it"
        )
    web = _UNPACKED / "share" / "prometheus" / "web"
    assets = [f"--web.local-assets={web}"] if web.is_dir() else []  # an option that only Debian's build has
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'data'}", *assets]
    with _running([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], dict(os.environ)) as process:
        yield process


@contextmanager
def alertmanager(config: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run Debian's Alertmanager with this configuration on 127.0.0.1, without a cluster, until the end of the block."""
    listen = [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    command = [
        str(tool("prometheus-alertmanager")),
        f"--config.file={config}",
        f"--storage.path={config.parent / 'alerts'}",
        *listen,
    ]
    with _running([*command, "--log.level=warn"], dict(os.environ)) as process:
        yield process


@contextmanager
def _grafana(folder: Path, port: int, prometheus_url: str) -> Iterator["subprocess.Popen[bytes]"]:
    settings = {
        "GF_PATHS_DATA": str((folder / "grafana").resolve()),
        "GF_PATHS_PROVISIONING": str(write_grafana(folder, prometheus_url).resolve()),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_LOG_LEVEL": "warn",
    }
    with _running(["grafana-server", f"--homepath={_GRAFANA_HOME}"], {**os.environ, **settings}) as process:
        yield process


@contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Run both until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:8010", help="host:port of the ingress")
    parser.add_argument("--folder", type=Path, default=Path("build/observe"), help="data and configuration")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus")
    parser.add_argument("--grafana-port", type=int, default=3000)
    asked = parser.parse_args()
    with_grafana = shutil.which("grafana-server") is not None
    grafana = f"http://127.0.0.1:{asked.grafana_port}" if with_grafana else ""
    try:
        refuse_taken_port("127.0.0.1", asked.port, "PROMETHEUS_PORT")
        if with_grafana:
            refuse_taken_port("127.0.0.1", asked.grafana_port, "GRAFANA_PORT")
    except ListenFailed as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    config = write_prometheus(asked.folder, asked.target, grafana=grafana, runbook=Path("docs/runbook.md").resolve().as_uri())
    url = f"http://127.0.0.1:{asked.port}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            running = [stack.enter_context(prometheus(config, asked.port))]
            print(f"Prometheus: {url}, which scrapes {asked.target}/metrics every 5 s; data in {asked.folder}/data", flush=True)
            if with_grafana:
                running.append(stack.enter_context(_grafana(asked.folder, asked.grafana_port, url)))
                print(f"Grafana: {grafana}/d/serve-app-overview", flush=True)
            else:
                write_grafana(asked.folder, url)
                print(
                    f"Grafana is not installed; its dashboards are in {asked.folder}/dashboards, for import elsewhere",
                    flush=True,
                )
            return running[0].wait()
    except FileNotFoundError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped: Prometheus{' and Grafana' if with_grafana else ''}; what was recorded stays in {asked.folder}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
