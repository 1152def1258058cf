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
    """Virtual seconds, which are GPU-seconds / weight, that it was charged since the last report that was answered."""
    weight: float = 1.0


LaneWaits = Mapping[Priority, tuple[float, Mapping[str, Use]]]
"""Priority -> the virtual time, and each tenant's use."""
Waits = Mapping[str, LaneWaits]
"""What ingresses exchange, by model."""
NO_WAITS: Waits = {}
_Key = tuple[str, Priority, str]


@dataclass(slots=True)
class _Latest:
    """The latest report of one ingress, and the charges that are due to it. Charges are virtual seconds that other ingresses charged."""

    at: float
    number: int
    waits: Waits
    sent: dict[_Key, float]
    """Charges in the answer to the report."""
    unsent: dict[_Key, float] = field(default_factory=dict)
    """Charges since then."""


class OrderBoard:
    """Passes on what ingresses report. An ingress that has not reported for ``silence_s`` is forgotten.

    A report or an answer may be lost: each charge still counts once. Charges of the last seconds may be lost or count twice if the board
    starts again, or if an ingress returns after it was forgotten.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._latest: dict[str, _Latest] = {}

    def exchange(self, ingress: str, waits: Waits, now: float, *, number: int, last_answered: int) -> Waits:
        """Take in a report; return the others' greatest virtual time, what waits there, and what they have charged meanwhile.

        What waited at an ingress that is forgotten is given back to its tenants.

        Args:
            number: The report's number, greater than that of the ingress's report before it.
            last_answered: The number of the latest report whose answer the ingress has received. ``waits`` has the charges since that one.
        """
        for name in [name for name, latest in self._latest.items() if now - latest.at > self._silence_s]:
            lost = _uses(self._latest.pop(name).waits)
            self._charge({key: -use.waiting_s / use.weight for key, use in lost.items()})
        charged, due = {key: use.charged_s for key, use in _uses(waits).items()}, dict[_Key, float]()
        if (before := self._latest.pop(ingress, None)) is not None:
            due = before.unsent
            if last_answered < before.number:
                _add(charged, {key: -use.charged_s for key, use in _uses(before.waits).items()})
                _add(due, before.sent)
        self._charge(charged)
        self._latest[ingress] = _Latest(now, number, waits, due)
        return {model: self._elsewhere(ingress, model, due) for model in waits}

    def _charge(self, charges: Mapping[_Key, float]) -> None:
        for latest in self._latest.values():
            _add(latest.unsent, charges)

    def _elsewhere(self, ingress: str, model: str, charged: Mapping[_Key, float]) -> LaneWaits:
        found: dict[Priority, tuple[float, dict[str, Use]]] = {}
        for (of_model, priority, tenant), seconds in charged.items():
            if of_model == model:
                found.setdefault(priority, (0.0, {}))[1][tenant] = Use(0.0, seconds)
        for name, latest in self._latest.items():
            for priority, (virtual_s, tenants) in latest.waits.get(model, {}).items() if name != ingress else ():
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
