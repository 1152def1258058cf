"""An ingress serves models of every device from a machine without a GPU, whichever of the two images it runs."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.config import ModelSettings
from serve_app.engine_args import INGRESS_ENVIRONMENT, engine_core_args, engine_environment
from tests.cuda.conftest import PYTHONS, ROOT, run

_FINGERPRINT = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from serve_app.fingerprint import model_fingerprint
print(model_fingerprint(AsyncEngineArgs(**json.loads(sys.argv[1])).create_engine_config().model_config))
"""


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> list[dict[str, Any]]:
    gpus = {"device": "cuda", "engine_args": {"gpu_memory_utilization": 0.9, "enable_prefix_caching": True}}
    common = {"model": str(checkpoint)}
    return [
        {"name": "tp1", "gpus_per_replica": 1, **gpus, **common},
        {"name": "tp4", "gpus_per_replica": 4, **gpus, **common},
        {"name": "simulated", "simulated": {"profile": "a10g-llama-8b"}, **common},
    ]


@pytest.fixture(scope="module")
def built(models: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each image's ingress makes of the models."""
    settings = tmp_path_factory.mktemp("settings") / "fleet.yaml"
    settings.write_text(yaml.safe_dump({"models": models}))
    return {name: run(name, "tests.cuda.front_end", str(settings), env=INGRESS_ENVIRONMENT) for name in PYTHONS}


def test_both_images_build_the_same_front_ends_without_a_gpu(built: dict[str, Any]) -> None:
    assert built["cuda"] == built["cpu"]
    assert built["cuda"]["platform"] == "CpuPlatform"
    assert list(built["cuda"]["models"]) == ["tp1", "tp4", "simulated"]


@pytest.mark.parametrize("index", [0, 1, 2], ids=["tp1", "tp4", "simulated"])
def test_an_engine_of_the_cuda_image_has_the_fingerprint_of_the_cpu_images_ingress(
    built: dict[str, Any], models: list[dict[str, Any]], driver: dict[str, str], index: int
) -> None:
    model = ModelSettings.model_validate(models[index])
    arguments = {k: v for k, v in engine_core_args(model, model.model).items() if k != "additional_config"}
    environment = engine_environment(model, {"PATH": os.environ["PATH"], **(driver if model.device == "cuda" else {})})
    import json

    command = [PYTHONS["cuda"], "-c", _FINGERPRINT, json.dumps(arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == built["cpu"]["models"][model.name]["fingerprint"]
