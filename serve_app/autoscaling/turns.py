"""`Turns` decides whose turn it is where models that share GPUs do not fit beside each other. Pure.

A model without a replica asks for one when requests wait for it. A model with replicas gives up its last one to a model that asks

- when it has had no request for `IDLE_S`, or
- when it has served for its stay, however busy it is. The stay is two cold starts, from 60 s to 900 s (`needs.keep_s`).

So of n models that share one place, a request waits for at most n - 1 turns: each a start, a stay, and the end of streams
(`timeouts.drain_s`).
The model that has waited longest goes first. `autoscaling/fleet.py` asks for `Turns.order` only among models of one priority.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.needs import MAX_KEEP_S, keep_s

IDLE_S = 10.0
IN_TURN, ASKS, YIELDS, RESTS = range(4)
"""States of a model, in the order in which they get a place. A model rests while it has no replica and no request waits for one."""


@dataclass(slots=True)
class Turns:
    """Remembers when each model began to hold replicas, to serve, to be idle and to ask. Times are those of the observations."""

    _held_at: dict[str, float] = field(default_factory=dict)
    _served_at: dict[str, float] = field(default_factory=dict)
    _busy_at: dict[str, float] = field(default_factory=dict)
    """When a model that holds replicas had a request last."""
    _asked_at: dict[str, float] = field(default_factory=dict)
    _orders: dict[str, tuple[int, float]] = field(default_factory=dict)

    def observe(self, models: Mapping[str, Observation], cold_starts_s: Mapping[str, float], *, at: float) -> None:
        """Take in an observation of the models, and the cold start of each."""
        for known in (self._held_at, self._served_at, self._busy_at, self._asked_at, self._orders):
            for name in known.keys() - models.keys():
                del known[name]
        for name, seen in models.items():
            self._orders[name] = self._hold(name, seen, cold_starts_s[name], at) if seen.target else self._ask(name, seen, at)

    def order(self, model: str) -> tuple[int, float]:
        """Return a model's place among those that want a first replica: the smaller, the earlier."""
        return self._orders.get(model, (RESTS, 0.0))

    def _hold(self, name: str, seen: Observation, cold_start_s: float, at: float) -> tuple[int, float]:
        self._asked_at.pop(name, None)
        held_at = self._held_at.setdefault(name, at)
        load = seen.load
        if load.running or load.queued or load.waiting or load.requests:
            self._busy_at[name] = at
        if not seen.running and name not in self._served_at:
            # A model whose replica never starts gives up its turn after MAX_KEEP_S.
            return (IN_TURN if at - held_at < MAX_KEEP_S else YIELDS), held_at
        served_at = self._served_at.setdefault(name, at)
        idle_s = at - max(self._busy_at.get(name, served_at), served_at)
        stays = idle_s < IDLE_S and at - served_at < keep_s(cold_start_s)
        return (IN_TURN if stays else YIELDS), served_at

    def _ask(self, name: str, seen: Observation, at: float) -> tuple[int, float]:
        for known in (self._held_at, self._served_at, self._busy_at):
            known.pop(name, None)
        if not seen.load.waiting:
            self._asked_at.pop(name, None)
            return RESTS, 0.0
        return ASKS, self._asked_at.setdefault(name, at)
