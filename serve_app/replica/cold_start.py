"""`ColdStart` divides the time of a replica's start into phases.

Pure: seconds in, seconds out. The phases follow one another and add up to the whole start; work that overlaps counts once, in the phase
in which the start waited for it. Wall-clock times are compared only where two processes meet; everything else is a difference of one
process's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec


class EnginePhases(msgspec.Struct, array_like=True, frozen=True):
    """The phases of the engine core process's start, in seconds, as the process measured them."""

    download_s: float
    """The process had imported vLLM and waited for the model's files."""
    load_s: float
    """Configuration and weights; for a model of a hub, also their download."""
    warm_up_s: float
    """Profile run, KV cache, compilation, graph capture, scheduler. The supervisor adds the time of its own first token."""


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """The phases of one start in their order, in seconds, each >= 0."""

    scheduled_s: float | None = None
    """From Serve's order to the start of Ray's process: finding a place, a node, its image. None: Serve could not be asked."""
    process_s: float
    """Until our code ran: Python, Ray's worker, Serve."""
    import_s: float
    """Until the engine core process had imported vLLM."""
    download_s: float
    load_s: float
    warm_up_s: float
    listen_s: float
    """Until links could be accepted."""
    first_token_s: float | None = None
    """From the first accepted link on until the first output went to an ingress, including the wait for a request. None: not yet."""

    @classmethod
    def measured(
        cls, created_at: float, began_at: float, *, began: float, engine_ready: float, listening: float, engine: EnginePhases
    ) -> Self:
        """Return the phases of the start that the replica itself can measure.

        Args:
            created_at: Wall-clock time of the process's creation.
            began_at: Wall-clock time at which our code began.
            began: The same moment on the monotonic clock; ``engine_ready`` and ``listening`` are on this clock, too.
        """
        inside_engine = engine.download_s + engine.load_s + engine.warm_up_s
        return cls(
            process_s=max(0.0, began_at - created_at),
            import_s=max(0.0, engine_ready - began - inside_engine),
            download_s=engine.download_s,
            load_s=engine.load_s,
            warm_up_s=engine.warm_up_s,
            listen_s=listening - engine_ready,
        )

    def asked(self, asked_at: float | None, *, began_at: float) -> Self:
        """Return the start with the phase before the process, given the wall-clock time at which Serve asked for the replica.

        A time after ``began_at`` comes from a controller that restarted in between, and counts as unknown. If the process is older than
        the order, Ray had kept it ready, and its phase begins with the order.
        """
        if asked_at is None or asked_at > began_at:
            return self
        since_asked_s = began_at - asked_at
        process_s = min(self.process_s, since_asked_s)
        return replace(self, scheduled_s=since_asked_s - process_s, process_s=process_s)

    @property
    def start_s(self) -> float:
        """Seconds until links could be accepted, from Serve's order or, if that is unknown, from the process's creation."""
        return sum(seconds for phase, seconds in self.phases().items() if phase != "first_token")

    def phases(self) -> dict[str, float]:
        """Return the known phases by name, to the millisecond."""
        names = ("scheduled", "process", "import", "download", "load", "warm_up", "listen", "first_token")
        values: Mapping[str, float | None] = {name: getattr(self, f"{name}_s") for name in names}
        return {name: round(value, 3) for name, value in values.items() if value is not None}

    def record(self, **who: str) -> dict[str, Any]:
        """Return the line for the log: ``who``, ``start_s``, the last known phase, and the phases."""
        until = "ready" if self.first_token_s is None else "first_token"
        return {**who, "start_s": round(self.start_s, 3), "until": until, "phases": self.phases()}
