"""This module has the parts of `benchmarks.fairness` that send more requests than a fleet can answer.

    reference   0.9 and 1.0 times the capacity
    overload    3 times the capacity for 120 s (short: 30 s)
    burst       half the capacity, and 10 times the capacity for 5 s; a refused client comes again once, when its Retry-After is over
    storm       3 times the capacity; a refused client sends its request again three times, each time at once
    patient     1.0 and 3 times the capacity, tenants that wait for 10 s: Retry-After in whole seconds says little about a queue of 2 s
    behind      a deadline of 1 s behind answers of 7 s that take all places

The tenants of the first four parts want their first token within 2 s. The load of 1.0 gives the p99 to compare with.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.tenant_fleet import PLACES, REPLICAS
from benchmarks.tenant_loads import Load, Phase, Player, Shape

FIRST_TOKEN_S, PATIENT_S, HURRIED_S = 2.0, 10.0, 1.0
OVERLOAD, BURST, BURST_S = 3.0, 10.0, 5.0
_NUM = 4
_IN_TIME = [f"in-time-{number}" for number in range(1, _NUM + 1)]
_PATIENT = [f"patient-{number}" for number in range(1, _NUM + 1)]
TENANTS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"deadlines": {"first_token_s": FIRST_TOKEN_S}} for name in _IN_TIME},
    **{name: {"deadlines": {"first_token_s": PATIENT_S}} for name in _PATIENT},
    "hurried": {"deadlines": {"first_token_s": HURRIED_S}},
    "filler": {"deadlines": {"first_token_s": 120}},
}
FILLER, HURRIED = Shape(own=(16, 16), answer=(200, 200)), Shape(own=(1024, 1024), answer=(8, 8))


def parts(shape: Shape, capacity: float) -> dict[str, Callable[[Player, bool], Iterator[Phase]]]:
    """Return the parts for requests of a shape, of which the fleet answers ``capacity`` a second."""
    share = capacity / _NUM
    own = {"reference": _reference, "overload": _overload, "burst": _burst, "storm": _storm, "patient": _patient}
    return {**{name: partial(part, shape, share) for name, part in own.items()}, "behind": _behind}


def _reference(shape: Shape, share: float, player: Player, short: bool) -> Iterator[Phase]:
    for load in (0.9, 1.0):
        loads = [Load(name, shape, rate=load * share) for name in _IN_TIME]
        yield player.play("reference", f"{load:.1f}", loads, 20 if short else 30, warmup_s=10)


def _overload(shape: Shape, share: float, player: Player, short: bool) -> Iterator[Phase]:
    loads = [Load(name, shape, rate=OVERLOAD * share) for name in _IN_TIME]
    yield player.play("overload", "3x", loads, 30 if short else 120, warmup_s=10)


def _burst(shape: Shape, share: float, player: Player, short: bool) -> Iterator[Phase]:
    loads = [Load(name, shape, rate=share / 2, returns=True) for name in _IN_TIME]
    burst = [Load(name, shape, rate=BURST * share, from_s=10, until_s=10 + BURST_S, returns=True) for name in _IN_TIME]
    yield player.play("burst", "10x", [*loads, *burst], 20 if short else 30, drain_s=10)


def _storm(shape: Shape, share: float, player: Player, short: bool) -> Iterator[Phase]:
    loads = [Load(name, shape, rate=OVERLOAD * share, retries=3) for name in _IN_TIME]
    yield player.play("storm", "three retries", loads, 20 if short else 30, warmup_s=10)


def _patient(shape: Shape, share: float, player: Player, short: bool) -> Iterator[Phase]:
    for name, load in (("1.0", 1.0), ("3x", OVERLOAD)):
        loads = [Load(tenant, shape, rate=load * share) for tenant in _PATIENT]
        yield player.play("patient", name, loads, 20 if short else 40, warmup_s=20, drain_s=20)


def _behind(player: Player, short: bool) -> Iterator[Phase]:
    del short
    fillers = Load("filler", FILLER, depth=2 * REPLICAS * PLACES, until_s=5)
    yield player.play("behind", "deadline", [fillers, Load("hurried", HURRIED, rate=8, from_s=2, until_s=4)], 20, warmup_s=0)
