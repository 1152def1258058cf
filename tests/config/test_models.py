"""The configuration of one model is checked: contradictions, its simulated profile, vLLM's arguments by name."""

from typing import Any

import pytest

from serve_app.config import parse_settings
from serve_app.ingress.fleet.from_settings import preempts
from tests.config.helpers import LLAMA, refusal


def model_refusal(**keys: Any) -> str:
    """As `refusal` for keys of the one model, without the leading path."""
    return refusal(models={"llama": LLAMA | keys}).removeprefix("models.llama.")


def test_a_size_in_gib_is_converted_too() -> None:
    assert model_refusal(kv_cache_gib="512 MiB").endswith("the unit is GiB, as the name says: write 0.5")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"replicas": {"min": 1, "max": 2, "initial": 3}},
            "replicas.initial: initial is 3, min is 1 and max is 2; set initial from 1 to 2, or remove it",
        ),
        ({"device": "cuda"}, "gpus_per_replica: is 0 and device is cuda; set gpus_per_replica to 1 or more"),
        (
            {"device": "cuda", "gpus_per_replica": 10**9},
            "gpus_per_replica: is 1000000000, but should be less than or equal to 1024",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b"}, "replicas": {"min": 1, "max": 2, "itl_slo_s": 0.02}},
            "replicas.itl_slo_s: is 0.02 and a step takes 0.0323 s even for one request and simulated.profile is 'a10g-llama-8b': no "
            "number of replicas keeps it; set it above the step",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b"}, "replicas": {"min": 1, "max": 2, "ttft_slo_s": 0.03}},
            "replicas.ttft_slo_s: is 0.03 and a step takes 0.0323 s even for one request and simulated.profile is 'a10g-llama-8b': no "
            "number of replicas keeps it; set it above the step",
        ),
        (
            {"gpus_per_replica": 2},
            "gpus_per_replica: is 2 and device is cpu; set device: cuda, or gpus_per_replica: 0",
        ),
        (
            {"replicas": {"min": 0, "max": 2}},
            "replicas.min: is 0 and required is true: without a replica no ingress is ready, and no balancer sends the request that would "
            "start one; set required: false, or replicas.min: 1",
        ),
        (
            {"replicas": {"min": 0, "max": 2}, "required": False, "canary": {"of": "chat"}},
            "replicas.min: is 0, and a canary without a replica gets no request; set replicas.min: 1, or remove it",
        ),
        (
            {"canary": {"of": "chat", "share": 0.6}},
            "canary.share: is 0.6, but should be less than or equal to 0.5",
        ),
        (
            {"device": "cuda", "gpus_per_replica": 2, "engine_args": {"tensor-parallel-size": 4}},
            "engine_args.tensor_parallel_size: is 4 and gpus_per_replica is 2; remove it: gpus_per_replica sets both",
        ),
        (
            {"device": "cuda", "gpus_per_replica": 1, "kv_cache_gib": 4.0},
            "kv_cache_gib: is 4.0 and device is cuda; remove it; use engine_args.gpu_memory_utilization",
        ),
        (
            {"engine_args": {"kv_cache_memory_bytes": 5}},
            "engine_args.kv_cache_memory_bytes: is 5 and kv_cache_gib is 1.0; remove it: on cpu kv_cache_gib sets the cache",
        ),
        (
            {"device": "cuda", "simulated": {"profile": "a10g-llama-8b"}},
            "device: is cuda and simulated.profile is 'a10g-llama-8b'; set device: cpu to simulate, or remove "
            "simulated to compute",
        ),
        (
            {"kv_cache_gib": 2.0, "simulated": {"profile": "a10g-llama-8b"}},
            "kv_cache_gib: is 2.0 and simulated.profile is 'a10g-llama-8b'; remove it: the profile's memory sets the cache",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"distributed_executor_backend": "mp"}},
            "engine_args.distributed_executor_backend: is 'mp' and simulated.profile is 'a10g-llama-8b'; remove it: "
            "simulated sets the executor",
        ),
        (
            {"batch_step_share": 0.2},
            "batch_step_share: is 0.2 and engine_args.scheduling_policy is 'fcfs': the engine treats all requests alike; "
            "set engine_args.scheduling_policy: priority, or remove it",
        ),
        (
            {"keep_itl": True, "engine_args": {"scheduling_policy": "fcfs"}},
            "keep_itl: is true and engine_args.scheduling_policy is 'fcfs'; remove the policy, or keep_itl: its engines have an "
            "order of their own",
        ),
        (
            {"keep_itl": True, "engine_args": {"scheduling_policy": "priority", "enable_chunked_prefill": False}},
            "keep_itl: is true and engine_args.enable_chunked_prefill is False: its engines compute prompts in parts; "
            "remove one of the two",
        ),
        ({"keep_itl": "yes"}, "keep_itl: is 'yes', but should be a valid boolean; write true or false"),
        ({"warm_start": "yes"}, "warm_start: is 'yes', but should be a valid boolean; write true or false"),
        (
            {"frontend_args": {"lora_modules": ["a=b"]}},
            "frontend_args.lora_modules: is ['a=b'], which serve-app does not serve; name them under adapters, "
            "beside frontend_args",
        ),
        (
            {"frontend_args": {"enable_auto_tool_choice": True}},
            "frontend_args.enable_auto_tool_choice: is True and tool_call_parser is None; set tool_call_parser, for "
            "example to hermes, or remove enable_auto_tool_choice",
        ),
        ({"resources": {"GPU": 1}}, "resources.GPU: is 1.0, but is not a custom resource; set gpus_per_replica"),
        ({"resources": {"slot": 0}}, "resources.slot: is 0.0, but should be greater than 0"),
        (
            {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}},
            "env.VLLM_CPU_KVCACHE_SPACE: is '4', but serve-app sets this variable itself; set kv_cache_gib beside env",
        ),
        (
            {"golden": [{"prompt": "1 + 1 =", "expect": "2)"}]},
            "golden[0].expect: is '2)', which is not a regular expression: unbalanced parenthesis at position 1; "
            "escape characters that are meant literally: \\( for (",
        ),
        (
            {"golden": [{"prompt": "1 + 1 =", "expect": "a{99999999999}"}]},
            "golden[0].expect: is 'a{99999999999}', which is not a regular expression: the repetition number is too large; "
            "escape characters that are meant literally: \\( for (",
        ),
        (
            {"golden": [{"prompt": "1 + 1 =", "expect": "(" * 2000 + ")" * 2000}]},
            f"golden[0].expect: is '{'(' * 56}..., which is not a regular expression: its groups are nested too deep; "
            "escape characters that are meant literally: \\( for (",
        ),
        (
            {"model": "./llama"},
            "model: is './llama', a relative path; write it from /: replicas have other working directories",
        ),
        (
            {"simulated": {"profile": 8}},
            "simulated.profile: is 8, neither a name nor a mapping; name a profile, for example a10g-llama-8b",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b", "link": 100}},
            "simulated.link: is 100, neither a name nor a mapping; name a link, for example efa-100g",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b", "link": "efa"}},
            "simulated.link: unknown name 'efa'; known are efa-100g, efa-400g, nvlink-4, pcie-4, or give a mapping",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b", "link": {"bandwidth_gbit_s": 10, "latency_us": "2"}}},
            "simulated.link.latency_us: is '2'; give a number; with an exponent YAML needs a dot and a sign, as in 3.0e+11",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b", "calls_tools": "hermes"}},
            "simulated.calls_tools: is 'hermes', but should be a valid boolean; write true or false",
        ),
        (
            {"simulated": {"profile": "a10g-llama-8b", "calls_tools": True}},
            "simulated.calls_tools: is True and frontend_args.tool_call_parser is None: calls would be text; set "
            "tool_call_parser: hermes and enable_auto_tool_choice: true",
        ),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(keys: Any, said: str) -> None:
    assert model_refusal(**keys) == said


