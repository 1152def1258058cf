"""This module looks for the operating system's libraries that vLLM's kernels for CPUs need.

vLLM only logs that it could not load its kernels, and an engine on CPUs then fails at its first step. Run as `python -m
serve_app.host.libraries`, which `make .venv` does, it prints a warning for each missing library.
"""

import ctypes
import sys
from collections.abc import Iterator

PACKAGES = {"libnuma.so.1": "libnuma1"}
"""Library -> the package of Debian and Ubuntu. tests/test_libraries.py compares the libraries with those that the kernels name."""


def missing_libraries() -> Iterator[tuple[str, str]]:
    """Yield what is missing and the way out."""
    for library, package in PACKAGES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            yield f"{library} is missing, which vLLM's kernels for CPUs need", f"on Debian and Ubuntu: apt install {package}"


if __name__ == "__main__":
    for said, way_out in missing_libraries():
        print(f"warning: {said}; {way_out}", file=sys.stderr)
