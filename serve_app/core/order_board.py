"""The lease board's part of `fair_order.py`: ingresses exchange what they charge tenants, and how much waits for each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.tenants import Priority


class Use(NamedTuple):
    """What waits for a tenant, and what it was charged, at one ingress or at several."""

    waiting_s: float
    """Expected GPU-seconds of its requests without a first token."""
    charged_s: float
    """Virtual seconds, which are GPU-seconds / weight, that it was charged since the last report."""
    weight: float = 1.0


LaneWaits = Mapping[Priority, tuple[float, Mapping[str, Use]]]
"""Priority -> the virtual time, and each tenant's use."""
Waits = Mapping[str, LaneWaits]
"""What ingresses exchange, by model."""
NO_WAITS: Waits = {}
_Key = tuple[str, Priority, str]


@dataclass(slots=True)
class _Heard:
    """An ingress's latest report, ``number``, that came ``at`` a time."""

    at: float
    number: int
    waits: Waits
    told: dict[_Key, float]
    """Virtual seconds that others have charged, as the answer to the report says."""
    untold: dict[_Key, float] = field(default_factory=dict)
    """Virtual seconds that others have charged since."""


class OrderBoard:
    """Passes on what ingresses report. One that was silent for ``silence_s`` is left out.

    Reports and answers may be lost: each charge still counts once.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}

    def exchange(self, ingress: str, waits: Waits, now: float, *, number: int = 0, answered: int = 0) -> Waits:
        """Take in a report; return the others' greatest virtual time, what waits there, and what they have charged meanwhile.

        What waited at an ingress that has gone silent is given back to its tenants.

        Args:
            number: The report's number, greater than that of the ingress's report before it.
            answered: The number of the latest report whose answer the ingress has got. ``waits`` has the charges since that report.
        """
        for name in [name for name, heard in self._heard.items() if now - heard.at > self._silence_s]:
            lost = _uses(self._heard.pop(name).waits)
            self._charge({key: -use.waiting_s / use.weight for key, use in lost.items()})
        charged, told = {key: use.charged_s for key, use in _uses(waits).items()}, dict[_Key, float]()
        if (before := self._heard.pop(ingress, None)) is not None:
            told = before.untold
            if answered < before.number:
                _add(charged, {key: -use.charged_s for key, use in _uses(before.waits).items()})
                _add(told, before.told)
        self._charge(charged)
        self._heard[ingress] = _Heard(now, number, waits, told)
        return {model: self._elsewhere(ingress, model, told) for model in waits}

    def _charge(self, charges: Mapping[_Key, float]) -> None:
        for heard in self._heard.values():
            _add(heard.untold, charges)

    def _elsewhere(self, ingress: str, model: str, charged: Mapping[_Key, float]) -> LaneWaits:
        found: dict[Priority, tuple[float, dict[str, Use]]] = {}
        for (of_model, priority, tenant), seconds in charged.items():
            if of_model == model:
                found.setdefault(priority, (0.0, {}))[1][tenant] = Use(0.0, seconds)
        for name, heard in self._heard.items():
            for priority, (virtual_s, tenants) in heard.waits.get(model, {}).items() if name != ingress else ():
                latest_s, uses = found.get(priority, (0.0, {}))
                for tenant, (waiting_s, *_) in tenants.items():
                    before = uses.get(tenant, Use(0.0, 0.0))
                    uses[tenant] = before._replace(waiting_s=before.waiting_s + waiting_s)
                found[priority] = max(latest_s, virtual_s), uses
        return found


def _add(sums: dict[_Key, float], more: Mapping[_Key, float]) -> None:
    for key, seconds in more.items():
        sums[key] = sums.get(key, 0.0) + seconds


def _uses(waits: Waits) -> dict[_Key, Use]:
    return {
        (model, priority, tenant): use
        for model, lanes in waits.items()
        for priority, (_, tenants) in lanes.items()
        for tenant, use in tenants.items()
    }
