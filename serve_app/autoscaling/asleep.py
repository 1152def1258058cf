"""`Sleepers` decides which idle engines stay, asleep, and which end. Pure; `FleetScaler` is its only user.

An idle engine that sleeps costs host memory, and saves the difference between a start and a wake-up at its next request. It ends

- when a wake-up takes no less than a start,
- when the sleeping engines together hold more than ``max_asleep_gib``: then those that save the least for each byte and second end, where
  the time since a model's last request stands for the time until its next,
- or when the place on its GPU goes to a model that asks for a first replica (`turns.py`), like any idle engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.autoscaling.decision import Observation

GIB = 2**30


@dataclass(slots=True)
class Sleepers:
    """Remembers when each model had its last request."""

    _asked_at: dict[str, float] = field(default_factory=dict)

    def staying(
        self, models: Mapping[str, Observation], cold_starts_s: Mapping[str, float], *, max_asleep_gib: float | None, at: float
    ) -> dict[str, str]:
        """Return model -> the name of the rule, for each model whose replica stays though it is idle.

        Args:
            models: The models whose engines may sleep.
            cold_starts_s: How long a start of each takes.
            at: Now, in the observations' seconds.
        """
        self._asked_at = {name: self._asked_at.get(name, at) for name in models}
        staying, asleep = {}, []
        for name, seen in models.items():
            load = seen.load
            if load.running or load.queued or load.waiting or load.requests:
                self._asked_at[name] = at
            if not seen.target:
                continue
            if seen.asleep is None:
                staying[name] = "awake"
            elif (saves_s := cold_starts_s[name] - seen.asleep.wake_s) > 0:
                byte_s = max(1.0, seen.asleep.host_bytes) * max(1.0, at - self._asked_at[name])
                asleep.append((saves_s / byte_s, name, seen.asleep.host_bytes))
        left = None if max_asleep_gib is None else max_asleep_gib * GIB
        for _, name, host_bytes in sorted(asleep, reverse=True):
            if left is None or host_bytes <= left:
                staying[name] = "asleep"
                left = None if left is None else left - host_bytes
        return staying
