"""`EngineLoad` is the load of one engine core, as its replica reports it to ingresses, to the lease board and to the autoscaler. Pure.

The engine core counts, its supervisor passes the latest load on (`serve_app/replica/server.py`), and an ingress routes by it
(`ReplicaState`). The simulated fleets make loads of their own.
"""

import msgspec


class EngineLoad(msgspec.Struct, array_like=True, frozen=True):
    """The load of one engine core. ``step`` counts its steps since its start, ``running`` and ``waiting`` its requests.

    ``kv_usage`` is the used share of the blocks of its KV cache, 0..1. A msgspec Struct, as it crosses the pipe with each step.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0

    def report(self) -> dict[str, float]:
        """Return the load under the names of a lease and of the autoscaler's statistics."""
        return {"running": self.running, "waiting": self.waiting, "kv_usage": self.kv_usage, "steps": self.step}


NO_LOAD = EngineLoad()
"""The load of an engine core that has not reported yet."""
