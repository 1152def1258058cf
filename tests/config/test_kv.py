"""The section kv of a model is off by default, and its ports belong to nobody else."""

from typing import Any

import pytest

from serve_app.config import KvSettings, parse_settings, problems
from serve_app.config.checks import RESERVED_PORTS
from tests.config.helpers import LLAMA, refusal

NIXL = LLAMA | {"kv": {"transfer": "nixl"}}


def with_kv(**kv: Any) -> dict[str, Any]:
    return LLAMA | {"kv": {"transfer": "nixl", **kv}}


def test_kv_stays_where_it_is_by_default() -> None:
    kv = parse_settings({"models": {"m": LLAMA}}).models["m"].kv
    assert (kv, kv.is_on, kv.environment()) == (KvSettings(transfer="none", port=15600), False, {})
    assert (kv.is_offloaded, kv.offload_bytes()) == (False, 0)


def test_a_model_has_64_ports_of_side_channels_and_192_of_ucx() -> None:
    kv = parse_settings({"models": {"m": with_kv(port=20000)}}).models["m"].kv
    assert (kv.ports(), kv.side_ports()) == (range(20000, 20256), range(20000, 20064))
    assert kv.environment() == {"UCX_TCP_PORT_RANGE": "20064-20255"}


def test_a_release_that_moves_kv_is_another_release() -> None:
    models = parse_settings({"models": {"a": LLAMA, "b": NIXL}}).models
    renamed = parse_settings({"models": {"a": NIXL}}).models
    assert len({models["a"].release(), renamed["a"].release()}) == 2


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ({"transfer": "mooncake"}, "transfer: is 'mooncake', but should be 'none' or 'nixl'"),
        ({"port": 1023}, "port: is 1023, but should be greater than or equal to 1024"),
        ({"port": 65281}, "port: is 65281, but should be less than or equal to 65280"),
        ({"port": "15600"}, "port: is '15600', but should be a valid integer; give a plain number without unit: write 15600"),
        ({"ports": 15600}, "ports: unknown key; did you mean port?"),
        ({"offload_gib": -1}, "offload_gib: is -1, but should be greater than or equal to 0"),
        (
            {"offload_gib": "8Gi"},
            "offload_gib: is '8Gi', but should be a valid number; the unit is GiB, as the name says: write 8",
        ),
        (
            {"port": 10900},
            "port: is 10900, and among its ports up to 11155 are those of Ray's worker processes; choose another, for example 15600",
        ),
    ],
)
def test_a_wrong_value_is_named(kv: dict[str, Any], said: str) -> None:
    assert refusal(models={"m": LLAMA | {"kv": kv}}) == f"models.m.kv.{said}"


@pytest.mark.parametrize("reserved", RESERVED_PORTS, ids=str)
def test_ports_of_ray_and_kuberay_are_refused_to_the_last_one(reserved: range) -> None:
    refused = [port for port in (reserved[0] - 255, reserved[-1]) if problems({"models": {"m": with_kv(port=port)}})]
    assert refused == [reserved[0] - 255, reserved[-1]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"engine_args": {"runner": "pooling"}},
            "is 'nixl' and engine_args.runner is 'pooling': its requests end with their prompt, and no KV is left to move; "
            "set kv.transfer: none",
        ),
        (
            {"engine_args": {"convert": "embed"}},
            "is 'nixl' and engine_args.convert is 'embed': its requests end with their prompt, and no KV is left to move; "
            "set kv.transfer: none",
        ),
    ],
)
def test_a_model_without_kv_to_move_is_refused(changed: dict[str, Any], said: str) -> None:
    assert refusal(models={"m": NIXL | changed}) == f"models.m.kv.transfer: {said}"
    assert problems({"models": {"m": LLAMA | changed}}) == []


GPU = LLAMA | {"device": "cuda", "gpus_per_replica": 1}


@pytest.mark.parametrize("simulated", [False, True])
def test_the_nodes_memory_keeps_kv_of_a_model_on_gpus(simulated: bool) -> None:
    model = LLAMA | {"simulated": {"profile": "a10g-llama-8b"}} if simulated else GPU
    kv = parse_settings({"models": {"m": model | {"kv": {"offload_gib": 1.5}}}}).models["m"].kv
    assert (kv.is_on, kv.is_offloaded, kv.offload_bytes()) == (False, True, 3 << 29)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (LLAMA, "and device is cpu: the cache is in the node's memory already; remove it, and raise kv_cache_gib"),
        (
            GPU | {"engine_args": {"enable_prefix_caching": False}},
            "and engine_args.enable_prefix_caching is False: no prompt would find its KV; remove one of the two",
        ),
        (
            GPU | {"gpus_per_replica": 2, "nodes": 2},
            "and nodes is 2: the engine's nodes share no memory; set kv.offload_gib: 0, or nodes: 1",
        ),
        (
            GPU | {"sleep": {}},
            "and sleep is set: a sleep frees the GPU's memory, whose copies may be under way; set kv.offload_gib: 0, or remove sleep",
        ),
    ],
)
def test_a_model_whose_memory_keeps_no_kv_is_refused(model: dict[str, Any], said: str) -> None:
    assert refusal(models={"m": model | {"kv": {"offload_gib": 4}}}) == f"models.m.kv.offload_gib: is 4 {said}"
    assert problems({"models": {"m": model}}) == []


