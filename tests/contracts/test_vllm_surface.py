"""vLLM is what `vllm_names.py` says it is; after an upgrade each failure here is one line that says what changed.

No engine is started, and nothing of vLLM is imported until a test asks for it: a module that moved is one line, too. Check how
serve_app/ uses the name, then bring its row up to date.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serve_app
from serve_app.vllm_versions import SERVER_ARGUMENTS
from tests.contracts import tables
from tests.contracts.changes import called, exact, fail_with, find, used

EVENT = "vllm.v1.engine.EngineCoreEvent"


def test_the_version_is_one_that_these_tables_were_made_for() -> None:
    assert tables.INSTALLED in tables.VERSIONS


def _rows() -> Iterator[Any]:
    """Yield a parameter set per row: which check, and its arguments."""
    for check, rows in ((called, tables.called()), (used, tables.used()), (exact, tables.exact())):
        for (module, name), was in rows.items():
            yield pytest.param(check, (module, name, was), id=f"{module}.{name}" if check is exact else name)


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
    rows = [*tables.called(), *tables.used(), *tables.exact()]
    known = {module for module, _ in rows} | {f"{module}.{name.partition('.')[0]}" for module, name in rows}
    imports = [
        f"{node.module}.{alias.name}"
        for path in Path(serve_app.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    ]
    fail_with(f"{name}: is imported and has no row" for name in sorted(set(imports) - known))
    modules = [module for module in SERVER_ARGUMENTS if find(module, "make_arg_parser") is not None]
    fail_with(f"{module}: is imported and has no row" for module in sorted(set(modules) - known))
