"""An ingress serves models of every device from a machine without a GPU, whichever of the two images it runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.config import parse_settings
from serve_app.engine_args import INGRESS_ENVIRONMENT, engine_environment
from tests.contracts.tables import VERSIONS
from tests.cuda.conftest import PYTHONS, run


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> dict[str, dict[str, Any]]:
    gpus = {"device": "cuda", "engine_args": {"gpu_memory_utilization": 0.9, "enable_prefix_caching": True}}
    common = {"model": str(checkpoint)}
    return {
        "tp1": {"gpus_per_replica": 1, **gpus, **common},
        "tp4": {"gpus_per_replica": 4, **gpus, **common},
        "simulated": {"simulated": {"profile": "a10g-llama-8b"}, **common},
    }


@pytest.fixture(scope="module")
def built(models: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each image's ingress makes of the models."""
    settings = tmp_path_factory.mktemp("settings") / "fleet.yaml"
    settings.write_text(yaml.safe_dump({"models": models}))
    return {name: run(name, "tests.cuda.front_end", str(settings), env=INGRESS_ENVIRONMENT) for name in PYTHONS}


def test_both_images_build_the_same_front_ends_without_a_gpu(built: dict[str, Any]) -> None:
    told = {name: {**each, "version": ""} for name, each in built.items()}
    assert told["cuda"] == told["cpu"]
    assert (built["cpu"]["version"], built["cuda"]["version"]) == VERSIONS
    assert built["cuda"]["platform"] == "CpuPlatform"
    assert sorted(built["cuda"]["models"]) == ["simulated", "tp1", "tp4"]


@pytest.mark.parametrize("name", ["tp1", "tp4", "simulated"])
def test_an_engine_of_the_cuda_image_has_the_fingerprint_of_the_cpu_images_ingress(
    built: dict[str, Any], models: dict[str, dict[str, Any]], driver: dict[str, str], name: str
) -> None:
    model = parse_settings({"models": {name: models[name]}}).models[name]
    environment = engine_environment(model, driver if model.device == "cuda" else {})
    engine = run("cuda", "tests.cuda.engine_config", "ours", name, model.model_dump_json(), env=environment)
    assert engine["fingerprint"] == built["cpu"]["models"][name]["fingerprint"]
