"""Where in the file a key may stand, for a key that stands at a wrong place."""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

_MAX_PLACES = 3
"""With more sections than this that have the key there is no hint."""


def hint_for(key: str, root: type[BaseModel], *, below: str = "") -> str:
    """Return where ``root`` and its sections have the key; "" where none has it, or many have.

    Args:
        below: The section where the key stands, with NAME for the names in it. Only the sections below it count, if any of them has the key.
    """
    places = [
        place for place, section in _sections(root) if key in section.model_fields and not section.model_fields[key].exclude
    ]
    found = [place for place in places if place.startswith(f"{below}.")] or places
    at = [f"under {place}" if place else "at the left margin" for place in found]
    return f"put it {' or '.join(at)}" if 0 < len(found) <= _MAX_PLACES else ""


def _sections(root: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the root, whose place is "", and all sections below it."""
    yield "", root
    yield from _sections_below(root)


def _sections_below(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        for step, below in _models_in(field.annotation):
            at = f"{place}.{name}{step}".removeprefix(".")
            yield at, below
            yield from _sections_below(below, at)


def _models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models that a value of this type holds, each behind the step that leads to it: one of a mapping has a name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    step = ".NAME" if typing.get_origin(annotation) is dict else ""
    for part in typing.get_args(annotation):
        for further, model in _models_in(part):
            yield step + further, model
