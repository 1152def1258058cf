"""This module checks what an engine over several nodes, or with pipeline stages, cannot have."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from serve_app.config.checks import wrong

if TYPE_CHECKING:
    from serve_app.config.model import ModelSettings


def node_problems(model: "ModelSettings") -> Iterator[PydanticCustomError]:
    """Check what an engine over several nodes cannot have."""
    if model.nodes == 1:
        return
    here = f"is {model.nodes}"
    if not model.gpus_per_replica:
        yield wrong("nodes", f"{here} and gpus_per_replica is 0", "set gpus_per_replica, the GPUs of all nodes, or nodes: 1")
    elif model.gpus_per_replica % model.nodes:
        problem = f"{here} and gpus_per_replica is {model.gpus_per_replica}: each node holds the same number of GPUs"
        yield wrong("nodes", problem, "set gpus_per_replica to a multiple of nodes")
    if model.replicas_per_node is not None:
        problem = f"is {model.replicas_per_node} and nodes {here}: Ray has no such limit for replicas over several nodes"
        yield wrong("replicas_per_node", problem, "remove it: a node has as many as its GPUs are enough for")
    if model.kv.is_on:
        problem = f"is {model.kv.transfer!r} and nodes {here}: the KV of an engine over several nodes does not move"
        yield wrong("kv.transfer", problem, "set kv.transfer: none, or nodes: 1")
    if (backend := model.engine_args.get("distributed_executor_backend")) not in (None, "mp") and not model.simulated:
        problem = f"is {backend!r} and nodes {here}"
        yield wrong("engine_args.distributed_executor_backend", problem, "remove it: an engine over several nodes has mp")
    if (address := model.env.get("VLLM_HOST_IP")) is not None:
        problem = f"is {address!r} and nodes {here}: each node has its own address"
        yield wrong("env.VLLM_HOST_IP", problem, "remove it: Ray knows the nodes' addresses")


def stage_problems(model: "ModelSettings") -> Iterator[PydanticCustomError]:
    """Check what an engine with pipeline stages cannot have."""
    if (stages := model.stages()) == 1:
        return
    key, here = "engine_args.pipeline_parallel_size", f"is {stages}"
    if model.device == "cpu":
        yield wrong(key, f"{here} and device is cpu: only engines on GPUs have stages", "remove it")
    elif model.gpus_per_replica % stages:
        problem = f"{here} and gpus_per_replica is {model.gpus_per_replica}: each stage has the same number of GPUs"
        yield wrong(key, problem, "set gpus_per_replica to a multiple of it")
    if model.kv.is_on and model.nodes == 1:
        problem = f"is {model.kv.transfer!r} and {key} {here}: the KV of an engine with stages does not move"
        yield wrong("kv.transfer", problem, f"set kv.transfer: none, or remove {key}")
