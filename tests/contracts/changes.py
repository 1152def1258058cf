"""This module says in one line how a name of vLLM differs from its expected form; the line is empty when it does not."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import pytest

_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def find(module: str, name: str) -> Any:
    """Return the object of a dotted name, None when some part of it is gone."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def parameters(function: Any) -> str:
    """Return the parameters without types: ``a, b=, *, c=``. Of a class method with its ``cls``."""
    shown: list[str] = []
    for parameter in inspect.signature(getattr(function, "__func__", function)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is parameter.empty else "="
        shown.append(f"{_STARS.get(parameter.kind, '')}{parameter.name}{default}")
    return ", ".join(shown)


def difference(was: Iterable[str], now: Iterable[str], *, only_gone: bool = False) -> str:
    """Return ``added: x; gone: y``, empty when nothing changed."""
    was, now = list(was), list(now)
    added = [] if only_gone else sorted(set(now) - set(was))
    gone = sorted(set(was) - set(now))
    parts = [f"{what}: {' '.join(names)}" for what, names in (("added", added), ("gone", gone)) if names]
    if not parts and not only_gone and was != now:
        parts = ["in another order"]
    return "; ".join(parts)


def line(name: str, change: str) -> str:
    return f"{name}: {change}" if change else ""


def called(module: str, name: str, was: str) -> str:
    """Return how the function's parameters changed. `used` does the same for names that are read, `exact` for all fields in order."""
    function = find(module, name)
    if function is None:
        return f"{module}.{name}: is gone"
    now = parameters(function)
    return line(f"{module}.{name}", f"was ({was}), is ({now})" if now != was else "")


def used(module: str, name: str, was: str) -> str:
    found = find(module, name)
    if found is None:
        return f"{module}.{name}: is gone"
    return line(f"{module}.{name}", difference(was.split(), members(found) if was else (), only_gone=True))


def exact(module: str, name: str, was: str) -> str:
    found = find(module, name)
    if found is None:
        return f"{module}.{name}: is gone"
    now = next(list(getattr(found, a)) for a in ("__struct_fields__", "_fields", "__members__") if hasattr(found, a))
    change = difference(was.split(), now)
    return line(f"{module}.{name}", f"fields {change}" if change else "")


def members(cls: type) -> set[str]:
    """Return the attributes of an instance: fields, methods, properties, and attributes that methods of vLLM's classes set."""
    names = set(dir(cls))
    for base in cls.__mro__:
        names |= inspect.get_annotations(base).keys()
        if base.__module__.startswith("vllm."):
            tree = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
            names |= {n.attr for n in tree if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return names


def asked_of(code: ModuleType | FunctionType, attribute: str) -> set[str]:
    """Return which attributes a module's or a method's code reads of ``attribute`` or ``self.attribute``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    return {n.attr for n in reads if getattr(n.value, "attr", getattr(n.value, "id", "")) == attribute}


def fail_with(changes: Iterable[str]) -> None:
    """Fail with these lines and nothing else; empty lines do not count."""
    if lines := [change for change in changes if change]:
        pytest.fail("\n".join(lines), pytrace=False)
