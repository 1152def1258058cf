"""vLLM is what `vllm_names.py` says it is; after an upgrade each failure here is one line that says what changed.

No engine is started, and nothing of vLLM is imported until a test asks for it: a module that moved is one line, too. Check how
serve_app/ uses the name, then bring its row up to date.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serve_app
from serve_app.links.fingerprint import public_version
from tests.contracts.changes import called, exact, fail_with, find, used
from tests.contracts.vllm_names import CALLED, EXACT, USED, VERSION

EVENT = "vllm.v1.engine.EngineCoreEvent"


def test_the_version_is_the_one_these_tables_were_made_for() -> None:
    assert public_version(find("vllm.version", "__version__")) == VERSION


def _rows() -> Iterator[Any]:
    """Yield a parameter set per row: which check, and its arguments."""
    for module, functions in CALLED.items():
        for name, was in re.findall(r"([\w.]+)\(([^)]*)\)", functions):
            yield pytest.param(called, (module, name, " ".join(was.split())), id=name)
    for module, classes in USED.items():
        for name, was in classes.items():
            yield pytest.param(used, (module, name, was), id=name)
    for path, was in EXACT.items():
        module, _, name = path.rpartition(".")
        yield pytest.param(exact, (module, name, was), id=name)


@pytest.mark.parametrize(("check", "row"), [*_rows()])
def test_the_name_is_what_it_was(check: Any, row: tuple[str, str, str]) -> None:
    fail_with([check(*row)])


@pytest.mark.parametrize(
    ("check", "row", "said"),
    [
        (called, ("vllm.utils", "random_id", ""), "vllm.utils.random_id: is gone"),
        (called, ("vllm.util", "random_uuid", ""), "vllm.util.random_uuid: is gone"),
        (called, ("vllm.utils", "random_uuid", "size="), "vllm.utils.random_uuid: was (size=), is ()"),
        (used, ("vllm.logprobs", "Logprob", "logprob odds"), "vllm.logprobs.Logprob: gone: odds"),
        (used, ("vllm.v1.engine.core", "EngineCoreProc", "input_queue"), ""),
        (exact, ("vllm.v1.engine", "EngineCoreEvent", "type at"), f"{EVENT}: fields added: timestamp; gone: at"),
        (exact, ("vllm.v1.engine", "EngineCoreEvent", "timestamp type"), f"{EVENT}: fields in another order"),
    ],
)
def test_a_change_is_reported_in_one_line(check: Any, row: tuple[str, str, str], said: str) -> None:
    assert check(*row) == said


def test_every_name_that_serve_app_imports_has_a_row() -> None:
    known = {*CALLED, *USED, *EXACT} | {f"{module}.{name}" for module, classes in USED.items() for name in classes}
    known |= {f"{module}.{name}" for module, text in CALLED.items() for name in re.findall(r"(\w+)[\w.]*\(", text)}
    imports = [
        f"{node.module}.{alias.name}"
        for path in Path(serve_app.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    ]
    fail_with(f"{name}: is imported and has no row" for name in sorted(set(imports) - known))
