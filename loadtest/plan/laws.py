"""This module has the arrival laws that a scenario can name, with the keys of each law."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from loadtest.wording import is_writable

Rate = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=7 * 86400, allow_inf_nan=False)]


def _edge(value: float) -> float:
    if 0 < value < 0.001:
        raise ValueError("must be 0 or at least 0.001 s; write 0 for a jump")
    return value


Edge = Annotated[Seconds, AfterValidator(_edge)]


def _no_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path has a NUL byte; name another file")
    return path


InputFile = Annotated[Path, AfterValidator(_no_nul)]


def _address(value: str) -> str:
    urlsplit(value)  # its ValueError says what is wrong
    return value


Url = Annotated[str, AfterValidator(_address)]
MAX_SEED = 2**63 - 1


def refuse_unwritable(value: Any, path: str = "scenario") -> None:
    """Check that each text in ``value``, a scenario or a part of a scenario, can be written to a file.

    Raises:
        ValueError: A text cannot be encoded; the message has its key.
    """
    if isinstance(value, str) and not is_writable(value):
        raise ValueError(f"{path} is {value!r}, which has half of a surrogate pair; write the character itself")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        refuse_unwritable(key, f"a key of {path}")
        refuse_unwritable(item, str(key) if path == "scenario" else f"{path}.{key}")


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_word_for_a_number(cls, values: Any) -> Any:
        """Refuse true where a number belongs: pydantic takes it for 1, and YAML reads ``on`` and ``yes`` as true."""
        for name, value in values.items() if isinstance(values, dict) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else None
            takes_numbers = {getattr(each, "__origin__", each) for each in (kind, *get_args(kind))} & {int, float}
            for given in value if isinstance(value, list | tuple) else (value,):
                if takes_numbers and isinstance(given, bool):
                    raise ValueError(f"{name} takes numbers (got {given}); YAML reads on and yes as true, off and no as false")
        return values


class Constant(Part):
    """Equal gaps."""

    law: Literal["constant"]
    rate: Rate


class Poisson(Part):
    """Independent arrivals, as of many users who do not coordinate."""

    law: Literal["poisson"]
    rate: Rate


class Gamma(Part):
    """Gamma gaps. ``cv`` 1 is Poisson, more is burstier."""

    law: Literal["gamma"]
    rate: Rate
    cv: float = Field(ge=0.01, le=20)


class OnOff(Part):
    """Poisson at ``rate`` for ``on_s``, at ``off_rate`` for ``off_s``, and again."""

    law: Literal["on-off"]
    rate: Rate
    off_rate: float = Field(default=0.0, ge=0)
    on_s: Seconds
    off_s: Seconds


class Ramp(Part):
    """Poisson; the rate changes linearly from ``rate`` to ``to_rate`` over the run."""

    law: Literal["ramp"]
    rate: Rate
    to_rate: Rate


class Step(Part):
    """Poisson at ``rate``, from ``at_s`` on at ``to_rate``."""

    law: Literal["step"]
    rate: Rate
    to_rate: Rate
    at_s: Seconds


class FlashCrowd(Part):
    """Poisson at ``rate``; from ``at_s`` it rises in ``rise_s`` to ``peak_rate``, holds for ``hold_s`` and falls in ``fall_s``."""

    law: Literal["flash-crowd"]
    rate: Rate
    peak_rate: Rate
    at_s: Seconds
    rise_s: Edge = 5.0
    hold_s: Seconds = 30.0
    fall_s: Edge = 30.0


class Diurnal(Part):
    """Poisson; the rate is a sine around ``rate`` and starts at its lowest point."""

    law: Literal["diurnal"]
    rate: Rate
    amplitude: float = Field(ge=0, le=1)
    """Share of ``rate`` by which the rate rises and falls."""
    period_s: float = Field(gt=0)


class Trace(Part):
    """Arrivals and lengths from a recorded file."""

    law: Literal["trace"]
    file: InputFile
    """CSV or JSONL; docs/loadtest.md lists the formats. Relative to the scenario's folder."""
    speed: float = Field(default=1.0, gt=0)
    """Recorded times are divided by this factor: 2 replays twice as fast."""
    dequantise_s: Seconds = 0.0
    """Resolution of the recorded times. Each time is moved, at random but seeded, within its step; 0 replays the times as recorded."""


class Closed(Part):
    """A closed loop: a fixed number of clients, each of which sends as soon as its last answer has ended. A closed loop hides stalls of
    the target; every report says so."""

    law: Literal["closed"]
    concurrency: int = Field(ge=1, le=10_000)
    max_requests: int = Field(ge=1, le=1_000_000)


class Burst(Part):
    """All requests at once, at 0."""

    law: Literal["burst"]
    max_requests: int = Field(ge=1, le=1_000_000)


Arrival = Annotated[
    Constant | Poisson | Gamma | OnOff | Ramp | Step | FlashCrowd | Diurnal | Trace | Closed | Burst, Field(discriminator="law")
]

ARRIVALS = {
    get_args(cls.model_fields["law"].annotation)[0]: cls
    for cls in (Constant, Poisson, Gamma, OnOff, Ramp, Step, FlashCrowd, Diurnal, Trace, Closed, Burst)
}
"""The laws by their names in a scenario file."""
