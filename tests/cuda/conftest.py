"""These fixtures have the images' two environments and a pretended NVIDIA driver. `make check-cuda` runs this folder in `.venv-cuda`."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints import make_tiny_llama

ROOT = Path(__file__).parents[2]
PYTHONS = {"cpu": str(ROOT / ".venv/bin/python"), "cuda": sys.executable}
"""Interpreters of the environments of the CPU image and of the CUDA image."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cuda)
            item.add_marker(pytest.mark.timeout(600))


def run(environment: str, module: str, *arguments: str, env: Mapping[str, str]) -> Any:
    """Run ``python -m module`` of one environment with the variables ``env`` besides our own; return the JSON of its last line."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "CUDA_"))}
    command = [PYTHONS[environment], "-m", module, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env={**inherited, **env}, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build `driver.c`; return the environment in which vLLM finds four GPUs, until CUDA itself is called."""
    folder = tmp_path_factory.mktemp("driver")
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(folder / name)]
        subprocess.run([*command, str(Path(__file__).with_name("driver.c"))], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}
