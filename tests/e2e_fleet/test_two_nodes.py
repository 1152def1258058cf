"""A replica over two nodes of a Ray cluster answers as one process does, drains with either node, and comes back as a whole after a loss.

The nodes, and a head without GPUs, are raylets of this machine. Their GPUs are pretended: vLLM's CPU build takes the place of CUDA's.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from serve_app.checkpoints import make_tiny_llama
from tests.chaos.ray_cluster import START_LIMIT_S, STARTED, Part, variables_of_a_cluster
from tests.e2e.fleet import Server, environment, wait_until
from tests.e2e_fleet.operations import MODEL, Fleet, is_running, taking, titled
from tests.replica.answering import NUM_TOKENS, PROMPT, greedy
from tests.replica.sharded import engine_args_of
from tests.replica.tensor_parallel import ENVIRONMENT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

RAY_PORT, PORT = 8100, 8054
ADDRESS = f"127.0.0.1:{RAY_PORT}"
LIMIT_S = 600.0


@dataclass(frozen=True)
class TwoNodes:
    fleet: Fleet
    nodes: tuple[Part, Part]
    """The replica's actor may be on either."""

    def replica(self) -> set[str]:
        (series,) = self.fleet.ingresses()
        return taking(series)

    def shard(self) -> psutil.Process:
        """The actor of the engine's other node."""
        (found,) = [p for node in self.nodes for p in titled(node.family(), "ray::ShardActor")]
        return found

    def node_of_shard(self) -> Part:
        (found,) = [node for node in self.nodes if titled(node.family(), "ray::ShardActor")]
        return found

    def engine_processes(self) -> list[psutil.Process]:
        return [
            p for node in self.nodes for p in node.family() if any("serve_app.replica.engine" in word for word in p.cmdline())
        ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "wide")


@pytest.fixture(scope="module")
def two_nodes(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """The fleet; the parameter is the number of the engine's stages."""
    home = tmp_path_factory.mktemp("two-nodes")
    folder = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))  # a path of a socket has 107 bytes at most
    variables = {**variables_of_a_cluster(folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", "127.0.0.1"]
    ray_start += ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(100 << 20)]
    as_head = ["--head", "--port", str(RAY_PORT), "--include-dashboard", "false", "--temp-dir", str(folder)]
    as_head += ["--dashboard-agent-listen-port", str(RAY_PORT + 1), "--ray-client-server-port", str(RAY_PORT + 2)]
    head = Part("head", [*ray_start, *as_head, "--num-cpus", "2", "--num-gpus", "0"], home, variables)

    def node(name: str, agent_port: int) -> Part:
        as_node = ["--address", ADDRESS, "--dashboard-agent-listen-port", str(agent_port), "--num-cpus", "2", "--num-gpus", "1"]
        return Part(name, [*ray_start, *as_node], home, variables)

    nodes = node("first", RAY_PORT + 3), node("second", RAY_PORT + 4)
    config = config_of(checkpoint, request.param)
    file = home / "fleet.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "serve_app.cli.main", "up", "-f", str(file), "--address", ADDRESS]
    up = Part("log", command, home, variables)
    try:
        for part in (head, *nodes):
            part.start()
            wait_until(lambda part=part: part.has_said(STARTED), limit_s=START_LIMIT_S, what=part.name, every_s=0.2)  # type: ignore[misc]
        up.start()
        assert up.process is not None
        fleet = Fleet(config["name"], config, Server("fleet", f"http://127.0.0.1:{PORT}", up.log, up.process))
        fleet.wait_until_ready()
        yield TwoNodes(fleet, nodes)
    finally:
        for part in (up, *nodes, head):
            part.kill()
        shutil.rmtree(folder, ignore_errors=True)


def config_of(checkpoint: Path, stages: int) -> dict[str, Any]:
    model = {
        "model": str(checkpoint),
        "device": "cuda",
        "gpus_per_replica": 2,
        "nodes": 2,
        "num_cpus": 0.1,
        "engine_args": engine_args_of(stages),
        "env": {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
        "replicas": {"min": 1, "max": 1},
    }
    return {
        "name": "two-nodes",
        "models": {MODEL: model},
        "ingress": {"port": PORT, "num_cpus": 0.1},
        "timeouts": {"drain_s": 4.0, "no_replica_s": 300.0},
    }


def body(max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


def ids(lines: Iterator[str]) -> Iterator[int]:
    """The token ids of a stream, one by one."""
    for line in lines:
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            yield from choice["token_ids"] or ()


def whole_answer(fleet: Fleet, max_tokens: int) -> list[int]:
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body(max_tokens), timeout=LIMIT_S) as response:
        return list(ids(response.iter_lines()))


one_stage = pytest.mark.parametrize("two_nodes", [1], indirect=True)


@pytest.mark.parametrize("two_nodes", [2, 1], indirect=True)
def test_greedy_answers_are_those_of_one_process(two_nodes: TwoNodes, checkpoint: Path) -> None:
    assert whole_answer(two_nodes.fleet, NUM_TOKENS) == greedy(checkpoint)


@one_stage
def test_a_member_that_is_killed_ends_the_engine_and_a_stream_goes_on_at_the_next(two_nodes: TwoNodes) -> None:
    undisturbed = whole_answer(two_nodes.fleet, 400)
    replica, engine = two_nodes.replica(), two_nodes.engine_processes()
    assert len(engine) == 2
    with httpx.stream("POST", f"{two_nodes.fleet.url}/v1/completions", json=body(400), timeout=LIMIT_S) as response:
        tokens = ids(response.iter_lines())
        answer = [next(tokens)]
        two_nodes.shard().kill()
        answer += tokens
    assert answer == undisturbed
    assert not any(map(is_running, engine))
    assert two_nodes.replica().isdisjoint(replica)


@one_stage
def test_a_member_whose_node_ray_drains_ends_the_engine_in_order_and_a_stream_goes_on_at_the_next(two_nodes: TwoNodes) -> None:
    undisturbed = whole_answer(two_nodes.fleet, 400)
    engine, node = two_nodes.engine_processes(), two_nodes.node_of_shard()
    with httpx.stream("POST", f"{two_nodes.fleet.url}/v1/completions", json=body(400), timeout=LIMIT_S) as response:
        tokens = ids(response.iter_lines())
        answer = [next(tokens)]
        drain(node)
        wait_until(lambda: not any(map(is_running, engine)), limit_s=60.0, what="the end of the engine's processes")
        node.kill()  # Ray takes no drain back
        node.start()
        answer += tokens
    assert answer == undisturbed


def drain(node: Part) -> None:
    """Let Ray drain a node, as before a spot instance ends."""
    option = "--node_id="  # of the raylet; Ray's Python processes replace their command lines by titles
    (node_id,) = {word.removeprefix(option) for p in node.family() for word in p.cmdline() if word.startswith(option)}
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", ADDRESS, "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test", "--deadline-remaining-seconds", "60"]
    subprocess.run(command, env={**environment(node.home), **node.variables}, check=True)


@one_stage
def test_a_node_that_is_lost_ends_the_engine_and_the_group_comes_back_with_it(two_nodes: TwoNodes, checkpoint: Path) -> None:
    engine, (_, second) = two_nodes.engine_processes(), two_nodes.nodes
    second.kill()
    wait_until(lambda: not any(map(is_running, engine)), limit_s=60.0, what="the end of the engine's processes")
    second.start()
    assert whole_answer(two_nodes.fleet, NUM_TOKENS) == greedy(checkpoint)
