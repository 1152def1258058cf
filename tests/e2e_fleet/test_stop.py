"""These tests end ``serve-app up`` in each way: nothing is left of it, and a start that fails reports why and ends."""

import copy
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.fleet import environment, serve_app, wait_ready, wait_until
from tests.e2e_fleet.conftest import ELASTIC_PORT, Configure
from tests.e2e_fleet.operations import MODEL, Fleet, Traces, fleet, is_running, temporary_folder, title
from tests.e2e_fleet.streams import completion, play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

END_LIMIT_S = 60.0
FAIL_LIMIT_S = 180.0
SHORT = completion(MODEL, max_tokens=60)
LONG = completion(MODEL, max_tokens=1900)


def config_of(configure: Configure, port: int, drain_s: float) -> dict[str, Any]:
    return configure(
        port,
        replicas={"min": 1, "max": 1},
        timeouts={"drain_s": drain_s},
        simulated={"profile": "a10g-llama-8b"},
    )


@pytest.mark.slow
def test_down_lets_streams_finish_within_the_drain_and_ends_longer_ones_by_an_error(configure: Configure, tmp_path: Path) -> None:
    with fleet(config_of(configure, 8043, drain_s=4.0), tmp_path) as running:
        traces = Traces.of(running)
        down = threading.Thread(target=running.command, args=("down", running.name))
        short, long = play(running.url, [SHORT, LONG], down.start)
        down.join()
        assert short.is_complete()
        assert (long.cut, [error["type"] for error in long.errors()]) == (False, ["server_stopping"])
        assert running.server.process.wait(END_LIMIT_S) == 0, running.server.tail()
        assert traces.left() == []


def refused(running: Fleet, config: dict[str, Any]) -> str:
    """Return what a second ``serve-app up`` says as it refuses to start."""
    file = running.home / "second.yaml"
    file.write_text(yaml.safe_dump(config))
    result = running.command("up", "-f", str(file))
    assert result.returncode == 1, result.stderr
    assert "starting Ray" not in result.stderr
    return result.stderr


def test_a_second_up_of_the_same_name_is_refused(elastic: Fleet) -> None:
    message = refused(elastic, {**elastic.config, "ingress": {"port": 8045}})
    assert f"'{elastic.name}' runs already" in message
    assert f"serve-app down {elastic.name}" in message


def test_a_second_up_on_the_same_port_is_refused(elastic: Fleet) -> None:
    message = refused(elastic, {**elastic.config, "name": "another"})
    assert f"cannot listen on 127.0.0.1:{ELASTIC_PORT}: Address already in use" in message


_UP_WITHOUT_ITS_OWN_CHECK = """
import runpy
from serve_app.cli import startable
startable._refuse_taken_port = lambda ingress: None
runpy.run_module("serve_app.cli.main", run_name="__main__")
"""


@pytest.mark.slow
def test_an_ingress_does_not_share_its_port_with_another_application(
    elastic: Fleet, configure: Configure, tmp_path: Path
) -> None:
    file = tmp_path / "another.yaml"
    file.write_text(yaml.safe_dump({**config_of(configure, ELASTIC_PORT, drain_s=4.0), "name": "another"}))
    command = [sys.executable, "-c", _UP_WITHOUT_ITS_OWN_CHECK, "up", "-f", str(file)]
    ended = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=FAIL_LIMIT_S)
    assert ended.returncode == 1
    said = " ".join(ended.stderr.split())
    assert (
        f"cannot listen on 127.0.0.1:{ELASTIC_PORT}: another application answers there; set ingress.port to a free port" in said
    )


def test_a_second_interrupt_cuts_the_streams_and_leaves_nothing(elastic: Fleet) -> None:
    traces = Traces.of(elastic)
    up = elastic.server.process

    def interrupt_twice() -> None:
        up.send_signal(signal.SIGINT)
        said = b"stopping; running streams may finish"
        wait_until(lambda: said in elastic.server.log.read_bytes(), limit_s=END_LIMIT_S, what="the first is noticed")
        up.send_signal(signal.SIGINT)

    (answer,) = play(elastic.url, [LONG], interrupt_twice)
    assert answer.cut
    assert up.wait(END_LIMIT_S) == 0, elastic.server.tail()
    assert traces.left() == []


@pytest.mark.slow
def test_a_killed_up_takes_everything_with_it(configure: Configure, tmp_path: Path) -> None:
    with fleet(config_of(configure, 8046, drain_s=4.0), tmp_path) as running:
        traces = Traces.of(running)
        os.kill(running.server.process.pid, signal.SIGKILL)
        running.server.process.wait(END_LIMIT_S)
        wait_until(lambda: not traces.left(), limit_s=20, what=f"gone: {traces.left()}")
        assert running.command("status", running.name).returncode == 1