def test_the_profile_of_a_simulated_model_is_checked_with_its_path() -> None:
    said = model_refusal(simulated={"profile": "a10g-llama-9b"})
    assert said.startswith("simulated.profile: unknown name 'a10g-llama-9b'; known are ")
    assert model_refusal(simulated={"profile": {"weight": 3}}).startswith("simulated.profile.weight: unknown field; ")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"engine_args": {"max_modl_len": 5}},
            "engine_args.max_modl_len: unknown argument; did you mean max_model_len?",
        ),
        (
            {"engine_args": {"--no-enable-prefix-caching": True}},
            "engine_args.no_enable_prefix_caching: unknown argument; write enable_prefix_caching: false",
        ),
        (
            {"engine_args": {"chat-template": "x"}},
            "engine_args.chat_template: is an argument of vLLM's front end; put it under frontend_args",
        ),
        (
            {"frontend_args": {"reasoning_parser": "qwen3"}},
            "frontend_args.reasoning_parser: is an argument of vLLM's engine; put it under engine_args",
        ),
        ({"frontend_args": {"port": 9000}}, "frontend_args.port: has no effect here; set ingress.port"),
        (
            {"engine_args": {"model": "x"}},
            "engine_args.model: is 'x', but serve-app sets this argument itself; set `model` beside engine_args",
        ),
        (
            {"engine_args": {"data_parallel_size": 2}},
            "engine_args.data_parallel_size: is 2, but serve-app sets this argument itself; each engine is a replica "
            "of the fleet; raise replicas.min and replicas.max",
        ),
        (
            {"engine_args": {"max_model_len": 1, "max-model-len": 2}},
            "engine_args.max-model-len: is given twice: 1 and 2; keep one max_model_len",
        ),
        (
            {"max_model_len": 2048},
            "max_model_len: unknown key; it is an argument of vLLM's engine: put it under models.NAME.engine_args",
        ),
        (
            {"chat_template": "x"},
            "chat_template: unknown key; it is an argument of vLLM's front end: put it under models.NAME.frontend_args",
        ),
    ],
)
def test_vllm_arguments_are_checked_by_name(keys: Any, said: str) -> None:
    assert model_refusal(**keys) == said


