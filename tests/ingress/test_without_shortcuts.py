"""The ingress without the folder of shortcuts; `make test-all` compares its answers with vLLM's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.checkpoints import make_tiny_llama

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
BUILD = """
import asyncio, sys
from serve_app.config import parse_settings
from serve_app.ingress import runtime

tiny = {"model": sys.argv[1], "simulated": {"profile": "a10g-llama-8b"}, "engine_args": {"max_model_len": 512}}
settings = parse_settings({"models": {"tiny": tiny}, "ingress": {"shortcuts": False}})
built = asyncio.run(runtime.IngressRuntime.build(settings, ingress_id="i", fleet_id="f"))
print(runtime.__file__, type(built.front_ends["tiny"].client.output_path).__name__, *built.front_ends["tiny"].shortcuts.direct)
"""


def test_an_ingress_is_built_from_a_package_without_the_folder(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "serve_app", tmp_path / "serve_app", ignore=shutil.ignore_patterns("__pycache__", "shortcuts"))
    model = make_tiny_llama(tmp_path / "tiny")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    built = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, str(model)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    said = built.stdout.split("\n")[-2:]
    assert said == [f"{tmp_path}/serve_app/ingress/runtime.py OutputPath", ""], built.stderr[-2000:]
