"""A replica over several nodes or of several stages is checked: what they share evenly, and what such a replica cannot have."""

from typing import Any

import pytest

from serve_app.config import ModelSettings, parse_settings
from tests.config.helpers import LLAMA, refusal

WIDE = LLAMA | {"device": "cuda", "gpus_per_replica": 16, "nodes": 2}


def model(**keys: Any) -> ModelSettings:
    return parse_settings({"models": {"m": WIDE | keys}}).models["m"]


def test_the_nodes_share_the_gpus_and_no_limit_per_node_is_given_to_ray() -> None:
    wide = model()
    assert (wide.gpus_per_node(), wide.per_node(), wide.has_shards(), wide.surge()) == (8, None, True, 0)


def test_a_simulated_engine_reserves_gpus_on_its_nodes_and_runs_on_one() -> None:
    simulated = model(device="cpu", simulated={"profile": "a10g-llama-8b"})
    assert (simulated.gpus_per_node(), simulated.has_shards()) == (8, False)


def test_other_nodes_are_another_release() -> None:
    assert model().release() != model(nodes=4).release()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nodes": 0}, "nodes: is 0, but should be greater than or equal to 1"),
        ({"nodes": 65}, "nodes: is 65, but should be less than or equal to 64"),
        ({"nodes": "2"}, "nodes: is '2', but should be a valid integer; give a plain number without unit: write 2"),
        (
            {"nodes": 3},
            "nodes: is 3 and gpus_per_replica is 16: each node holds the same number of GPUs; "
            "set gpus_per_replica to a multiple of nodes",
        ),
        (
            {"device": "cpu", "gpus_per_replica": 0},
            "nodes: is 2 and gpus_per_replica is 0; set gpus_per_replica, the GPUs of all nodes, or nodes: 1",
        ),
        (
            {"replicas_per_node": 1},
            "replicas_per_node: is 1 and nodes is 2: Ray has no such limit for replicas over several nodes; "
            "remove it: a node has as many as its GPUs are enough for",
        ),
        (
            {"kv": {"transfer": "nixl"}},
            "kv.transfer: is 'nixl' and nodes is 2: the KV of an engine over several nodes does not move; "
            "set kv.transfer: none, or nodes: 1",
        ),
        (
            {"engine_args": {"distributed_executor_backend": "uni"}},
            "engine_args.distributed_executor_backend: is 'uni' and nodes is 2; remove it: an engine over several nodes has mp",
        ),
        (
            {"engine_args": {"pipeline_parallel_size": 3}},
            "engine_args.pipeline_parallel_size: is 3 and gpus_per_replica is 16: each stage has the same number of GPUs; "
            "set gpus_per_replica to a multiple of it",
        ),
        (
            {"engine_args": {"pipeline_parallel_size": 0}},
            "engine_args.pipeline_parallel_size: is 0, but vLLM takes a number of at least 1",
        ),
        (
            {"device": "cpu", "simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"pipeline_parallel_size": 2}},
            "engine_args.pipeline_parallel_size: is 2 and device is cpu: only engines on GPUs have stages; remove it",
        ),
        (
            {"nodes": 1, "kv": {"transfer": "nixl"}, "engine_args": {"pipeline_parallel_size": 2}},
            "kv.transfer: is 'nixl' and engine_args.pipeline_parallel_size is 2: the KV of an engine with stages does not move; "
            "set kv.transfer: none, or remove engine_args.pipeline_parallel_size",
        ),
        (
            {"engine_args": {"nnodes": 2}},
            "engine_args.nnodes: is 2, but serve-app sets this argument itself; set nodes beside engine_args; "
            "ranks and addresses follow from it",
        ),
        (
            {"env": {"VLLM_HOST_IP": "10.0.0.7"}},
            "env.VLLM_HOST_IP: is '10.0.0.7' and nodes is 2: each node has its own address; remove it: Ray knows the nodes' addresses",
        ),
    ],
)
def test_what_such_a_replica_cannot_have_is_named(keys: dict[str, Any], said: str) -> None:
    assert refusal(models={"m": WIDE | keys}) == f"models.m.{said}"


def test_a_fixed_port_of_replicas_needs_a_resource_because_parts_of_two_replicas_may_be_on_one_node() -> None:
    assert refusal(models={"m": WIDE}, protocol={"port": 8020}) == (
        "models.m.nodes: is 2 and protocol.port is 8020: two parts of replicas on one node would both listen there; "
        "set protocol.port: 0, or `resources` of which a node offers enough for one part"
    )
    parse_settings({"models": {"m": WIDE | {"resources": {"whole_node": 1}}}, "protocol": {"port": 8020}})
