"""This module compares how two versions of vLLM make the tensors of images, sound and video. It reads their sources and imports neither.

It begins at what a model registers and at what the front end asks of its class. It follows each name that the code uses, in both versions
side by side, as far as names are vLLM's. Two definitions are equal if their syntax is, but for docstrings, imports, annotations in
functions and the names of what is defined elsewhere; and if all that these names stand for is equal, in whichever modules. Of objects
it follows only what is asked of a `model_config`: what other methods do, it compares with their classes.

How a model computes with its tensors is not compared: it reads what the processor of its own version makes.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

Place = tuple[str, str]
"""Module and name of a definition in vLLM, the name "" for the module itself; or "" and the full name of what is not vLLM's."""
Pair = tuple[Place, Place]
"""A place in the older version, and its counterpart in the newer one."""

_MODELS = "vllm.model_executor.models"
_CONFIG = "vllm.config.model"
_CLASSES = "vllm.transformers_utils."
"""Here are classes that code finds by a checkpoint's files and not by their names. Annotations have the names."""
_PROCESSORS = f"{_CLASSES}processors."
_ASKED = (
    *("get_placeholder_str", "requires_raw_input_tokens", "supports_multimodal_raw_input_only"),
    *("supports_mm_device_do_normalize", "supported_video_pruning_methods"),
)
"""What the front end asks of the class of a model that takes media, besides the whole interface ``SupportsTranscription``."""
_DEFINING = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Module:
    """What a module defines and imports at its top, in all branches."""

    name: str
    is_package: bool
    text: str
    statements: list[ast.stmt] = field(default_factory=list)
    """Definitions, and calls for their effects."""
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[Place]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for statement in _flat(ast.parse(self.text).body):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for name, place in self.bound(statement):
                    self.imports.setdefault(name, []).append(place)
            if (names := [*_defined(statement)]) or isinstance(statement, ast.Expr):
                self.statements.append(statement)
            for name in names:
                self.definitions.setdefault(name, []).append(statement)
            if "environment_variables" in names:  # of vllm.envs, whose annotations are for type checkers
                self._read_variables(statement)

    def _read_variables(self, statement: ast.stmt) -> None:
        table = getattr(statement, "value", None)
        assert isinstance(table, ast.Dict)
        for key, value in zip(table.keys, table.values, strict=True):
            self.definitions.setdefault(str(_constant(key)), []).append(ast.Expr(value))

    def bound(self, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Place]]:
        """Yield the names that an import binds, and what they stand for."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, (alias.name, "")) if alias.asname else (first, (first, ""))
            return
        source = statement.module or ""
        if statement.level:
            parents = self.name.split(".")[: self.name.count(".") + 1 - statement.level + self.is_package]
            source = ".".join([*parents, source]).rstrip(".")
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                yield alias.asname or alias.name, (source, alias.name)

    @cached_property
    def lazy(self) -> Mapping[str, str]:
        """Class -> module, of the tables from which a package's ``__getattr__`` imports."""
        found = {}
        for statement in self.statements:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
                for key, value in zip(statement.value.keys, statement.value.values, strict=True):
                    if (module := str(_constant(value))).startswith("vllm."):
                        found[str(_constant(key))] = module
        return found


_parsed = cache(Module)
"""Most modules are the same in both versions."""


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class in all branches, without those inside of functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, _DEFINING):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _flat(handler.body)


