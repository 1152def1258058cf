"""These tests run batches with real services on simulated accelerators: Beam's, and one with its own fleet."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import environment, wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, ROOT, fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS = [f"prompt {i}" for i in range(200)]
LIMIT_S = 600.0


def config_of(configure: Configure, port: int, num_replicas: int = 1) -> dict[str, Any]:
    timeouts = {"drain_s": 4.0, "no_replica_s": 60.0}
    replicas = {"min": num_replicas, "max": num_replicas}
    return configure(port, replicas=replicas, timeouts=timeouts, simulated={"profile": "a10g-llama-8b"})


def test_a_beam_pipeline_has_each_answer_once_from_a_real_service(configure: Configure, tmp_path: Path) -> None:
    import apache_beam as beam  # here: importing it takes seconds, and most runs leave slow tests out
    from apache_beam.metrics import MetricsFilter
    from apache_beam.ml.inference.base import RunInference
    from apache_beam.testing.util import assert_that, equal_to

    from serve_app.batch.apache_beam import FleetModelHandler

    with fleet(config_of(configure, 8047, num_replicas=2), tmp_path) as running:
        handler = FleetModelHandler(running.url, chat=False)
        pipeline = beam.Pipeline()
        arguments = {"max_tokens": 20, "ignore_eos": True}
        predictions = pipeline | beam.Create(PROMPTS) | RunInference(handler, inference_args=arguments)
        rows = predictions | beam.Map(lambda p: (p.example, p.inference["usage"]["completion_tokens"], p.model_id))
        assert_that(rows, equal_to([(prompt, 20, MODEL) for prompt in PROMPTS]))
        result = pipeline.run()
        result.wait_until_finish()
        found = result.metrics().query(MetricsFilter().with_namespace("serve_app"))["counters"]
        counts = {metric.key.metric.name: metric.committed for metric in found}
        assert (counts["completion_tokens"], counts["failed_requests"]) == (200 * 20, 0)


class Job:
    """A ``serve-app batch run --embedded`` whose temporary folder is its own."""

    def __init__(self, config: dict[str, Any], home: Path, temporary: Path) -> None:
        self.output, self.temporary, self._home, self._said = home / "out.jsonl", temporary, home, home / "said"
        (home / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
        (home / "fleet.yaml").write_text(yaml.safe_dump(config))

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "serve_app.cli.main", "batch", "run", "prompts.txt", "-o", str(self.output), "--no-chat"]
        command += ["--embedded", "fleet.yaml", "-p", "ignore_eos=true", *options]
        variables = {**environment(self._home), "TMPDIR": str(self.temporary), "COLUMNS": "500"}
        with self._said.open("w") as said:
            return subprocess.Popen(command, stderr=said, env=variables, cwd=self._home)

    def said(self) -> str:
        return self._said.read_text()

    def start_and_see(self, word: str, *options: str) -> subprocess.Popen[bytes]:
        """Return once it has said the word."""
        process = self.start(*options)
        wait_until(lambda: word in self.said() or process.poll() is not None, limit_s=LIMIT_S, what=word)
        assert process.poll() is None, self.said()
        return process

    def run(self, *options: str) -> int:
        return self.start(*options).wait(LIMIT_S)

    def left(self) -> list[str]:
        return os.listdir(self.temporary)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Ray's sockets are below it, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        yield Path(folder)


def test_a_batch_starts_its_own_fleet_and_leaves_nothing_also_when_it_is_killed(configure: Configure, tmp_path: Path) -> None:
    with short_folder() as temporary:
        job = Job(config_of(configure, 8048), tmp_path, temporary)
        killed = job.start_and_see("the fleet is ready", "-p", "max_tokens=500", "--concurrency", "2")
        assert job.left(), "Ray's folder, and the test would see what is left"
        killed.kill()
        killed.wait()
        wait_until(lambda: not job.left(), limit_s=LIMIT_S, what="gone: the fleet of a killed batch")
        assert job.run("-p", "max_tokens=4") == 0, job.said()
        lines = [json.loads(line) for line in job.output.read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == [f"line-{i}" for i in range(1, 201)]
        assert {line["response"]["body"]["model"] for line in lines} == {MODEL}
        wait_until(lambda: not job.left(), limit_s=LIMIT_S, what="gone: the fleet of a batch that has ended")


def test_ctrl_c_ends_the_fleet_too_and_what_cannot_start_says_why(configure: Configure, tmp_path: Path) -> None:
    with short_folder() as temporary:
        job = Job(config_of(configure, 8049), tmp_path, temporary)
        process = job.start_and_see("lines/s", "-p", "max_tokens=500", "--concurrency", "2")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130, job.said()
        assert "the same command continues from there" in job.said()
        wait_until(lambda: not job.left(), limit_s=LIMIT_S, what="gone: the fleet of a batch that was stopped")
        config = config_of(configure, 8049)
        config["models"][MODEL]["model"] = str(tmp_path / "nothing")
        assert Job(config, tmp_path, temporary).run() == 1
        assert (
            f"the fleet of fleet.yaml ended with status 1: models.{MODEL}.model: {tmp_path}/nothing does not exist" in job.said()
        )
        assert job.left() == []


PIPELINE = """
import json, os, sys
import apache_beam as beam
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from serve_app.batch.apache_beam import EmbeddedModelHandler, Keep

def row(prediction):
    return prediction.example, prediction.inference["usage"]["completion_tokens"]

handler = EmbeddedModelHandler(json.load(open(sys.argv[1])), chat=False, keep=Keep(linger_s=2.0), min_batch_size=4, max_batch_size=20)
prompts = [f"prompt {i}" for i in range(200)]
options = PipelineOptions(direct_running_mode="multi_processing", direct_num_workers=2)
with beam.Pipeline(options=options) as pipeline:
    asked = pipeline | beam.Create(prompts) | beam.Reshuffle()
    rows = asked | RunInference(handler, inference_args={"max_tokens": 20, "ignore_eos": True}) | beam.Map(row)
    assert_that(rows, equal_to([(prompt, 20) for prompt in prompts]))
"""


def test_beams_worker_processes_share_one_fleet_of_their_machine_which_ends_after_them(
    configure: Configure, tmp_path: Path
) -> None:
    with short_folder() as temporary:
        (tmp_path / "fleet.json").write_text(json.dumps(config_of(configure, 8049)))
        variables = {**environment(tmp_path), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PIPELINE, str(tmp_path / "fleet.json")]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        (folder,) = (tmp_path / "serve-app" / "fleets").iterdir()
        state = json.loads((folder / "state").read_text())
        assert (state["number"], state["num_starts"]) == (1, 1)
        wait_until(lambda: not list(temporary.glob("serve-app-*")), limit_s=LIMIT_S, what="gone: the fleet of the pipeline")
