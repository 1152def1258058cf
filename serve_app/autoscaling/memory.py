"""The policy's memory holds all that it knows between two ticks; a new controller takes over the memory of the one before.

The clock of a memory also runs while no controller does: a new process reads its own monotonic clock and adds `Memory.clock_s`. So
knowledge ages by itself: arrivals of more than five minutes ago are no demand, and a start in progress is as old as it is. Knowledge
without a time (the fit, mean lengths) loses weight by the length of the pause (`FleetScaler.pass_unseen`).
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from serve_app.autoscaling.decision import Decision
from serve_app.autoscaling.fleet import FleetScaler
from serve_app.autoscaling.history import HISTORY_S
from serve_app.autoscaling.pools import OrderedShare
from serve_app.autoscaling.signals import Meter

logger = logging.getLogger("ray.serve")  # this runs in Serve's controller: its log is where people look

MAX_BYTES = 8 << 20
"""A memory of one model takes some 100 KB: ten minutes of arrivals, a line a second."""
MAX_AGE_S = 86_400.0
"""An older memory is ignored: the load has changed since."""


class MemoryStore(Protocol):
    """Keeps the memory of one application's autoscaler outside its process. Neither method waits or raises."""

    def kept(self) -> bytes | None:
        """Return the memory kept last, empty if there is none; None while this is not known yet."""
        ...

    def keep(self, data: bytes) -> None:
        """Keep ``data`` in place of the memory kept before. It may be lost."""
        ...


@dataclass
class Memory:
    """All that the policy remembers between two ticks. Times in seconds of the memory's clock."""

    scaler: FleetScaler
    observed_at: float
    clock_s: float = 0.0
    """The memory's clock minus the monotonic clock of this process."""
    models: dict[str, str] = field(default_factory=dict)
    """Model -> digest of the settings of its replicas: knowledge of other weights or other limits is not taken over."""
    ingresses: Meter = field(default_factory=Meter)
    replicas: dict[str, Meter] = field(default_factory=dict)
    targets: dict[str, int] = field(default_factory=dict)
    decided: dict[str, Decision] = field(default_factory=dict)
    present: dict[str, set[str]] = field(default_factory=dict)
    """Deployment -> its members at the last look."""
    ordered_shares: dict[str, OrderedShare] = field(default_factory=dict)
    """Model with pools -> the share of its replicas that computes prompts, so that a new controller changes no role."""
    warned: set[str] = field(default_factory=set)
    """Models for which a warning was logged that their ITL limit cannot be kept."""
    new: set[str] = field(default_factory=set)
    """Models that have never been observed: they get `replicas.initial`. Serve itself does not get this number, because it would make it
    the target at each upgrade."""
    left_at: dict[str, float] = field(default_factory=dict)
    """Deployment -> when its last leaving member left: such a member drains, and reports no more."""

    def leave_to_others(self, targets: Mapping[str, int]) -> None:
        """Forget decisions that an operator has changed since, as `serve-app models unload` does: the next tick would undo the change."""
        self.targets = {name: target for name, target in self.targets.items() if targets.get(name, target) == target}

    def note_departures(self, contexts: Mapping[str, Any], at: float) -> None:
        """Remember when a deployment last lost a member."""
        for name, context in contexts.items():
            present = set(members(context))
            if self.present.get(name, set()) - present:
                self.left_at[name] = at
            self.present[name] = present

    def left_within(self, deployment: str, span_s: float, at: float) -> bool:
        """Return whether a member of the deployment has gone in the last ``span_s`` seconds."""
        return at - self.left_at.get(deployment, -math.inf) < span_s


def members(context: Any) -> list[str]:
    """Return the ids of the deployment's running replicas."""
    return [id_of(replica) for replica in context.running_replicas]


def id_of(replica: Any) -> str:
    """Return the id of a replica of Serve, which may be given as text."""
    return str(getattr(replica, "unique_id", replica))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    version: str
    time: float
    """Seconds since the epoch, at ``memory.observed_at``."""
    memory: Memory


_KEPT, _HEAD = TypeAdapter(_Kept), TypeAdapter(dict[str, Any])


@cache
def version() -> str:
    """Return a hash of all fields of a memory: this code does not read memories that code with other fields has kept."""
    return hashlib.sha256(json.dumps(_KEPT.json_schema(), sort_keys=True).encode()).hexdigest()[:16]


def pack(memory: Memory, *, time: float) -> bytes | None:
    """Return the memory as JSON; None if it is larger than `MAX_BYTES`, which is logged.

    Args:
        memory: The memory after an observation.
        time: Seconds since the epoch of that observation.
    """
    data = _KEPT.dump_json(_Kept(version=version(), time=time, memory=memory), by_alias=True)
    return data if _is_small(data) else None


def unpack(data: bytes, *, time: float, models: Mapping[str, str], clock_s: float) -> Memory | None:
    """Return the memory of an earlier controller, aged by the time since; None if it cannot be used, which is logged in one line.

    Args:
        data: The result of `pack`. Broken data, of another version, too large, of the future or too old is ignored.
        time: Seconds since the epoch.
        models: Model -> digest, as in `Memory.models`. Knowledge of models with other digests is left out.
        clock_s: Seconds of this process's monotonic clock.
    """
    if not _is_small(data):
        return None
    try:
        found = _HEAD.validate_json(data).get("version")
        if found != version():
            logger.warning("the memory of an earlier controller is ignored: it is of version %.40r, not %r", found, version())
            return None
        kept = _KEPT.validate_json(data)
    except ValidationError as exc:
        logger.warning("the memory of an earlier controller is ignored: it is broken: %.200r", str(exc))
        return None
    age_s = time - kept.time
    if not 0 <= age_s <= MAX_AGE_S:
        logger.warning("the memory of an earlier controller is ignored: it is %.0f s old, %.0f at most", age_s, MAX_AGE_S)
        return None
    return _taken_over(kept.memory, age_s, models, clock_s)


def _taken_over(memory: Memory, age_s: float, models: Mapping[str, str], clock_s: float) -> Memory:
    same = {name for name, digest in models.items() if memory.models.get(name) == digest}
    memory.scaler.pass_unseen(age_s, only=same)
    memory.clock_s = memory.observed_at + age_s - clock_s
    if age_s > HISTORY_S:  # requests that came meanwhile are no present load
        memory.ingresses, memory.replicas = Meter(), {}
        memory.observed_at += age_s
    memory.new = (memory.new | models.keys() - memory.models.keys()) & models.keys()
    memory.ordered_shares = {name: share for name, share in memory.ordered_shares.items() if name in same}
    memory.models, memory.targets, memory.decided = dict(models), {}, {}
    return memory


def _is_small(data: bytes) -> bool:
    if len(data) > MAX_BYTES:
        logger.warning("the autoscaler's memory has %d bytes, %d at most: a new controller will not get it", len(data), MAX_BYTES)
    return len(data) <= MAX_BYTES
