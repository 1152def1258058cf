"""The CUDA compiler among the packages builds kernels with the headers and libraries among them, as on a GPU's first start."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

CUDA_HOME = Path(sysconfig.get_path("purelib"), "nvidia/cu13")
KERNEL = """
#include <cuda_fp16.h>
#include <cub/cub.cuh>
__global__ void twice(__half *values) { values[threadIdx.x] = values[threadIdx.x] + values[threadIdx.x]; }
"""


def test_flashinfers_sampler_builds_links_and_loads(tmp_path: Path, driver: Mapping[str, str]) -> None:
    """It samples the first request with top_k or top_p. flashinfer expects CUDA's libraries where NVIDIA's installer puts them."""
    build = "from flashinfer.jit.sampling import gen_sampling_module; gen_sampling_module().build_and_load()"
    folders = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"  # of ninja
    settings = {"CUDA_HOME": str(CUDA_HOME), "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    environment = {**os.environ, **driver, **settings, "PATH": folders}
    ended = subprocess.run(
        [sys.executable, "-c", build], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"


@pytest.mark.parametrize("architecture", ["80", "90a", "100a"])
def test_nvcc_builds_a_kernel(tmp_path: Path, architecture: str) -> None:
    """For A100, H100 and B200. nvcc refuses headers of another release of CUDA."""
    source = tmp_path / "twice.cu"
    source.write_text(KERNEL)
    command = [str(CUDA_HOME / "bin/nvcc"), f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    command += ["-I", str(CUDA_HOME / "include/cccl"), "-c", str(source), "-o", str(tmp_path / "twice.o")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
