from typing import Any

import pytest

from serve_app.config import ModelSettings
from serve_app.engine_args import (
    BATCH_STEP_SHARE,
    INGRESS_ENVIRONMENT,
    ITL_TARGET_S,
    KV_LEASE_S,
    NIXL_WORKER,
    NO_DOMAIN,
    PROCESS_ENVIRONMENT,
    SIMULATED_EXECUTOR,
    NodeOfEngine,
    engine_core_args,
    engine_environment,
    frontend_engine_args,
    moves_kv,
    offloaded_bytes,
)

SIMULATED = {"profile": "a10g-llama-8b"}
SIMULATED_VALUES = {
    "profile": "a10g-llama-8b",
    "link": "efa-100g",
    "time_scale": 1.0,
    "startup_delay_s": 0.0,
    "eos_probability": 0.0,
    "calls_tools": False,
    "seed": 0,
}


def model(**fields: Any) -> ModelSettings:
    return ModelSettings(**{"name": "tiny", "model": "org/tiny", **fields})


def test_a_cpu_engine_computes_in_float32_with_exactly_the_cache_it_was_given() -> None:
    assert engine_core_args(model(kv_cache_gib=0.5, engine_args={"max-model-len": 1024}), "/models/tiny") == {
        "model": "/models/tiny",
        "served_model_name": ["tiny"],
        "mm_processor_cache_gb": 0,
        "max_model_len": 1024,
        "tensor_parallel_size": 1,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 536870912,
    }


def test_the_operators_own_arguments_win_over_ours_for_cpu() -> None:
    args = engine_core_args(model(engine_args={"dtype": "bfloat16", "enforce_eager": False}), "/models/tiny")
    assert (args["dtype"], args["enforce_eager"]) == ("bfloat16", False)


def test_a_gpu_engine_is_as_large_as_its_gpus_and_otherwise_as_vllm_makes_it() -> None:
    assert engine_core_args(model(device="cuda", gpus_per_replica=4), "org/tiny") == {
        "model": "org/tiny",
        "served_model_name": ["tiny"],
        "mm_processor_cache_gb": 0,
        "tensor_parallel_size": 4,
    }


def test_each_stage_of_an_engine_is_as_large_as_its_share_of_the_gpus() -> None:
    args = engine_core_args(model(device="cuda", gpus_per_replica=16, engine_args={"pipeline-parallel-size": 2}), "org/tiny")
    assert (args["tensor_parallel_size"], args["pipeline_parallel_size"]) == (8, 2)


def test_an_engine_over_two_nodes_is_as_large_as_both_and_each_node_has_its_place() -> None:
    wide = model(device="cuda", gpus_per_replica=16, nodes=2)
    node = NodeOfEngine(1, "10.0.0.2", "10.0.0.1", 40123)
    assert engine_core_args(wide, "org/tiny", node) == {
        **engine_core_args(wide, "org/tiny"),
        "tensor_parallel_size": 16,
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 40123,
        "distributed_executor_backend": "mp",
    }
    assert node.environment() == {"VLLM_HOST_IP": "10.0.0.2"}


def test_a_simulated_engine_has_our_executor_and_the_profiles_cache() -> None:
    simulated = model(simulated=SIMULATED, engine_args={"additional_config": {"other": 1}}, gpus_per_replica=2)  # held, not used
    assert engine_core_args(simulated, "/models/tiny") == {
        "model": "/models/tiny",
        "served_model_name": ["tiny"],
        "mm_processor_cache_gb": 0,
        "tensor_parallel_size": 1,
        "dtype": "float32",
        "enforce_eager": True,
        "distributed_executor_backend": SIMULATED_EXECUTOR,
        "additional_config": {"other": 1, "simulated": SIMULATED_VALUES},
    }


def test_an_engine_with_priorities_gets_the_share_of_batches_and_another_one_does_not() -> None:
    policy = {"scheduling_policy": "priority"}
    yields = engine_core_args(model(engine_args=policy, batch_step_share=0.25), "/models/tiny")
    assert (yields["scheduling_policy"], yields["additional_config"]) == ("priority", {BATCH_STEP_SHARE: 0.25})
    assert "additional_config" not in engine_core_args(model(), "/models/tiny")


