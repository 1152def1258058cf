"""These tests check what Locust's own command accepts and refuses."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from loadtest.control import processes
from loadtest.errors import ExitCode
from tests.ports import free_port

LOCUST = [sys.executable, "-m", "locust", "-f", str(Path(processes.__file__).with_name("locustfile.py"))]


def test_a_run_time_is_refused_because_the_scenario_says_how_long(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("name: tiny\narrival: {law: constant, rate: 1}\nduration_s: 60\n")
    options = ["--headless", "--only-summary", "--scenario", "tiny.yaml", "--host", "http://127.0.0.1:1", "--run-time", "5s"]
    ended = subprocess.run([*LOCUST, *options], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    said = "--run-time: has no effect: the scenario's duration_s says how long; change it there and leave this out"
    assert (ended.returncode, said in ended.stderr) == (ExitCode.USAGE, True), ended.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--scenario: is missing: name a file, or a scenario that comes with the kit"),
        (["--scenario", "absent"], "absent: is no file, and no scenario of the package: agents, burst, chat-qps-1"),
        (["--scenario", "laptop"], "Connection refused"),  # it was found: the target is asked next
    ],
)
def test_scenarios_go_by_the_names_that_the_other_commands_know(options: list[str], said: str, tmp_path: Path) -> None:
    command = [*LOCUST, "--headless", "--only-summary", "--host", "http://127.0.0.1:1", *options]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, said in ended.stderr) == (ExitCode.USAGE, True), ended.stderr
    assert not (tmp_path / "results").exists()


def test_the_page_says_why_its_fields_are_greyed(tmp_path: Path) -> None:
    port = free_port()
    options = ["--scenario", "laptop", "--host", "http://127.0.0.1:1", "--web-host", "127.0.0.1", "--web-port", str(port)]
    page = ""
    with subprocess.Popen([*LOCUST, *options], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as locust:
        try:
            deadline = time.monotonic() + 60
            while not page and locust.poll() is None and time.monotonic() < deadline:
                try:
                    page = httpx.get(f"http://127.0.0.1:{port}/", timeout=5).text
                except httpx.TransportError:
                    time.sleep(0.2)
        finally:
            locust.terminate()
    line = "The scenario decides how many requests go out, when, and for how long; so users, ramp up and run time are greyed."
    assert page.index(line) < page.index('<div id="root">')
