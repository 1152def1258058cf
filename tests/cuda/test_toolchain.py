"""The CUDA compiler among the packages builds kernels with the headers among them, as flashinfer and others do on a GPU's first start."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

CUDA_HOME = Path(sysconfig.get_path("purelib"), "nvidia/cu13")
KERNEL = """
#include <cuda_fp16.h>
#include <cub/cub.cuh>
__global__ void twice(__half *values) { values[threadIdx.x] = values[threadIdx.x] + values[threadIdx.x]; }
"""


@pytest.mark.parametrize("architecture", ["80", "90a", "100a"])
def test_nvcc_builds_a_kernel(tmp_path: Path, architecture: str) -> None:
    """For A100, H100 and B200. nvcc refuses headers of another release of CUDA."""
    source = tmp_path / "twice.cu"
    source.write_text(KERNEL)
    command = [str(CUDA_HOME / "bin/nvcc"), f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    command += ["-I", str(CUDA_HOME / "include/cccl"), "-c", str(source), "-o", str(tmp_path / "twice.o")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
