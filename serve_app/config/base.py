"""`Section` is the base of every section: strict numbers, absolute paths, and refusal of unknown keys."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from serve_app.config.checks import again, checked_absolute, did_you_mean, refuse_url, wrong

# Strict: YAML has numbers, so "10m", "64 MiB" and yes are refused with a hint about the unit instead of being guessed at.
Int = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
AbsolutePath = Annotated[Path, BeforeValidator(refuse_url), AfterValidator(checked_absolute)]
_MAX_EXACT = (1 << 53) - 1
"""The largest integer whose float no other integer shares: 2^53 + 1 is read as the float 2^53."""


class Section(BaseModel):
    """A mapping in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report unknown keys first, and then problems of the other keys. A misspelt key is not reported as a missing key as well."""
        if not isinstance(values, Mapping):
            return handler(values)
        problems = [*(cls._unknown(key) for key in values if key not in cls.model_fields), *cls._problems_as_written(values)]
        if not problems:
            return handler(values)
        meant = {f"did you mean {name}?": name for name in cls.model_fields}
        excused = {(meant[hint],) for p in problems if p.context and (hint := p.context["hint"]) in meant}
        found = [InitErrorDetails(type=problem, loc=(), input=values) for problem in problems]
        try:
            handler({key: value for key, value in values.items() if key in cls.model_fields})
        except ValidationError as exc:
            found += [again(detail) for detail in exc.errors() if detail["type"] != "missing" or detail["loc"] not in excused]
        raise ValidationError.from_exception_data(cls.__name__, found)

    @field_validator("*", mode="before")
    @classmethod
    def _whole_floats_are_integers(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the integer that a float such as 5e7 is, for a field of type `Int`. JSON Schema's integers have such floats too.

        This is no validator of `Int` itself, because pydantic then writes no `minimum` into the schema of `Int | None`.
        """
        if not isinstance(value, float) or not value.is_integer() or abs(value) > _MAX_EXACT:
            return value
        kind = cls.model_fields[info.field_name or ""].annotation
        return int(value) if kind is int or Int in get_args(kind) else value

    @classmethod
    def _problems_as_written(cls, values: Mapping[Any, Any]) -> Iterable[PydanticCustomError]:
        """Return problems of the mapping as written. They are found before the sections are checked, whose mistakes would hide them."""
        return ()

    @classmethod
    def _unknown(cls, key: object) -> PydanticCustomError:
        if not isinstance(key, str):
            return wrong(str(key), f"the key {key!r} is not a string", "put it in quotes")
        return wrong(key, "unknown key", cls._hint_for(key))

    @classmethod
    def _hint_for(cls, key: str) -> str:
        return did_you_mean(key, [name for name, field in cls.model_fields.items() if not field.exclude])