def _defined(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Assign(targets=targets):
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            yield name


def _constant(node: ast.AST | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _dotted(node: ast.AST | None) -> str:
    """Return the name that an expression consists of, "" for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if dotted := _dotted(value):
            return f"{dotted}.{name}"
    return ""


def _class(node: ast.AST) -> str:
    """Return the name of a class that may have parameters."""
    return _dotted(node.value if isinstance(node, ast.Subscript) else node)


class Source:
    """One version's source in the folder of the package `vllm`. A module is read when it is first asked for."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self.module = cache(self._module)
        self.read = cache(self._read)
        self._found = cache(self._places)

    def _module(self, name: str) -> Module | None:
        first, *rest = name.split(".")
        path = self._package.joinpath(*rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if first == "vllm" and file.is_file():
                return _parsed(name, file.name == "__init__.py", file.read_text(encoding="utf-8"))
        return None

    def _inside(self, name: str) -> Module:
        module = self.module(name)
        assert module is not None, name
        return module

    def _places(self, module: str, name: str, seen: frozenset[Place] = frozenset()) -> tuple[Place, ...]:
        """Return where a name of a module is defined, one place for each branch; empty for a name that is not known."""
        if module.partition(".")[0] != "vllm":
            return (("", f"{module}.{name}".rstrip(".")),)
        if (inside := self.module(module)) is None or (module, name) in seen:
            return ()
        if not name:
            return ((module, ""),)
        seen |= {(module, name)}
        found = [(module, name)] if name in inside.definitions else []
        found += [place for of in inside.imports.get(name, ()) for place in self._places(*of, seen)]
        if not found and self.module(f"{module}.{name}") is not None:
            found = [(f"{module}.{name}", "")]
        if not found:
            lazy = [inside.lazy[name]] if name in inside.lazy else inside.stars
            found = [place for source in lazy for place in self._places(source, name, seen)]
        return tuple(dict.fromkeys(found))

    def meant(self, dotted: str, module: str, local: Mapping[str, list[Place]]) -> tuple[tuple[Place, ...], str]:
        """Return what the beginning of a dotted name in a module stands for, as far as it leads through modules, and the rest of the name.

        Args:
            local: What imports inside of a function bind.

        Raises:
            LookupError: An import binds the name, and what it imports is not found.
        """
        first, *rest = dotted.split(".")
        places = tuple(p for of in local[first] for p in self._found(*of)) if first in local else self._found(module, first)
        while rest and places and all(home and not name for home, name in places):
            places, rest = tuple(p for home, _ in places for p in self._found(home, rest[0])), rest[1:]
        if not places and (first in local or first in self._inside(module).imports):
            raise LookupError(f"{dotted} of {module}")
        return places, ".".join(rest)

    def statements(self, place: Place) -> list[ast.stmt]:
        """Return a definition's statements; of ``Class.member`` only what this class itself defines."""
        inside, (name, _, member) = self._inside(place[0]), place[1].partition(".")
        if not name:
            return inside.statements
        found = inside.definitions.get(name, [])
        return [s for each in found for s in _flat(getattr(each, "body", ())) if member in _defined(s)] if member else found

    def _read(self, place: Place) -> "Reading":
        return Reading(self, place, self._inside(place[0]), self.statements(place))

    @cached_property
    def media_models(self) -> Mapping[str, Place]:
        """Architecture -> class, of all models that take media; without those of `vllm.models`, which have a class for each platform."""
        found = {}
        for statement in self._inside(f"{_MODELS}.registry").statements:
            match statement:
                case ast.Assign(value=ast.Dict(keys=keys, values=values)):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(value, ast.Tuple):
                            module, name = (str(_constant(each)) for each in value.elts)
                            found[str(_constant(key))] = self._found(module if "." in module else f"{_MODELS}.{module}", name)
        one = {architecture: places[0] for architecture, places in found.items() if len(places) == 1}
        return {a: place for a, place in one.items() if place[0].startswith(_MODELS) and self._registered(place)}

    def parts(self, architecture: str) -> Mapping[str, tuple[Place, ...]]:
        """Return what a model registers for its media, by argument, and what the front end asks of its class, by member."""
        place = self.media_models[architecture]
        return {**self._registered(place), **{member: (where,) for member, where in self._asked(place).items()}}

    def _registered(self, model: Place) -> dict[str, tuple[Place, ...]]:
        for home, name in self._family(model):
            for statement in self.statements((home, name)):
                for decorator in getattr(statement, "decorator_list", ()):
                    if isinstance(decorator, ast.Call) and _dotted(decorator.func).endswith(".register_processor"):
                        given = {"processor": decorator.args[0], **{str(k.arg): k.value for k in decorator.keywords}}
                        return {argument: self.meant(_class(value), home, {})[0] for argument, value in given.items()}
        return {}

    def _asked(self, model: Place) -> dict[str, Place]:
        interface = self.statements((f"{_MODELS}.interfaces", "SupportsTranscription"))
        names = {name for each in interface for s in _flat(getattr(each, "body", ())) for name in _defined(s)} | {*_ASKED}
        found: dict[str, Place] = {}
        for home, name in self._family(model):
            found |= {m: (home, f"{name}.{m}") for m in names - found.keys() if self.statements((home, f"{name}.{m}"))}
        return found

    def _family(self, place: Place) -> Iterator[Place]:
        """Yield a class of vLLM and the classes that it inherits from, in about the order in which Python looks into them."""
        yield place
        for base in (base for statement in self.statements(place) for base in getattr(statement, "bases", ())):
            for found in self.meant(_class(base), place[0], {})[0]:
                if all(found):
                    yield from self._family(found)


class Reading:
    """The syntax of a definition as nested tuples, in which a number stands for what a name from outside of it means."""

    def __init__(self, source: Source, place: Place, inside: Module, statements: Iterable[ast.stmt]) -> None:
        self._source, self._inside = source, inside
        self._is_config = place[0] == _CONFIG and place[1].startswith("ModelConfig.")
        self._local: dict[str, list[Place]] = {}
        self._numbers: dict[tuple[Place, ...], int] = {}
        self._hints: dict[Place, None] = {}
        self._depth = 0
        self.shape = tuple(self._node(s, getattr(s, "name", None)) for s in statements if not _says_nothing(s))

    @property
    def places(self) -> list[tuple[Place, ...]]:
        """What the numbers stand for, in their order, then classes that annotations name and what is asked of a `ModelConfig`."""
        whole = (((self._inside.name, ""),),) if self._inside.name.startswith(_PROCESSORS) else ()
        return [*self._numbers, *((hint,) for hint in self._hints), *whole]

    def _node(self, node: Any, own: str | None = None) -> Any:
        match node:
            case list():
                return tuple(self._node(each) for each in node if not _says_nothing(each))
            case ast.Import() | ast.ImportFrom():
                for name, place in self._inside.bound(node):
                    self._local.setdefault(name, []).append(place)
                return ()
            case ast.arg(arg=name, annotation=annotation):
                self._hint(annotation)
                return name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._hint(node.returns)
                self._depth += 1
                shape = self._parts(node, own)
                self._depth -= 1
                return shape
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                return (self._node(target), None if self._depth else ast.unparse(annotation), self._node(value))
            case ast.Name() | ast.Attribute() if dotted := _dotted(node):
                self._ask_config(dotted)
                places, rest = self._source.meant(dotted, self._inside.name, self._local)
                return (self._numbers.setdefault(places, len(self._numbers)), rest) if places else dotted
            case ast.AST():
                return self._parts(node, own)
        return (type(node).__name__, node)

    def _parts(self, node: ast.AST, own: str | None) -> tuple[Any, ...]:
        fields = [getattr(node, name, None) for name in node._fields if name not in ("returns", "ctx", "kind", "type_comment")]
        return (type(node).__name__, *(self._node(part) for part in fields if part is None or part is not own))

    def _ask_config(self, dotted: str) -> None:
        _, _, asked = dotted.partition("self." if self._is_config and dotted.startswith("self.") else "model_config.")
        place = (_CONFIG, f"ModelConfig.{asked.partition('.')[0]}")
        if asked and self._source.module(_CONFIG) is not None and self._source.statements(place):
            self._hints[place] = None

    def _hint(self, annotation: ast.expr | None) -> None:
        for node in ast.walk(annotation) if annotation else ():
            text = _constant(node) or _dotted(node)
            if isinstance(text, str) and text.replace(".", "").isidentifier():
                places, _ = self._source.meant(text, self._inside.name, self._local)
                self._hints.update(dict.fromkeys(place for place in places if place[0].startswith(_CLASSES)))


def _says_nothing(node: Any) -> bool:
    """Return whether a statement is a docstring, or the signature of an overload."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
            return True
        case ast.FunctionDef(decorator_list=[*_, ast.Name(id="overload")]):
            return True
    return False


class Comparison:
    """Two versions beside each other."""

    def __init__(self, older: Source, newer: Source) -> None:
        self.older, self.newer = older, newer
        self._compared = cache(self._step)

    def of_model(self, architecture: str) -> set[Pair]:
        """Return the differences in how both versions process the media of an architecture that both have."""
        older, newer = self.older.parts(architecture), self.newer.parts(architecture)
        if older.keys() != newer.keys() or any(len(older[part]) != len(newer[part]) for part in older):
            return {(self.older.media_models[architecture], self.newer.media_models[architecture])}
        return self.differences(pair for part in older for pair in zip(older[part], newer[part], strict=True))

    def differences(self, begin: Iterable[Pair]) -> set[Pair]:
        """Return the places at which the two versions' code begins to differ, from these places on."""
        seen, found = {*begin}, set[Pair]()
        to_see = [*seen]
        while to_see:
            pair = to_see.pop()
            is_equal, others = self._compared(pair)
            if not is_equal:
                found.add(pair)
            to_see += others - seen
            seen |= others
        return found

    def is_equal(self, place: Place) -> bool:
        """Return whether a definition is equal but for what its names stand for."""
        return self._compared((place, place))[0]

    def _step(self, pair: Pair) -> tuple[bool, frozenset[Pair]]:
        """Return whether two definitions are equal but for what their names stand for, and if they are, what that is."""
        older, newer = pair
        if not (older[0] and newer[0]):
            return older == newer, frozenset()
        if not ((older[1] and newer[1]) or older[0].startswith(_PROCESSORS)):
            return older == newer, frozenset()
        was, now = self.older.read(older), self.newer.read(newer)
        if was.shape != now.shape or [len(places) for places in was.places] != [len(places) for places in now.places]:
            return False, frozenset()
        return True, frozenset(pair for both in zip(was.places, now.places, strict=True) for pair in zip(*both, strict=True))