def test_a_refused_api_key_is_not_printed() -> None:
    assert "hush" not in model_refusal(frontend_args={"api_key": ["hush"]})


@pytest.mark.parametrize(
    ("engine_args", "policy"),
    [
        ({}, "priority"),
        ({"max_model_len": 64}, "priority"),
        ({"runner": "pooling"}, "priority"),
        ({"scheduling_policy": "fcfs"}, "fcfs"),
        ({"--scheduling-policy": "fcfs"}, "fcfs"),
    ],
)
@pytest.mark.parametrize("ingress", [{"batch": {"dir": "/b"}}, {"tenants_file": "/t.yaml"}, {"api_keys_file": "/keys"}])
def test_where_there_are_batches_or_tenants_engines_have_priorities_unless_the_file_says_otherwise(
    ingress: dict[str, Any], engine_args: dict[str, Any], policy: str
) -> None:
    models = {"llama": LLAMA | {"engine_args": engine_args}}
    model = parse_settings({"models": models, "ingress": ingress}).models["llama"]
    others = {name: value for name, value in engine_args.items() if "scheduling" not in name}
    assert model.engine_args == {**others, "scheduling_policy": policy}
    assert model.yields_to_chats() == preempts(model) == (policy == "priority")


def test_without_a_prefix_cache_no_request_pauses_for_another() -> None:
    args = {"scheduling_policy": "priority", "enable_prefix_caching": False}
    model = parse_settings({"models": {"llama": LLAMA | {"engine_args": args}}}).models["llama"]
    assert model.yields_to_chats()
    assert not preempts(model)


def test_a_model_that_keeps_its_itl_has_priorities_and_another_one_does_not() -> None:
    models = {"llama": LLAMA | {"keep_itl": True}, "other": LLAMA}
    kept = parse_settings({"models": models}).models
    assert [kept[name].yields_to_chats() for name in ("llama", "other")] == [True, False]


@pytest.mark.parametrize("ingress", [{}, {"batch": None, "tenants_file": None, "api_keys_file": None}])
def test_without_batches_and_tenants_engines_keep_the_order_of_arrival(ingress: dict[str, Any]) -> None:
    model = parse_settings({"models": {"llama": LLAMA}, "ingress": ingress}).models["llama"]
    assert model.engine_args == {}
    assert not model.yields_to_chats()


def test_dashes_become_underscores() -> None:
    settings = parse_settings({"models": {"llama": LLAMA | {"engine_args": {"max-model-len": 2048, "--dtype": "float32"}}}})
    assert settings.models["llama"].engine_args == {"max_model_len": 2048, "dtype": "float32"}


@pytest.mark.parametrize(
    ("sizes", "max_gpus", "said"),
    [
        (
            [(2, 1, 4), (1, 3, 3)],
            4,
            "autoscaling.max_gpus: is 4, and the models' replicas.min (or initial) need 5 GPUs; set it to 5 or more, or lower a "
            "replicas.min",
        ),
        (
            [(8, 0, 4)],
            4,
            "models.m0.gpus_per_replica: is 8 and autoscaling.max_gpus is 4: the model could never have a replica; "
            "raise autoscaling.max_gpus",
        ),
    ],
)
def test_gpus_that_cannot_suffice(sizes: list[tuple[int, int, int]], max_gpus: int, said: str) -> None:
    """``sizes``: GPUs per replica, minimum and maximum of each model."""
    models = {
        f"m{i}": LLAMA | {"device": "cuda", "gpus_per_replica": g, "replicas": {"min": a, "max": b}, "required": a > 0}
        for i, (g, a, b) in enumerate(sizes)
    }
    assert refusal(models=models, autoscaling={"max_gpus": max_gpus}) == said


GPU_MODEL = LLAMA | {"device": "cuda", "gpus_per_replica": 1}


def test_a_model_that_the_others_leave_no_gpu_is_refused() -> None:
    models = {
        "a": GPU_MODEL | {"replicas": {"min": 4, "max": 8}},
        "b": GPU_MODEL | {"replicas": {"min": 0, "max": 4}, "required": False},
    }
    assert refusal(models=models, autoscaling={"max_gpus": 4}) == (
        "autoscaling.max_gpus: is 4, and the other models' replicas.min take 4: b could never have a replica; set it to 5 or more"
    )
    parse_settings({"models": models, "autoscaling": {"max_gpus": 5}})