def test_an_engine_that_keeps_its_itl_gets_the_target_and_is_another_release_with_another_one() -> None:
    fields = {"engine_args": {"scheduling_policy": "priority"}, "keep_itl": True}
    kept, shorter = (model(**fields, replicas={"itl_slo_s": limit}) for limit in (0.1, 0.05))
    assert engine_core_args(shorter, "/models/tiny")["additional_config"] == {BATCH_STEP_SHARE: 0.1, ITL_TARGET_S: 0.05}
    assert kept.release() != shorter.release()
    others = [model(engine_args=fields["engine_args"], replicas={"itl_slo_s": limit}).release() for limit in (0.1, 0.05)]
    assert others[0] == others[1]


@pytest.mark.parametrize(("fields", "dtype"), [({}, "float32"), ({"device": "cuda", "gpus_per_replica": 2}, None)])
def test_the_front_end_takes_what_is_about_text_and_nothing_about_a_device(fields: dict[str, Any], dtype: str | None) -> None:
    arguments = {"max_model_len": 1024, "block_size": 16, "gpu_memory_utilization": 0.5, "trust_remote_code": True}
    args = frontend_engine_args(model(engine_args=arguments, **fields), "/models/tiny")
    assert args.pop("dtype", None) == dtype
    assert args == {
        "model": "/models/tiny",
        "served_model_name": ["tiny"],
        "mm_processor_cache_gb": 0,
        "max_model_len": 1024,
        "trust_remote_code": True,
        "allowed_media_domains": [NO_DOMAIN],
        "enforce_eager": True,
        "distributed_executor_backend": SIMULATED_EXECUTOR,
    }


INHERITED = {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_CONFIGURE_LOGGING": "0", "CUDA_VISIBLE_DEVICES": "2,3"}
KEPT = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3"}  # Ray's choice of GPUs
COMMON = {**KEPT, "VLLM_CONFIGURE_LOGGING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.mark.parametrize(
    ("fields", "environment"),
    [
        ({}, {**COMMON, **CPU}),
        ({"simulated": SIMULATED}, {**COMMON, **CPU, "VLLM_CPU_KVCACHE_SPACE": "1"}),
        ({"env": {"PATH": "/opt", "X": "y"}}, {**COMMON, "PATH": "/opt", "X": "y", **CPU}),
    ],
)
def test_the_environment_of_an_engine_on_cpu(fields: dict[str, Any], environment: dict[str, str]) -> None:
    assert engine_environment(model(**fields), INHERITED) == environment
    assert INHERITED["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_an_engine_on_gpus_spawns_its_workers_and_is_for_no_other_device_whatever_it_inherits() -> None:
    inherited = {**INHERITED, "VLLM_TARGET_DEVICE": "cpu", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    environment = engine_environment(model(device="cuda", gpus_per_replica=2), inherited)
    assert environment == {**COMMON, "VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def test_an_ingress_is_for_no_device_and_a_replicas_supervisor_leaves_that_to_its_engine() -> None:
    assert INGRESS_ENVIRONMENT["VLLM_TARGET_DEVICE"] == "cpu"
    assert "VLLM_TARGET_DEVICE" not in PROCESS_ENVIRONMENT


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 2)])
def test_an_engine_that_moves_kv_has_a_connector_with_an_id_of_its_own(device: str, gpus: int) -> None:
    moves = model(kv={"transfer": "nixl"}, device=device, gpus_per_replica=gpus)
    first, second = (engine_core_args(moves, "/models/tiny")["kv_transfer_config"] for _ in range(2))
    assert first.pop("engine_id") != second.pop("engine_id")
    assert first == second
    assert (first["kv_connector"], first["kv_buffer_device"], first["kv_load_failure_policy"]) == (
        "NixlConnector",
        device,
        "recompute",
    )
    assert "kv_transfer_config" not in engine_core_args(model(device=device, gpus_per_replica=gpus), "/models/tiny")
    assert engine_environment(moves, INHERITED).get("UCX_TLS") == ("tcp,sm,self" if device == "cpu" else None)
    assert engine_environment(moves, {**INHERITED, "UCX_TLS": "all"})["UCX_TLS"] == "all"


def test_workers_of_cpu_engines_that_move_kv_import_the_longest_wait_of_nixl() -> None:
    def worker(**settings: Any) -> object:
        return engine_core_args(model(**settings), "/models/tiny").get("worker_extension_cls")

    nixl = {"transfer": "nixl"}
    assert worker(kv=nixl) == NIXL_WORKER
    assert worker(kv=nixl, engine_args={"worker_extension_cls": "own.Worker"}) == "own.Worker"
    assert [worker(), worker(kv=nixl, device="cuda", gpus_per_replica=1), worker(kv=nixl, simulated=SIMULATED)] == [None] * 3


def test_an_engine_on_gpus_keeps_kv_in_the_nodes_memory() -> None:
    kept = engine_core_args(model(kv={"offload_gib": 2}, device="cuda", gpus_per_replica=2), "/models/tiny")["kv_transfer_config"]
    assert len(kept.pop("engine_id")) == 32
    assert kept == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30},
    }


