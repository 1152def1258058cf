"""`EmbeddedModelHandler` shares a fleet between a machine's worker processes: real processes, but a fake ``serve-app up``."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, RunInference
from apache_beam.testing.util import assert_that, equal_to

from serve_app.batch import shared_fleet
from serve_app.batch.apache_beam import EmbeddedModelHandler
from serve_app.batch.client import Limits
from serve_app.batch.fleet_keeper import KeeperReport
from serve_app.batch.fleet_watch import Keep
from serve_app.batch.shared_fleet import SharedFleet
from serve_app.errors import BatchError, ConfigError
from tests.batch.fake_fleet import FOLDER
from tests.e2e.fleet import wait_until

pytestmark = pytest.mark.timeout(240)

CONFIG: dict[str, Any] = {"models": {"tiny": {"model": "embedded:smollm2-135m-instruct"}}, "timeouts": {"drain_s": 1.0}}
TWO: dict[str, Any] = {**CONFIG, "models": {name: {"model": "embedded:smollm2-135m-instruct"} for name in ("red", "blue")}}
COMMAND = (sys.executable, "-m", "tests.batch.fake_fleet")
KEEP = Keep(stuck_s=10.0, linger_s=1.0)
"""A fleet of a test starts within less than `stuck_s`, also on a busy machine, so that starts can be counted."""
LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
WORKER = """
import json, sys
from serve_app.batch.fleet_watch import Keep
from serve_app.batch.shared_fleet import SharedFleet
fleet = SharedFleet(json.loads(sys.argv[1]), Keep(linger_s=1.0), json.loads(sys.argv[2]))
print(fleet.url(), flush=True)
sys.stdin.read()
"""


class Machine:
    """What is on the machine of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def starts(self) -> list[int]:
        """Return the process ids of the fleets that were started."""
        file = self.folder / "starts"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def state(self) -> KeeperReport:
        (folder,) = (self.folder / "cache" / "fleets").iterdir()
        return KeeperReport.read(folder)

    def keepers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "serve_app.batch.fleet_keeper" in line and any(word.startswith(str(self.folder)) for word in line):
                found.append(process)
        return found

    def is_empty(self) -> bool:
        return not self.keepers() and not any(psutil.pid_exists(pid) for pid in self.starts())

    def wait_until_empty(self) -> None:
        wait_until(self.is_empty, limit_s=LIMIT_S, what="gone: keeper and fleet")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    machine = Machine(tmp_path)
    yield machine
    for keeper in machine.keepers():  # which waits for this process's end, or is left of a test that failed
        keeper.terminate()
        keeper.wait(2 * LIMIT_S)


def handler(config: dict[str, Any] = CONFIG, model: str = "", keep: Keep = KEEP, **options: Any) -> EmbeddedModelHandler:
    return EmbeddedModelHandler(config, model, keep=keep, command=COMMAND, **options)


def texts(handler: EmbeddedModelHandler, client: Any, prompts: list[str]) -> list[str]:
    return [str(p.inference["choices"][0]["message"]["content"]) for p in handler.run_inference(prompts, client)]


def worker() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, json.dumps(CONFIG), json.dumps(COMMAND)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_pipeline_has_its_answers_from_two_models_of_one_fleet_which_ends_with_its_process(machine: Machine) -> None:
    script = machine.folder / "pipeline.py"
    script.write_text("from tests.batch.test_shared_fleet import pipeline_of_two_models\npipeline_of_two_models()\n")
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(machine.starts()) == 1
    machine.wait_until_empty()


def pipeline_of_two_models() -> None:
    """Run in a process of its own, as Beam keeps handlers' models until its process ends."""
    models = KeyedModelHandler([KeyModelMapping([name], handler(TWO, name)) for name in ("red", "blue")])
    with beam.Pipeline() as pipeline:
        predictions = pipeline | beam.Create([("red", "a"), ("blue", "b")]) | RunInference(models)
        rows = predictions | beam.Map(lambda p: (p[0], p[1].inference["choices"][0]["message"]["content"], p[1].model_id))
        assert_that(rows, equal_to([("red", "A", "red"), ("blue", "B", "blue")]))


def test_worker_processes_share_one_fleet_and_it_outlives_the_first_one_that_is_killed(machine: Machine) -> None:
    workers = [worker() for _ in range(4)]
    urls = {url_of(process) for process in workers}
    assert (len(urls), len(machine.starts())) == (1, 1)
    workers[0].kill()
    joined = worker()
    assert url_of(joined) in urls
    assert len(machine.starts()) == 1
    for process in (*workers, joined):
        process.kill()
        process.wait()
    machine.wait_until_empty()


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_fleet_that_ends_or_hangs_is_started_again_and_each_prompt_is_answered(machine: Machine, how: str) -> None:
    embedded = handler(keep=replace(KEEP, stuck_s=2.0) if how == "hang" else KEEP)
    client = embedded.load_model()
    assert texts(embedded, client, ["a", how, "b"]) == ["A", how.upper(), "B"]
    assert len(machine.starts()) == 2
    assert machine.state().num_starts == 2
    assert ("status -9" if how == "die" else "the fleet was stuck") in machine.state().why


