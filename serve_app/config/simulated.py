"""`SimulatedSettings` chooses the accelerator and the link that a simulated engine stands for."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue

from serve_app.config.base import Int, Real, Section
from serve_app.config.checks import wrong
from serve_app.errors import ConfigError
from serve_app.simulated.profiles import PATH, profile_from
from serve_app.simulated.timing import StepWork, step_time_s
from serve_app.simulated.transfer import DEFAULT_LINK, LINK_PATH, link_from


def _checked(value: Any, make: Callable[[Any], object], path: str, hint: str) -> Any:
    """Return a valid value. This check runs before pydantic's, which would report the failure of a union as two failures."""
    if not isinstance(value, str | Mapping):
        raise wrong("", f"is {value!r}, neither a name nor a mapping", hint)
    try:
        make(value)
    except ConfigError as exc:
        raise wrong(exc.path.removeprefix(path).removeprefix("."), exc.problem, exc.hint) from None
    return value


def _checked_profile(profile: Any) -> Any:
    return _checked(profile, profile_from, PATH, "name a profile, for example a10g-llama-8b")


def _checked_link(link: Any) -> Any:
    return _checked(link, link_from, LINK_PATH, f"name a link, for example {DEFAULT_LINK}")


class SimulatedSettings(Section):
    """Replaces the forward pass by a timing model; scheduler, KV cache and API stay vLLM's own."""

    profile: Annotated[str | dict[str, JsonValue], BeforeValidator(_checked_profile)]
    """Name of an accelerator profile, or the profile itself as a mapping."""
    link: Annotated[str | dict[str, JsonValue], BeforeValidator(_checked_link)] = DEFAULT_LINK
    """Over which other replicas read KV with `kv.transfer: nixl`: `nvlink-4`, `pcie-4`, `efa-100g`, `efa-400g`, or a mapping of
    `bandwidth_gbit_s` and `latency_us`."""
    time_scale: Real = Field(default=1.0, gt=0)
    """Factor on every simulated time; 2 is half as fast."""
    startup_delay_s: Real = Field(default=0.0, ge=0)
    """Simulated seconds for loading the weights."""
    eos_probability: Real = Field(default=0.0, ge=0, le=1)
    """Probability that a token ends the answer. 0: every answer runs to its max_tokens."""
    calls_tools: bool = Field(default=False, strict=True)
    """Answer questions in chats with tools by a call. Needs `frontend_args.tool_call_parser: hermes` and a chat template that shows
    tools, as in examples/tools.yaml."""
    seed: Int = 0
    """Seed of the hash that generates the tokens. Equal seeds and prompts give equal answers."""

    def least_step_s(self) -> float:
        """Return the seconds between two tokens of a single request."""
        return self.time_scale * step_time_s(profile_from(self.profile), StepWork(1, 1, 1))

    def prompt_step_s(self, num_tokens: int) -> float:
        """Return the seconds of a step over a prompt of so many tokens; infinity if a float cannot hold them."""
        work = StepWork(num_tokens, num_tokens, num_tokens * (num_tokens + 1) // 2)
        try:
            return self.time_scale * step_time_s(profile_from(self.profile), work)
        except OverflowError:
            return math.inf
