"""This module gives the tables of `vllm_names.py` as they are for the installed vLLM: `vllm_033.py` has what a newer one changed."""

import re
from collections.abc import Mapping

from serve_app.links.fingerprint import public_version
from tests.contracts import vllm_033, vllm_names
from tests.contracts.changes import find

VERSIONS = (vllm_names.VERSION, vllm_033.VERSION)
"""vLLM of the CPU image and of the CUDA image."""
INSTALLED = public_version(str(find("vllm.version", "__version__")))
IS_NEWER = INSTALLED == vllm_033.VERSION


def called() -> dict[tuple[str, str], str]:
    """Return (module, function or method) -> its parameters."""
    rows = _called(vllm_names.CALLED)
    if not IS_NEWER:
        return rows
    return {_moved(*key): was for key, was in rows.items()} | _called(vllm_033.CALLED)


def used() -> dict[tuple[str, str], str]:
    """Return (module, class or name) -> the attributes that are read of it."""
    rows = {(module, name): was for module, classes in vllm_names.USED.items() for name, was in classes.items()}
    return {_moved(*key): was for key, was in rows.items()} if IS_NEWER else rows


def exact() -> dict[tuple[str, str], str]:
    """Return (module, struct) -> all its fields in their order."""
    rows = {path: f"{was} {added_to(path.rpartition('.')[2])}" for path, was in vllm_names.EXACT.items()}
    return {(path.rpartition(".")[0], path.rpartition(".")[2]): was for path, was in rows.items()}


def added_to(what: str) -> str:
    """Return the names that the installed vLLM has at the end of a struct, or of a list of `vllm_names.py`, and 0.32 has not."""
    return vllm_033.ADDED.get(what, "") if IS_NEWER else ""


def listed(name: str) -> list[str]:
    """Return a list of `vllm_names.py` as it is in the installed vLLM."""
    gone = vllm_033.GONE.get(name, "").split() if IS_NEWER else []
    return [each for each in f"{getattr(vllm_names, name)} {added_to(name)}".split() if each not in gone]


def lacking(struct: str) -> set[str]:
    """Return the fields of the newer vLLM's struct that the installed one lacks."""
    return set() if IS_NEWER else set(vllm_033.ADDED.get(struct, "").split())


def _called(table: Mapping[str, str]) -> dict[tuple[str, str], str]:
    return {
        (module, name): " ".join(was.split())
        for module, functions in table.items()
        for name, was in re.findall(r"([\w.]+)\(([^)]*)\)", functions)
    }


def _moved(module: str, name: str) -> tuple[str, str]:
    return vllm_033.MOVED.get(module, module), name
