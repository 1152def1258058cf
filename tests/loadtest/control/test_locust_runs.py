"""These tests make runs with Locust's own command, and start the command where it should not be started.

The one sleep is in the script of a worker, where it lets gevent's other greenlets run.
"""

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from loadtest.control import processes
from loadtest.control.repeat import repeat
from loadtest.control.runner import run
from loadtest.errors import ExitCode
from loadtest.judge.replicates import Replicates
from loadtest.plan.scenario import parse_scenario
from loadtest.records import Row, read_lines, read_manifest
from loadtest.wire.target import Target
from tests.loadtest.whole_runs import WITHIN_S, Finished, a_scenario
from tests.ports import free_port

LOCUST = [sys.executable, "-m", "locust", "-f", str(Path(processes.__file__).with_name("locustfile.py"))]


class WebUi:
    """Locust's own command, a master with its web UI and a worker, as its user starts them; no --host."""

    def __init__(self, folder: Path, scenario: dict[str, Any]) -> None:
        (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
        web, bus = free_port(), free_port()
        master = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(bus), "--web-host", "127.0.0.1"]
        master += ["--web-port", str(web), "--scenario", str(folder / "scenario.yaml")]
        worker = ["--worker", "--master-host", "127.0.0.1", "--master-port", str(bus)]
        self.log = (folder / "locust.log").open("w+")
        self.processes = [
            subprocess.Popen([*LOCUST, *options], cwd=folder, stdout=self.log, stderr=self.log) for options in (master, worker)
        ]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{web}", trust_env=False, timeout=WITHIN_S)
        self.results = folder / "results"

    def until(self, holds: Callable[[], bool]) -> None:
        never, deadline = threading.Event(), time.monotonic() + WITHIN_S
        while not self._held(holds):
            assert all(process.poll() is None for process in self.processes), Path(self.log.name).read_text()
            assert time.monotonic() < deadline, Path(self.log.name).read_text()
            never.wait(0.02)

    @staticmethod
    def _held(holds: Callable[[], bool]) -> bool:
        try:
            return holds()
        except httpx.ConnectError:  # not up yet
            return False

    def start(self, host: str) -> None:
        self.until(lambda: self.http.get("/stats/requests").json()["state"] in ("ready", "stopped"))
        assert self.http.post("/swarm", data={"user_count": 1, "spawn_rate": 1, "host": host}).json()["success"]

    def finished(self) -> list[Path]:
        return sorted(path.parent for path in self.results.glob("*/summary.json"))

    def end(self) -> int:
        master, worker = self.processes
        for process in self.processes:
            process.terminate()
        worker.wait(WITHIN_S)
        self.http.close()
        self.log.close()
        return master.wait(WITHIN_S)


