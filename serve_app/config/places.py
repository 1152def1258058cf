"""Where in the file a key may stand, for a key that stands at a wrong place."""

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

_MAX_PLACES = 3
"""A key of more sections than this, such as `max`, is no hint."""


def hint_for(key: str, root: type[BaseModel]) -> str:
    """Return where the sections below ``root`` have the key; "" where none has it, or many have."""
    found = [place for place, section in _sections(root) if key in section.model_fields and not section.model_fields[key].exclude]
    return f"put it under {' or '.join(found)}" if 0 < len(found) <= _MAX_PLACES else ""


def _sections(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        for step, below in _models_in(field.annotation):
            at = f"{place}.{name}{step}".removeprefix(".")
            yield at, below
            yield from _sections(below, at)


def _models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models that a value of this type holds, each behind the step that leads to it: one of a mapping has a name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    step = ".NAME" if typing.get_origin(annotation) is dict else ""
    for part in typing.get_args(annotation):
        for further, model in _models_in(part):
            yield step + further, model
