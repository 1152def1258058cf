"""This module says where in the file a key may stand, for the hint about a misplaced key."""

import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

_MAX_PLACES = 3
"""If more sections than this have the key, only the outermost count; if these are more, there is no hint."""


def hint_for(path: str, root: type[BaseModel]) -> str:
    """Return where ``root`` and its sections have the last key of ``path``; "" if no section has it, or many have it at one depth.

    If sections below the key's present section have the key, only these count.
    """
    parent, _, key = path.rpartition(".")
    places = [place for place, section in sections(root) if key in section.model_fields and not section.model_fields[key].exclude]
    own = next((place for place, _ in sections(root) if re.fullmatch(_paths_of(place), parent)), "")
    found = [place for place in places if own and place.startswith(f"{own}.")] or places
    if len(found) > _MAX_PLACES:
        found = [place for place in found if place.count(".") == min(each.count(".") for each in found)]
    if not 0 < len(found) <= _MAX_PLACES:
        return ""
    if found == [""]:
        return "put it at the top level"
    return f"put it under {' or '.join(place or 'the top level' for place in found)}"


def _paths_of(place: str) -> str:
    """Return a pattern of the paths of a place: ``models.NAME`` also matches ``models["a/b"]``."""
    return re.escape(place).replace(r"\.NAME", r"""(\.[\w-]+|\["[^"]*"\])""") + r"(\[\d+\])?"


def sections(root: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the root, at the place "", and all sections below it."""
    yield "", root
    yield from _sections_below(root)


def _sections_below(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        for step, below in _models_in(field.annotation):
            at = f"{place}.{name}{step}".removeprefix(".")
            yield at, below
            yield from _sections_below(below, at)


def _models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models in a value of this type, each with the step that leads to it: ``.NAME`` for an entry of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    step = ".NAME" if typing.get_origin(annotation) is dict else ""
    for part in typing.get_args(annotation):
        for further, model in _models_in(part):
            yield step + further, model