def test_a_killed_keeper_is_replaced_while_requests_wait_and_the_url_stays(machine: Machine) -> None:
    embedded = handler()
    client = embedded.load_model()
    url = machine.state().url
    (keeper,) = machine.keepers()
    keeper.send_signal(signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(machine.starts()[0]), limit_s=LIMIT_S, what="the fleet of the killed keeper ends")
    assert texts(embedded, client, ["a"]) == ["A"]
    assert (machine.state().url, machine.state().number, len(machine.starts())) == (url, 2, 2)


def test_a_fleet_that_cannot_start_fails_the_workers_with_its_own_reason_and_the_next_try_begins_anew(machine: Machine) -> None:
    (machine.folder / "refuse").write_text("the checkpoint is damaged")
    embedded = handler()
    with pytest.raises(BatchError) as given_up:
        embedded.load_model()
    ended = "the fleet ended with status 1: the checkpoint is damaged"
    hint = "fix the cause and run the same command: what was answered is kept; fix the cause"
    assert str(given_up.value) == f"the fleet of this worker machine was given up: {ended}; {hint}"
    assert len(machine.starts()) == KEEP.starts
    (machine.folder / "refuse").unlink()
    client = embedded.load_model()
    assert texts(embedded, client, ["a"]) == ["A"]


def test_who_drops_the_fleet_lets_it_go_and_a_later_one_has_another(machine: Machine) -> None:
    fleet = SharedFleet(CONFIG, KEEP, COMMAND)
    fleet.url()
    del fleet
    machine.wait_until_empty()
    again = SharedFleet(CONFIG, KEEP, COMMAND)
    again.url()
    assert (len(machine.starts()), again.look().number) == (2, 2)
    del again
    machine.wait_until_empty()


def test_a_fleet_that_comes_back_at_another_port_is_found(machine: Machine) -> None:
    embedded = handler(limits=Limits(patience_s=30.0))
    client = embedded.load_model()
    assert texts(embedded, client, ["a"]) == ["A"]
    state = machine.state()
    (folder,) = (machine.folder / "cache" / "fleets").iterdir()
    (keeper,) = machine.keepers()
    os.kill(keeper.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(machine.starts()[0]), limit_s=LIMIT_S, what="the fleet of the killed keeper ends")
    replace(state, port=0).write(folder)  # as if it had found its port taken
    assert texts(embedded, client, ["b"]) == ["B"]
    assert machine.state().url != state.url


def test_the_configuration_is_on_no_disk(machine: Machine) -> None:
    """The environment of a model may hold tokens, and a keeper that is killed removes nothing."""
    config = {**CONFIG, "models": {"tiny": {**CONFIG["models"]["tiny"], "env": {"HF_TOKEN": "hf_secret"}}}}
    fleet = SharedFleet(config, KEEP, COMMAND)
    fleet.url()
    files = [path for path in (machine.folder / "cache").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"hf_secret" in path.read_bytes()] == []
    assert len(files) > 1


def test_a_fleet_is_of_one_boot_one_network_namespace_and_one_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its URL is good nowhere else, and the cache may be on a volume that others mount."""
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "other").write_text("of another machine")
    folders = {shared_fleet.folder_of(CONFIG), shared_fleet.folder_of(dict(CONFIG))}
    for what, value in {
        "_BOOT_ID": tmp_path / "other",
        "_NETWORK": tmp_path / "other",
        "metadata.version": lambda name: "9",
    }.items():
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(f"serve_app.batch.shared_fleet.{what}", value)
            folders.add(shared_fleet.folder_of(CONFIG))
    folders.add(shared_fleet.folder_of(TWO))
    assert (len(folders), {folder.parent for folder in folders}) == (5, {tmp_path / "cache" / "fleets"})


def test_wrong_configurations_are_refused_where_the_pipeline_is_made() -> None:
    with pytest.raises(ConfigError, match="models"):
        EmbeddedModelHandler({"models": {}})
    with pytest.raises(ValueError, match="model is ''; the configuration has: red, blue"):
        EmbeddedModelHandler(TWO)
    with pytest.raises(ValueError, match="model is 'green'; the configuration has: red, blue"):
        EmbeddedModelHandler(TWO, "green")


def test_a_file_is_read_where_the_pipeline_is_made(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(json.dumps(CONFIG))
    embedded = EmbeddedModelHandler(tmp_path / "fleet.yaml")
    (tmp_path / "fleet.yaml").unlink()
    assert vars(embedded)["_configuration"] == CONFIG