def test_what_a_model_begins_with_is_no_minimum_of_a_schedules_windows() -> None:
    models = {
        "a": GPU_MODEL | {"replicas": {"min": 1, "initial": 3, "max": 4}},
        "b": GPU_MODEL | {"replicas": {"min": 1, "max": 4, "schedule": [{"min": 3}]}},
    }
    parse_settings({"models": models, "autoscaling": {"max_gpus": 4}})


def test_from_zero_with_a_queue_of_none_is_refused() -> None:
    model = LLAMA | {"replicas": {"min": 0, "max": 1}, "required": False}
    assert refusal(models={"llama": model}, ingress={"max_waiting_requests": 0}) == (
        "ingress.max_waiting_requests: is 0, and llama starts from zero: a request that wakes it is always refused; "
        "set it to as many requests as may wait for its start"
    )


def test_a_limit_on_gpus_that_nobody_wants_is_refused() -> None:
    said = "autoscaling.max_gpus: has no effect: it is 4, and no model has gpus_per_replica; remove it"
    assert refusal(models={"llama": LLAMA}, autoscaling={"max_gpus": 4}) == said


def test_a_hold_shorter_than_a_simulated_start_is_refused() -> None:
    simulated = {"profile": "a10g-llama-8b", "startup_delay_s": 40.0}
    model = LLAMA | {"simulated": simulated, "replicas": {"min": 0, "max": 1}, "required": False}
    assert refusal(models={"llama": model}) == (
        "timeouts.no_replica_s: is 30, and llama starts from zero in 40 s: a request that wakes it is always refused; set it well above 40"
    )
    parse_settings({"models": {"llama": model}, "timeouts": {"no_replica_s": 90.0}})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"A=B": "x"}, "env: has 'A=B', which is not a name of a variable; letters, digits and _ are allowed, no digit first"),
        ({"": "x"}, "env: has '', which is not a name of a variable; letters, digits and _ are allowed, no digit first"),
        ({"A": "x\0y"}, "env.A: is 'x\\x00y', which no environment can hold; remove NUL and bytes that are not UTF-8"),
        ({"A": "\udcff"}, "env.A: is '\\udcff', which no environment can hold; remove NUL and bytes that are not UTF-8"),
        ({"A": "x" * 100_001}, "env.A: has 100001 bytes; Linux takes 100000 at most; put it into a file"),
        ({1: "x"}, 'env.1: is 1, but should be a valid string; write "1" in quotes'),
    ],
    ids=["equals sign", "empty", "NUL", "no UTF-8", "too long", "no string"],
)
def test_a_variable_that_no_process_could_be_given_is_refused(env: dict[Any, str], said: str) -> None:
    assert refusal(models={"llama": LLAMA | {"env": env}}).removeprefix("models.llama.").replace("[1]", ".1") == said


def test_an_engine_argument_of_null_is_as_if_it_were_not_given() -> None:
    arguments = {"additional_config": None, "hf-overrides": None, "max_model_len": 2048}
    settings = parse_settings({"models": {"llama": LLAMA | {"engine_args": arguments}}})
    assert settings.models["llama"].engine_args == {"max_model_len": 2048}


def test_an_executor_whose_workers_outlive_their_engine_is_refused() -> None:
    on = {"device": "cuda", "gpus_per_replica": 2}
    said = refusal(models={"llama": LLAMA | on | {"engine_args": {"distributed_executor_backend": "ray"}}})
    assert said.startswith("models.llama.engine_args.distributed_executor_backend: is 'ray', whose workers would not end")
    parse_settings({"models": {"llama": LLAMA | on | {"engine_args": {"distributed_executor_backend": "mp"}}}})


@pytest.mark.parametrize(
    ("canaries", "said"),
    [
        ({"chat": "chat"}, "models.chat.canary.of: is 'chat', the model itself; name the model whose requests it shares"),
        ({"next": "caht"}, "models.next.canary.of: is 'caht', and there is no such model; did you mean chat?"),
        (
            {"next": "chat", "third": "next"},
            "models.third.canary.of: is 'next', itself a canary; name the model that has the requests",
        ),
        (
            {"next": "chat", "third": "chat"},
            "models.third.canary.of: is 'chat', whose canary is 'next' already; try one release at a time",
        ),
    ],
)
def test_a_canary_is_that_of_one_model_which_has_one(canaries: dict[str, str], said: str) -> None:
    models: dict[str, Any] = {name: dict(LLAMA) for name in ("chat", "next", "third")}
    for name, of in canaries.items():
        models[name]["canary"] = {"of": of}
    assert refusal(models=models) == said