@pytest.mark.slow
def test_up_ends_with_a_word_when_ray_is_dead(configure: Configure, tmp_path: Path) -> None:
    with fleet(config_of(configure, 8049, drain_s=4.0), tmp_path) as running:
        traces = Traces.of(running)
        os.kill(next(p.pid for p in running.family() if p.name() == "raylet"), signal.SIGKILL)
        assert running.server.process.wait(END_LIMIT_S) == 1, running.server.tail()
        assert "error: Ray's raylet has ended" in running.server.log.read_text()
        assert traces.left() == []


@pytest.mark.slow
def test_a_ray_that_does_not_start_in_time_is_started_once_more(configure: Configure, tmp_path: Path) -> None:
    with serve_app(config_of(configure, 8049, drain_s=4.0), tmp_path) as server:
        up = psutil.Process(server.process.pid)
        wait_until(lambda: bool(raylets(up)), limit_s=FAIL_LIMIT_S, what="a raylet")
        (stopped,) = raylets(up)
        stopped.suspend()
        wait_ready(server, "/readyz")
        assert "Ray did not start" in server.log.read_text()
        assert not stopped.is_running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_is_answered_by_a_line_and_leaves_nothing(
    number: signal.Signals, configure: Configure, tmp_path: Path
) -> None:
    """Nothing serves yet, so Ray's processes are killed and not waited for."""
    with serve_app(config_of(configure, 8049, drain_s=4.0), tmp_path) as server:
        up = psutil.Process(server.process.pid)
        wait_until(lambda: any(p.name() == "gcs_server" for p in up.children()), limit_s=FAIL_LIMIT_S, what="Ray's first process")
        started, folder = up.children(recursive=True), temporary_folder(up)
        up.send_signal(number)
        wait_until(lambda: b"ending Ray, which was still starting" in server.log.read_bytes(), limit_s=END_LIMIT_S, what="a word")
        assert server.process.wait(END_LIMIT_S) == 130, server.tail()
        last = server.log.read_text().splitlines()[-1]
        assert last == "ending Ray, which was still starting: a second or two, longer on a busy machine"
        assert [title(p) for p in started if is_running(p)] == []
        assert not folder.exists()


def raylets(up: psutil.Process) -> list[psutil.Process]:
    return [p for p in up.children() if p.name() == "raylet"]


def failure(config: dict[str, Any], home: Path) -> str:
    """Return the output of a ``serve-app up`` that ends by itself with exit status 1."""
    with serve_app(config, home) as server:
        assert server.process.wait(FAIL_LIMIT_S) == 1, server.tail()
        return server.log.read_text()


def test_a_missing_model_is_named_before_anything_starts(configure: Configure, tmp_path: Path) -> None:
    config = copy.deepcopy(config_of(configure, 8047, drain_s=4.0))
    config["models"][MODEL]["model"] = str(tmp_path / "nowhere")
    message = failure(config, tmp_path / "home")
    assert f"models.{MODEL}.model: {tmp_path / 'nowhere'} does not exist" in message.replace("\n", " ")
    assert "starting Ray" not in message


def test_a_machine_without_the_gpus_is_told_so(configure: Configure, tmp_path: Path) -> None:
    config = copy.deepcopy(config_of(configure, 8047, drain_s=4.0))
    del config["models"][MODEL]["simulated"]  # GPUs of a simulated model are simulated, too
    config["models"][MODEL] |= {"device": "cuda", "gpus_per_replica": 1000}
    assert "needs 1000 GPU and this machine has" in failure(config, tmp_path)


def test_a_taken_port_is_named_before_anything_starts(configure: Configure, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 8047)):
        message = failure(config_of(configure, 8047, drain_s=4.0), tmp_path)
    assert "cannot listen on 127.0.0.1:8047" in message
    assert "starting Ray" not in message


@pytest.mark.slow
def test_an_engine_that_cannot_start_gives_its_reason(configure: Configure, tmp_path: Path) -> None:
    config = configure(8048, replicas={"min": 1, "max": 1}, timeouts={"drain_s": 4.0})
    config["models"][MODEL]["kv_cache_gib"] = 0.0001
    message = failure(config, tmp_path)
    assert "the engine core of 'tiny' did not start: ValueError: No available memory for the cache blocks" in message
    assert "Traceback" not in message
