"""The lease board's part of `fair_order.py`: ingresses exchange how much waits for each tenant. Pure."""

from collections.abc import Mapping

from serve_app.core.tenants import Priority

Waits = Mapping[str, Mapping[Priority, tuple[float, Mapping[str, float]]]]
"""What ingresses exchange: model -> priority -> the virtual time, and for each tenant the expected GPU-seconds of what waits."""
NO_WAITS: Waits = {}


class OrderBoard:
    """Tells each ingress what the others have reported. An ingress that was silent for ``silence_s`` is left out."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, tuple[float, Waits]] = {}

    def exchange(self, ingress: str, waits: Waits, now: float) -> Waits:
        """Take in a report, and return the greatest virtual times and the sums of waiting GPU-seconds of all other ingresses."""
        self._heard[ingress] = now, waits
        self._heard = {name: each for name, each in self._heard.items() if now - each[0] <= self._silence_s}
        return {model: self._elsewhere(ingress, model) for model in waits}

    def _elsewhere(self, ingress: str, model: str) -> dict[Priority, tuple[float, dict[str, float]]]:
        found: dict[Priority, tuple[float, dict[str, float]]] = {}
        for name, (_, waits) in self._heard.items():
            for priority, (virtual_s, waiting_s) in waits.get(model, {}).items() if name != ingress else ():
                latest_s, sums = found.get(priority, (0.0, {}))
                for tenant, seconds in waiting_s.items():
                    sums[tenant] = sums.get(tenant, 0.0) + seconds
                found[priority] = max(latest_s, virtual_s), sums
        return found
