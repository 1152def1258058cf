"""The lease board's part of `fair_order.py`: ingresses exchange what they charge tenants, and how much waits for each. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from serve_app.core.tenants import Priority


class Use(NamedTuple):
    """Expected GPU-seconds of what waits for a tenant, and the GPU-seconds that it was charged since its ingress's last report."""

    waiting_s: float
    charged_s: float


LaneWaits = Mapping[Priority, tuple[float, Mapping[str, Use]]]
"""Priority -> the virtual time, and each tenant's use."""
Waits = Mapping[str, LaneWaits]
"""What ingresses exchange, by model."""
NO_WAITS: Waits = {}
_Key = tuple[str, Priority, str]


class OrderBoard:
    """Passes on what ingresses report. One that was silent for ``silence_s`` is left out."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, tuple[float, Waits]] = {}
        self._charges: dict[str, dict[_Key, float]] = {}
        """Ingress -> the GPU-seconds that others have charged since its own last report."""

    def exchange(self, ingress: str, waits: Waits, now: float) -> Waits:
        """Take in a report; return the others' greatest virtual time, what waits there, and what they have charged meanwhile.

        What waited at an ingress that has gone silent is given back to its tenants.
        """
        for name in [name for name, (heard_at, _) in self._heard.items() if now - heard_at > self._silence_s]:
            lost = self._heard.pop(name)[1]
            del self._charges[name]
            self._add({key: -use.waiting_s for key, use in _uses(lost).items()})
        self._heard[ingress] = now, waits
        charged = self._charges.pop(ingress, {})
        self._add({key: use.charged_s for key, use in _uses(waits).items()})
        self._charges[ingress] = {}
        return {model: self._elsewhere(ingress, model, charged) for model in waits}

    def _add(self, charges: Mapping[_Key, float]) -> None:
        for sums in self._charges.values():
            for key, seconds in charges.items():
                sums[key] = sums.get(key, 0.0) + seconds

    def _elsewhere(self, ingress: str, model: str, charged: Mapping[_Key, float]) -> LaneWaits:
        found: dict[Priority, tuple[float, dict[str, Use]]] = {}
        for (of_model, priority, tenant), seconds in charged.items():
            if of_model == model:
                found.setdefault(priority, (0.0, {}))[1][tenant] = Use(0.0, seconds)
        for name, (_, waits) in self._heard.items():
            for priority, (virtual_s, tenants) in waits.get(model, {}).items() if name != ingress else ():
                latest_s, uses = found.get(priority, (0.0, {}))
                for tenant, (waiting_s, _) in tenants.items():
                    before = uses.get(tenant, Use(0.0, 0.0))
                    uses[tenant] = before._replace(waiting_s=before.waiting_s + waiting_s)
                found[priority] = max(latest_s, virtual_s), uses
        return found


def _uses(waits: Waits) -> dict[_Key, Use]:
    return {
        (model, priority, tenant): use
        for model, lanes in waits.items()
        for priority, (_, tenants) in lanes.items()
        for tenant, use in tenants.items()
    }
