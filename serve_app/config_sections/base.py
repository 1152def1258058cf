"""What every section is made of: strict numbers, absolute paths, and refusal of unknown keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from serve_app.config_checks import checked_absolute, did_you_mean, wrong

# Strict: YAML has numbers, so "10m", "64 MiB" and yes are refused with the unit instead of being guessed at.
Int = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
AbsolutePath = Annotated[Path, AfterValidator(checked_absolute)]


class Section(BaseModel):
    """A mapping in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        """Before the types, so that a misspelt key is reported as such and not as a missing one."""
        for key in values if isinstance(values, Mapping) else ():
            if not isinstance(key, str):
                raise wrong(str(key), f"the key {key!r} is not a string", "put it in quotes")
            if key not in cls.model_fields:
                raise wrong(key, "unknown key", cls._hint_for(key))
        return values

    @classmethod
    def _hint_for(cls, key: str) -> str:
        return did_you_mean(key, cls.model_fields)
