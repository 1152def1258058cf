"""`Forecast` says how long requests of one priority will wait, from the order in which work waits and the rate at which it begins. Pure.

Requests begin in the order of their tags (`fair_order.py`), together so many GPU-seconds in a second. So a request waits for the work with
lower tags, over this rate. That is what waits now, each tenant's spread over the tags of its requests, and what comes meanwhile: a tenant
that asks for less than its share goes before the backlog of others whenever it comes, and begins as much per second as it did lately. One
that asks for more gets its weight in GPU-seconds per virtual second.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

_LEAST_LEFT = 0.05
"""Part of the rate that is left at least for those that wait: what others began lately is a mean, and may be more than the rate of now."""
_LEAST_S = 1e-6
"""Requests whose tags are nearer to each other have these virtual seconds for their work."""


class Demand(NamedTuple):
    """What one tenant asks for. Its ``waiting_s`` GPU-seconds have tags from ``begins_s`` to ``ends_s``; ``per_s`` of work began lately."""

    begins_s: float
    ends_s: float
    waiting_s: float
    weight: float
    per_s: float


class _Change(NamedTuple):
    """A tag from which on each virtual second has so much more work, or less."""

    tag_s: float
    number: int
    density: float
    ends: Demand | None = None
    """The tenant whose requests that wait now end there."""
    light_per_s: float = 0.0
    """The rate of a tenant that has no backlog from there on."""


class Forecast:
    """The time from now at which each tag begins. Costs O(n log n) for n tenants, and a wait O(log n).

    Args:
        demands: Those of the tenants that have begun something lately or have something that waits.
        work_per_s: GPU-seconds of requests that begin in a second, > 0.
    """

    def __init__(self, demands: Sequence[Demand], work_per_s: float) -> None:
        self.num_demands = len(demands)
        self._tags_s: list[float] = [-math.inf]
        self._times_s: list[float] = [0.0]
        self._work_per_s, self._light_per_s, self._density = work_per_s, 0.0, 0.0
        changes = list[_Change]()
        for demand in demands:
            if demand.waiting_s <= 0.0:
                self._light_per_s += demand.per_s
                continue
            ends_s = max(demand.ends_s, demand.begins_s + _LEAST_S)
            density = demand.waiting_s / (ends_s - demand.begins_s)
            changes.append(_Change(demand.begins_s, len(changes), density))
            changes.append(_Change(ends_s, len(changes), -density, ends=demand))
        heapify(changes)
        number = len(changes)
        while changes:
            tag_s, _, density, ends, light_per_s = heappop(changes)
            self._times_s.append(self._time_s(tag_s, self._density))
            self._tags_s.append(tag_s)
            self._density += density
            self._light_per_s += light_per_s
            if ends is None:
                continue
            # What has come meanwhile has the next tags. Once the tenant has begun that, it has no backlog.
            came_s = ends.per_s * self._times_s[-1]
            own = min(ends.weight, -density)  # less than its weight if some of that goes to other ingresses
            left = own - ends.per_s * self._pace(self._density + own)
            self._density += own
            if left > 0.0:
                heappush(changes, _Change(tag_s + came_s / left, number, -own, light_per_s=ends.per_s))
                number += 1

    def wait_s(self, tag_s: float, weight: float) -> float:
        """Return when a tenant's request with this tag begins. ``weight`` is the tenant's: all of its work up to the tag begins before."""
        return self._time_s(tag_s, max(self._density, weight)) if tag_s >= self._tags_s[-1] else self._between_s(tag_s)

    def _time_s(self, tag_s: float, density: float) -> float:
        """Return the time of a tag after the last one so far."""
        since_s = tag_s - self._tags_s[-1]
        return self._times_s[-1] + (since_s * self._pace(density) if density > 0.0 and math.isfinite(since_s) else 0.0)

    def _between_s(self, tag_s: float) -> float:
        after = bisect_right(self._tags_s, tag_s)
        (tag_a, tag_b), (time_a, time_b) = self._tags_s[after - 1 : after + 1], self._times_s[after - 1 : after + 1]
        return time_a + (time_b - time_a) * (tag_s - tag_a) / (tag_b - tag_a) if math.isfinite(tag_a) else 0.0

    def _pace(self, density: float) -> float:
        """Return the seconds that a virtual second takes, where so many GPU-seconds have their tags in it."""
        return density / max(self._work_per_s - self._light_per_s, _LEAST_LEFT * self._work_per_s)
