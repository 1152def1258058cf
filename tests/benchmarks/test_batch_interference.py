"""These tests check which runs the figures of batches beside chats come from."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from benchmarks import batch_interference
from benchmarks.batch_interference import SIDES, chats, model_of, pooled
from loadtest.errors import InvalidRun
from loadtest.judge.stats import Floats


class RunOfSeed:
    """In place of a run's records: the only latency is the seed, which the folder's name ends with."""

    def __init__(self, folder: Path, _: float) -> None:
        self._seed = float(folder.name.rpartition("-")[2])

    def latencies_s(self, _: str) -> Floats:
        return np.array([self._seed])


def test_runs_that_an_earlier_measurement_left_in_the_folder_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_interference, "Run", RunOfSeed)
    for side in SIDES:
        for seed in (0, 1, 2, 3):
            (tmp_path / f"{side.replace(' ', '-')}-{seed}").mkdir()
    (tmp_path / "rates.json").write_text(json.dumps({"speeds": {side: [1.0] for side in SIDES}, "cores": {}, "seeds": [2, 3]}))
    found = pooled([tmp_path])["latencies"]
    assert {side: list(found[side]["ttft"]) for side in SIDES} == {side: [2.0, 3.0] for side in SIDES}


class Refuses(BaseHTTPRequestHandler):
    """A server that has a model and answers nothing else."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_error(503)


def test_a_load_without_any_answer_ends_the_benchmark(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(InvalidRun):
            chats(url, "m", tmp_path / "run", rate=20.0, seconds=6.0, seed=1)
        server.shutdown()


def test_the_first_model_of_a_configuration_gets_priorities_and_the_arguments_of_the_command(tmp_path: Path) -> None:
    config = tmp_path / "gpu.yaml"
    config.write_text(
        "models: {a: {model: /models/a, device: cuda, gpus_per_replica: 1, engine_args: {max_num_seqs: 8}}, b: {model: /models/b}}"
    )
    model = model_of(config, {"max_model_len": 2048}, 0.2)
    assert (model.name, model.model, model.device, model.batch_step_share) == ("a", "/models/a", "cuda", 0.2)
    assert model.engine_args == {"max_num_seqs": 8, "scheduling_policy": "priority", "max_model_len": 2048}