def test_vllms_own_argument_for_it_is_refused_where_it_would_have_no_room() -> None:
    where = "models.m.engine_args.kv_offloading_size: is 4"
    said = refusal(models={"m": GPU | {"engine_args": {"kv_offloading_size": 4}}})
    assert said == f"{where}, for which no pod and no estimate has room; remove it, and set kv.offload_gib: 4"
    lmcache = GPU | {"engine_args": {"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"}}
    assert problems({"models": {"m": lmcache}}) == []
    for kv in ({"offload_gib": 4}, {"transfer": "nixl"}):
        said = refusal(models={"m": lmcache | {"kv": kv}})
        problem = f"{where} and kv sets a connector, too: vLLM would use only that of kv_offloading_size"
        assert said == f"{problem}; remove it, or kv.transfer and kv.offload_gib"


def test_a_simulated_model_moves_kv_without_nixl() -> None:
    simulated = LLAMA | {"simulated": {"profile": "a10g-llama-8b", "link": "nvlink-4"}, "kv": {"transfer": "nixl"}}
    models = parse_settings({"models": {"simulated": simulated, "real": with_kv(port=15856)}}).models
    assert {name: (model.kv.is_on, model.needs_nixl()) for name, model in models.items()} == {
        "simulated": (True, False),
        "real": (True, True),
    }


def test_ports_of_two_models_do_not_meet() -> None:
    second = "models.b.kv.port: is {}, and its ports up to {} meet models.a.kv.port, 15600; choose another, for example {}"
    assert refusal(models={"a": NIXL, "b": NIXL}) == second.format(15600, 15855, 15856)
    assert refusal(models={"a": NIXL, "b": with_kv(port=15855)}) == second.format(15855, 16110, 16112)
    assert problems({"models": {"a": NIXL, "b": with_kv(port=15856), "c": with_kv(port=15344)}}) == []


def test_only_models_that_move_kv_need_ports() -> None:
    assert problems({"models": {"a": NIXL, "b": LLAMA | {"kv": {"port": 15700}}}}) == []


@pytest.mark.parametrize("section", ["ingress", "protocol", "ui"])
def test_a_listener_has_none_of_the_ports(section: str) -> None:
    model = NIXL | {"replicas_per_node": 1}
    said = f"models.m.kv.port: is 15600, and its ports up to 15855 meet {section}.port, 15855; choose another, for example 15856"
    assert refusal(models={"m": model}, **{section: {"port": 15855}}) == said
    assert problems({"models": {"m": model}, section: {"port": 15856}}) == []


@pytest.mark.parametrize("name", ["VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"])
def test_the_side_channel_is_not_set_in_the_environment(name: str) -> None:
    said = refusal(models={"m": NIXL | {"env": {name: "1"}}})
    assert said.endswith(f"{name}: is '1', but serve-app sets this variable itself; set kv.port, and remove it")
    assert problems({"models": {"m": NIXL | {"env": {"UCX_TLS": "rc,sm,self"}}}}) == []


def test_the_connector_is_not_an_argument_of_the_engine() -> None:
    said = refusal(models={"m": LLAMA | {"engine_args": {"kv_transfer_config": {"kv_connector": "NixlConnector"}}}})
    assert (
        "but serve-app sets this argument itself; set models.NAME.kv.transfer: nixl to move running requests with their KV"
        in said
    )


def test_answers_make_way_for_long_prompts_only_where_kv_moves() -> None:
    said = "is true and kv.transfer is 'none': answers move only with their KV; set kv.transfer: nixl, or routing.apart: false"
    assert refusal(models={"m": LLAMA | {"routing": {"apart": True}}}) == f"models.m.routing.apart: {said}"
    models = [parse_settings({"models": {"m": NIXL | {"routing": {"apart": apart}}}}).models["m"] for apart in (False, True)]
    assert models[0].release() == models[1].release(), "replicas need not start again"
