"""This module computes how long a simulated accelerator takes to sleep and to wake, and what host memory its weights take meanwhile.

Pure. At level 1 the weights cross the PCIe bus both ways, each accelerator's part over its own; at level 2 they are dropped, and read
again in the time that a start takes for loading. No bytes move: these times are simulated, not measured.
"""

from collections.abc import Mapping
from typing import Any

from serve_app.simulated.profiles import Profile

METHODS = frozenset({"sleep", "wake_up", "reload_weights"})
"""The methods of a worker of vLLM's that these phases consist of."""


def weight_bytes(profile: Profile) -> int:
    """Return the bytes of the weights on all accelerators together."""
    return int(profile.model.num_parameters * profile.model.bytes_per_parameter)


def copy_s(profile: Profile) -> float:
    """Return the seconds in which the weights move between the accelerators and the host's memory, one way."""
    accelerator = profile.accelerator
    reached = accelerator.host_bandwidth_bytes_per_s * accelerator.bandwidth_efficiency
    return weight_bytes(profile) / (reached * profile.num_accelerators)


def held_bytes(profile: Profile, level: int) -> int:
    """Return the host memory that the weights take while the engine sleeps."""
    return weight_bytes(profile) if level == 1 else 0


class SleepTimes:
    """The seconds of a worker's methods, in the order in which an engine calls them."""

    def __init__(self, profile: Profile, load_s: float) -> None:
        self._profile = profile
        self._load_s = load_s
        self._level = 0

    def of(self, method: str, arguments: Mapping[str, Any]) -> float:
        """Return the seconds of a call of one of `METHODS`, not scaled."""
        if method == "sleep":
            self._level = int(arguments["level"])
        if method == "reload_weights":
            return self._load_s
        return copy_s(self._profile) if self._level == 1 else 0.0