def test_a_run_of_locusts_own_whose_results_cannot_be_written_does_not_end_as_a_pass(target: Target, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    (tmp_path / "scenario.yaml").write_text(
        yaml.safe_dump(a_scenario(arrival={"law": "constant", "rate": 5}, duration_s=1, warmup_s=0))
    )
    options = ["--headless", "--scenario", str(tmp_path / "scenario.yaml"), "--out", str(tmp_path / "out")]
    ended = subprocess.run(
        [*LOCUST, *options, "--host", target.base_url],
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert len(list(read_lines(tmp_path / "out" / "rows.jsonl", Row))) == 5
    assert "the results cannot be written" in ended.stderr
    assert ended.returncode == ExitCode.INVALID


@pytest.mark.slow
def test_each_start_from_locusts_web_ui_is_a_run_of_the_host_that_was_typed(target: Target, tmp_path: Path) -> None:
    web = WebUi(tmp_path, a_scenario(duration_s=1, drain_s=5))
    try:
        for number in (1, 2):
            web.start(target.base_url)
            web.until(lambda number=number: len(web.finished()) == number)  # type: ignore[misc]
        for out in web.finished():
            found = Finished(out)
            assert found.failed_gates == set()
            assert (found.manifest.target, found.ids()) == (target.base_url, list(range(len(found.schedule.requests))))
            assert {row.state for row in found.rows} == {"ok"}
    finally:
        web.end()


# In a process of its own: Locust patches the sockets of the one that imports it.
WORKER = """
import sys, time, msgspec
from locust.env import Environment
from loadtest.control.dispatch import Epoch, WorkerPlan, boot_id, install_worker

environment = Environment()
runner = environment.create_local_runner()
install_worker(environment, "")
heard = {}
for name in ("lt-ready", "lt-failed"):
    runner.register_message(name, lambda msg, name=name, **_: heard.update({name: msg.data}))
scenario = {"name": "x", "arrival": {"law": "poisson", "rate": 1}}
plan = WorkerPlan(0, 1, "http://127.0.0.1:1", "m", "lt-", scenario, [], 1.0)
runner.send_message("lt-plan", msgspec.json.encode(plan))
while not heard:
    time.sleep(0.01)
machine, said_s_ago = sys.argv[1] or boot_id(), float(sys.argv[2])
now = time.time()
runner.send_message("lt-epoch", msgspec.structs.asdict(Epoch(now - said_s_ago, now + 1, time.perf_counter() + 1, machine)))
print(heard)
"""


@pytest.mark.parametrize(
    ("machine", "said_s_ago", "heard"),
    [
        ("", 300.0, "{'lt-ready': 0}"),
        ("another", -60.0, "the clock of worker 0 is -"),
        ("another", 2.0, "the clock of worker 0 is +"),
    ],
)
def test_a_worker_whose_clock_is_not_the_masters_does_not_start(machine: str, said_s_ago: float, heard: str) -> None:
    command = [sys.executable, "-c", WORKER, machine, str(said_s_ago)]
    assert heard in subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True).stdout


def test_a_run_that_was_begun_is_not_begun_again_by_a_generator_that_is_restarted(target: Target, tmp_path: Path) -> None:
    run(parse_scenario(a_scenario(duration_s=1)), target, tmp_path / "out", quiet=True, report=False)
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    manifest = read_manifest(tmp_path / "out")
    command = [*LOCUST, "--headless", "--run-folder", str(tmp_path / "out"), "--host", target.base_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert "this run was begun before, and a run is not begun twice" in ended.stderr
    assert ended.returncode == ExitCode.USAGE
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows != b""
    assert read_manifest(tmp_path / "out") == manifest


def test_prompts_of_a_file_are_sent_as_single_ones_and_as_conversations(target: Target, tmp_path: Path) -> None:
    """The generator reads the scenario from the manifest, which holds keys that stand beside ``prompts`` in no scenario of a user."""
    (tmp_path / "p.jsonl").write_text('"What is a tree?"\n{"prompt": "And a river?"}\n')
    classes = [
        {"name": name, "prompt": "text", "prompts": "p.jsonl", "output_tokens": {"mean": 8}} for name in ("single", "several")
    ]
    classes[1] |= {"endpoint": "chat", "conversation": {}}
    scenario = parse_scenario(a_scenario(requests=classes, duration_s=1, warmup_s=0), folder=tmp_path)
    run(scenario, target, tmp_path / "out", quiet=True, report=False)
    rows = list(read_lines(tmp_path / "out" / "rows.jsonl", Row))
    assert {row.state for row in rows} == {"ok"}
    assert len(rows) == read_manifest(tmp_path / "out").num_scheduled > 0


@pytest.mark.slow
def test_replicates_are_made_and_pooled_by_one_command(target: Target, tmp_path: Path) -> None:
    """Either all are there and pooled, or the first that a busy machine spoiled is the last."""
    said: list[str] = []
    scenario = parse_scenario(a_scenario(slo="ttft_p50=10s", seed=5))
    code = repeat(scenario, target, tmp_path / "out", 3, command=(), say=said.append, report=False)
    folders = sorted(path.parent.name for path in (tmp_path / "out").glob("*/summary.json"))
    if code is ExitCode.INVALID:
        assert said[-2].startswith(f"{folders[-1]}: invalid ({len(folders)} of 3)")
        assert not Finished(tmp_path / "out" / folders[-1]).failed_gates
        return
    assert (code, folders) == (ExitCode.PASS, ["seed-5", "seed-6", "seed-7"])
    pooled = msgspec.json.decode((tmp_path / "out" / "replicates.json").read_bytes(), type=Replicates)
    assert (pooled.seeds, [limit.verdict for limit in pooled.slo]) == ([5, 6, 7], ["pass"])
    assert said[-1] == "\n".join(pooled.lines())
