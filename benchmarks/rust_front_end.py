"""This module gets vLLM's Rust front end, which only the CUDA wheels have, from the installed version's wheel on PyPI."""

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from serve_app.links.fingerprint import public_version

_INSIDE = "vllm/vllm-rs"


def rust_front_end(cache: Path) -> Path:
    """Return the path of the binary: the installed vLLM's, or one in ``cache``. The first call for a version downloads 330 MB and keeps 60.

    Raises:
        RuntimeError: pip cannot fetch the wheel; the message has pip's reason.
    """
    from vllm import version

    if (installed := Path(version.__file__).parents[1] / _INSIDE).exists():
        return installed
    number = public_version(version.__version__)
    path = cache / f"vllm-rs-{number}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _fetch(number, Path(folder)).replace(path)
    return path


def _fetch(number: str, folder: Path) -> Path:
    wanted = ["--no-deps", "--only-binary", ":all:", "--platform", f"manylinux_2_28_{platform.machine()}", f"vllm=={number}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vLLM's wheel for CUDA, {number}, cannot be fetched: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        binary = Path(archive.extract(_INSIDE, folder))
    binary.chmod(0o755)
    return binary
