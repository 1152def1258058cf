"""The settings describe one static server; `python -m benchmarks.static_batching` reads and re-reads them from a YAML file."""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from benchmarks.static_batching.batches import Form, largest_batch
from serve_app.config import Int, Real, Section, SimulatedSettings
from serve_app.config.checks import to_config_errors, wrong
from serve_app.errors import ConfigError
from serve_app.simulated.profiles import Profile, profile_from


class StaticSettings(Section):
    """The settings of one model that runs one fixed batch at a time."""

    name: str = Field(min_length=1)
    """The `model` in requests."""
    model: str = Field(min_length=1)
    """As in `serve_app.config.ModelSettings`. For a simulated server only the tokenizer is read."""
    form: Form = "fair"
    """``paper``: every batch decodes max_output_tokens, as in Anyscale's study. ``fair``: the tokens that its longest member asked for."""
    max_batch_size: Int | None = Field(default=None, ge=1)
    """Requests in a batch; 1 is the naive server. Default: the most that the simulated memory can reserve."""
    max_prompt_tokens: Int = Field(ge=1)
    """Longest prompt. A place in the batch reserves KV cache for this plus max_output_tokens."""
    max_output_tokens: Int = Field(ge=1)
    """Largest max_tokens of any request; with ``paper`` also the length to which every batch is decoded."""
    batch_wait_s: Real = Field(default=0.02, ge=0)
    """Seconds that an idle server waits for a batch to fill, scaled like all simulated times. Serve's batch_wait_timeout_s."""
    simulated: SimulatedSettings | None = None
    """Take the times of batches from an accelerator profile instead of computing. eos_probability must be 0."""
    num_threads: Int = Field(default=1, ge=1)
    """PyTorch's threads when it computes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights when it computes."""

    @property
    def max_length(self) -> int:
        """Return the most tokens of one request, which a place in the batch reserves."""
        return self.max_prompt_tokens + self.max_output_tokens

    @property
    def profile(self) -> Profile | None:
        return None if self.simulated is None else profile_from(self.simulated.profile)

    @property
    def batch_size(self) -> int:
        """Return the number of requests in a full batch."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        assert self.profile is not None  # checked below
        return largest_batch(self.profile.kv_cache_tokens, self.max_length)

    @property
    def time_scale(self) -> float:
        return 1.0 if self.simulated is None else self.simulated.time_scale

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.simulated is None or self.profile is None:
            if self.max_batch_size is None:
                raise wrong("max_batch_size", "is missing and simulated is not set", "set max_batch_size")
            return self
        if self.simulated.eos_probability:
            problem = f"is {self.simulated.eos_probability:g}"
            raise wrong("simulated.eos_probability", problem, "set it to 0: simulated answers have the length asked for")
        room = largest_batch(self.profile.kv_cache_tokens, self.max_length)
        if room < (self.max_batch_size or 1):
            problem = (
                f"is {self.max_batch_size or 1}, and {self.profile.name} has KV memory for {room} of {self.max_length} tokens"
            )
            raise wrong("max_batch_size", problem, "lower it, max_prompt_tokens or max_output_tokens")
        return self


def parse_static(values: Any) -> StaticSettings:
    """Return the settings given as a mapping.

    Raises:
        ConfigError: The settings are wrong; the message has the first problem.
    """
    if not isinstance(values, dict):
        raise ConfigError("static", "is not a mapping", "give at least name, model, max_prompt_tokens and max_output_tokens")
    try:
        return StaticSettings.model_validate(values)
    except ValidationError as exc:
        raise to_config_errors(exc)[0] from exc


def load_static(path: Path) -> StaticSettings:
    """Read the settings from a YAML file.

    Raises:
        ConfigError: The file cannot be read, or a value is wrong.
    """
    try:
        return parse_static(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(str(path), " ".join(str(exc).split()), "give a YAML file") from exc