@pytest.mark.parametrize("simulated", [None, SIMULATED])
def test_an_engine_that_moves_and_keeps_kv_asks_first_where_the_request_was(simulated: dict[str, Any] | None) -> None:
    place: dict[str, Any] = {"device": "cuda", "gpus_per_replica": 2} if simulated is None else {"simulated": simulated}
    both, moves, keeps = (
        engine_core_args(model(kv=kv, **place), "/models/tiny")["kv_transfer_config"]
        for kv in ({"transfer": "nixl", "offload_gib": 2}, {"transfer": "nixl"}, {"offload_gib": 2})
    )
    assert both["kv_connector"] == "MultiConnector"
    ours = {"engine_id", "kv_load_failure_policy"}
    parts = [{key: value for key, value in each.items() if key not in ours} for each in (moves, keeps)]
    assert both["kv_connector_extra_config"] == {"connectors": parts, "kv_lease_duration": KV_LEASE_S}


def test_only_a_connector_that_other_engines_read_from_moves_kv() -> None:
    from vllm.config import KVTransferConfig

    place: dict[str, Any] = {"device": "cuda", "gpus_per_replica": 1}
    for kv, moves in (({"transfer": "nixl", "offload_gib": 2}, True), ({"transfer": "nixl"}, True), ({"offload_gib": 2}, False)):
        assert moves_kv(KVTransferConfig(**engine_core_args(model(kv=kv, **place), "/m")["kv_transfer_config"])) is moves
    assert not moves_kv(None)


@pytest.mark.parametrize(("kv", "kept"), [({"offload_gib": 2}, 2 << 30), ({"transfer": "nixl", "offload_gib": 2}, 2 << 30)])
def test_the_bytes_that_the_host_keeps_are_read_from_the_engines_configuration(kv: dict[str, Any], kept: int) -> None:
    from vllm.config import KVTransferConfig

    args = engine_core_args(model(kv=kv, device="cuda", gpus_per_replica=1), "/m")["kv_transfer_config"]
    assert offloaded_bytes(KVTransferConfig(**args)) == kept
    assert offloaded_bytes(None) == 0


def test_a_simulated_engine_that_moves_kv_has_our_connector_and_nothing_of_ucx() -> None:
    link = {"bandwidth_gbit_s": 10, "latency_us": 5}
    moves = model(kv={"transfer": "nixl"}, simulated={"profile": "h100-llama-8b", "link": link})
    arguments = engine_core_args(moves, "/models/tiny")
    transfer = arguments["kv_transfer_config"]
    assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == (
        "SimulatedConnector",
        "serve_app.simulated.connector",
    )
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    assert arguments["additional_config"]["simulated"]["link"] == link
    assert not [name for name in engine_environment(moves, INHERITED) if name.startswith("UCX")]
