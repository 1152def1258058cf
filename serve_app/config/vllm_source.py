"""Names and types of vLLM's arguments, read from its source: importing vLLM takes 8 s, `serve-app check` has 2 s.

A type is as much of an annotation as can be told without vLLM's classes: builtin types, unions of them, and `Literal`s, also those
that its modules give a name. All else counts as `Any`. `tests/config/test_vllm_source.py` compares the outcome with vLLM's own.
"""

import ast
import importlib.util
import operator
from collections.abc import Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, Literal

_ENGINE = "vllm.engine.arg_utils"
_SERVER = "vllm.entrypoints.launchers.cli_args"
_BUILTINS: Mapping[str, Any] = {t.__name__: t for t in (bool, int, float, str, list, dict, set, tuple)}


@lru_cache(maxsize=1)
def engine_arg_types() -> Mapping[str, Any]:
    """Public fields of vLLM's AsyncEngineArgs with their types; empty when vLLM is not installed."""
    fields = _fields(_ENGINE, "EngineArgs") | _fields(_ENGINE, "AsyncEngineArgs")
    return {name: kind for name, kind in fields.items() if not name.startswith("_")}


@lru_cache(maxsize=1)
def frontend_arg_types() -> Mapping[str, Any]:
    """Fields of vLLM's BaseFrontendArgs, which a server without HTTP has too, with their types."""
    return _fields(_SERVER, "BaseFrontendArgs")


@lru_cache(maxsize=1)
def listener_arg_types() -> Mapping[str, Any]:
    """Fields that vLLM's own HTTP server adds, with their types."""
    return _fields(_SERVER, "FrontendArgs")


@lru_cache(maxsize=64)
def _module(name: str) -> ast.Module | None:
    spec = importlib.util.find_spec("vllm")  # the top-level package only: a submodule's spec would import its parents
    if spec is None or not spec.submodule_search_locations or name.split(".")[0] != "vllm":
        return None
    path = Path(spec.submodule_search_locations[0], *name.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _fields(module: str, class_name: str) -> dict[str, Any]:
    tree = _module(module)
    bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name] if tree else []
    return {
        statement.target.id: _type(statement.annotation, module)
        for body in bodies
        for statement in body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _type(node: ast.expr, module: str) -> Any:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return reduce(operator.or_, (_type(left, module), _type(right, module)))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=options):
            parts = options.elts if isinstance(options, ast.Tuple) else [options]
            values = [part.value if isinstance(part, ast.Constant) else _type(part, module) for part in parts]
            return Any if Any in values else Literal[tuple(values)]
        case ast.Subscript(value=ast.Name(id="list" | "dict" | "set" | "tuple" as origin), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _BUILTINS[origin][tuple(_type(part, module) for part in parts)]
        case ast.Name(id=name):
            return _BUILTINS[name] if name in _BUILTINS else _named(name, module)
    return Any


def _named(name: str, module: str) -> Any:
    """Follow a name to where vLLM gives it a meaning."""
    tree = _module(module)
    for statement in tree.body if tree else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return _type(value, module)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                return _type(value, module)
            case ast.ImportFrom(module=str(source), names=names, level=0):
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        return _named(alias.name, source)
    return Any
