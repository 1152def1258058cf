"""vLLM uses of our classes that stand in for its own only the attributes that they are known to have; see `vllm_names.py`."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import async_llm, core
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from serve_app import engine_args
from serve_app.config import ModelSettings
from serve_app.config.vllm_source import server_arguments_module
from serve_app.ingress.fleet import intake
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.routes.app import VLLM_ROUTES
from serve_app.simulated.executor import SimulatedExecutor
from tests.contracts.changes import asked_of, difference, fail_with, find, line, members, parameters
from tests.contracts.tables import listed


def test_the_fleet_client_is_asked_for_nothing_else() -> None:
    methods = {name for name, value in vars(EngineCoreClient).items() if inspect.isfunction(value)}
    asked = {name for name in methods if f"{name}_async" not in methods} | asked_of(async_llm, "engine_core")
    lacking = asked - _members_of_ours(FleetClient)
    fail_with(
        [
            line("FleetClient: asked of it and not implemented", difference(sorted(listed("LEFT_OUT")), sorted(lacking))),
            line("FleetClient: abstract methods", difference([], sorted(FleetClient.__abstractmethods__))),
            line(
                "AsyncLLM: asked of EngineCoreClient",
                difference(["make_async_mp_client"], asked_of(async_llm, "EngineCoreClient")),
            ),
        ]
    )


def _members_of_ours(cls: type) -> set[str]:
    source = ast.walk(ast.parse(inspect.getsource(cls)))
    return set(vars(cls)) | {n.attr for n in source if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def test_the_output_handler_aborts_what_a_stop_string_ended_and_nothing_else() -> None:
    handler = ast.parse(textwrap.dedent(inspect.getsource(async_llm.AsyncLLM._run_output_handler)))
    calls = [ast.unparse(n) for n in ast.walk(handler) if isinstance(n, ast.Call) and "abort" in ast.unparse(n.func)]
    assert calls == ["engine_core.abort_requests_async(processed_outputs.reqs_to_abort)"], "FleetClient counts these as complete"


def test_the_engine_client_is_made_by_names_only() -> None:
    tree = ast.walk(ast.parse(inspect.getsource(async_llm)))
    calls = [n for n in tree if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "make_async_mp_client"]
    assert [call.args for call in calls] == [[]], "serve_app/ingress/front_end/front_end.py stands in with a function of keywords"


def test_the_simulated_executor_is_asked_for_nothing_else() -> None:
    asked = asked_of(core, "model_executor") - set(vars(SimulatedExecutor))
    fail_with(
        [
            line(
                "SimulatedExecutor: asked of it",
                difference(sorted(listed("ASKED_OF_THE_EXECUTOR")), sorted(asked)),
            ),
            line("SimulatedExecutor: abstract methods", difference([], sorted(SimulatedExecutor.__abstractmethods__))),
        ]
    )


@pytest.mark.parametrize(("ours", "base"), [(FleetClient, EngineCoreClient), (SimulatedExecutor, Executor)])
def test_overridden_methods_take_what_the_original_takes(ours: type, base: type) -> None:
    changes = []
    for name in sorted(set(vars(ours)) & set(vars(base))):
        if inspect.isfunction(vars(base)[name]) and name != "__init__":
            mine, theirs = parameters(vars(ours)[name]), parameters(vars(base)[name])
            changes.append("" if mine.startswith(theirs) else f"{base.__name__}.{name}: is ({theirs}), ours is ({mine})")
    fail_with(changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_engine_argument_that_we_set_exists(device: str) -> None:
    gpus = {"gpus_per_replica": 1} if device == "cuda" else {}
    model = ModelSettings.model_validate({"name": "m", "model": "/m", "device": device, **gpus})
    ours = {*engine_args.engine_core_args(model, "/m"), *engine_args.frontend_engine_args(model, "/m")}
    fields = members(find("vllm.engine.arg_utils", "AsyncEngineArgs"))
    fail_with([line("AsyncEngineArgs", difference(ours | engine_args._FRONTEND_ARGS, fields, only_gone=True))])


def test_every_argument_about_the_model_reaches_the_front_end_or_is_known_to_be_the_engines_alone() -> None:
    taken = asked_of(AsyncEngineArgs.create_model_config, "self")
    set_by_us = engine_args._shared_args(ModelSettings(name="m", model="/m"), "/m").keys() | {"enforce_eager"}
    known = {*engine_args._FRONTEND_ARGS, *listed("ENGINE_ONLY"), *set_by_us}
    fail_with([line("create_model_config", difference(sorted(known & taken), sorted(taken)))])


def test_every_environment_variable_that_we_set_is_read() -> None:
    engines = [ModelSettings(name="m", model="/m"), ModelSettings(name="m", model="/m", device="cuda", gpus_per_replica=1)]
    environments = [engine_args.INGRESS_ENVIRONMENT, *(engine_args.engine_environment(model, {}) for model in engines)]
    ours = [name for environment in environments for name in environment if name.startswith("VLLM_")]
    fail_with([line("vllm.envs", difference(ours, envs.environment_variables, only_gone=True))])


def test_the_same_temperature_is_greedy() -> None:
    assert find("vllm.sampling_params", "_SAMPLING_EPS") == intake._GREEDY_BELOW


def test_vllm_has_a_handler_for_every_route_that_we_pass_on() -> None:
    make_arg_parser = importlib.import_module(server_arguments_module()).make_arg_parser
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    routes = [route.path for route in build_app(arguments, ("generate",)).routes]
    for kind in ("embed", "pooling", "classify", "scoring"):  # their app needs a model's configuration to be built
        router = find(f"vllm.entrypoints.pooling.{kind}.api_router", "router")
        routes += [route.path for route in router.routes] if router else []
    fail_with([line("build_app: routes", difference(VLLM_ROUTES, routes, only_gone=True))])


LOOK = """
import sys
from vllm.model_executor.models import registry
from serve_app.host.vllm_start import inspect_models_here

registry._SUBPROCESS_COMMAND = [sys.executable, "-c", "raise SystemExit('a process was started')"]
model = registry.ModelRegistry.models["LlamaForCausalLM"]
try:
    model.inspect_model_cls()
except RuntimeError as exc:
    print("a process was started" in str(exc))
inspect_models_here()
print(model.inspect_model_cls().architecture)
"""


def test_a_model_is_looked_at_without_another_process(tmp_path: Path) -> None:
    """Run in a process of its own: a change of vLLM lasts as long as the process, and other tests may have changed it in this one."""
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-2:] == ["True", "LlamaForCausalLM"]
    assert [path.name for path in (tmp_path / "modelinfos").iterdir()] == [
        "vllm-model_executor-models-llama-LlamaForCausalLM.json"
    ]
