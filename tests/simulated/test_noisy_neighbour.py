"""These tests let tenants compete for real engine cores with our scheduler, in virtual time."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulated.virtual_fleet import Load, VirtualFleet

CAPACITY = 26.0
"""Requests a second that two engines of 16 places answer."""
VICTIMS = [Load(f"victim-{number}", rate=0.5 * CAPACITY / 6) for number in range(5)]


@pytest.fixture(scope="module")
def make_cores(make_traffic: Callable[..., Any]) -> Iterator[Callable[[int], list[Any]]]:
    """Return a function that makes two engine cores with so many places, or gives those that it has made."""
    made: dict[int, list[Any]] = {}

    def make(places: int) -> list[Any]:
        if places not in made:
            arguments = {"simulated": {"profile": "a10g-llama-8b"}, "max_model_len": 2048, "enable_prefix_caching": True}
            made[places] = [make_traffic(max_num_seqs=places, **arguments).core for _ in range(2)]
        return made[places]

    yield make
    for cores in made.values():
        for core in cores:
            core.shutdown()


def p99_of_victims(fleet: VirtualFleet) -> float:
    waits_s = [wait_s for victim in VICTIMS for wait_s in fleet.waits_s[victim.tenant]]
    return statistics.quantiles(waits_s, n=100)[-1]


@pytest.mark.parametrize(
    ("noisy", "ingresses", "longer"),
    [({}, 1, 1.3), ({}, 2, 1.5), ({"answer": (150, 250)}, 1, 3.0), ({"own": (700, 1200)}, 1, 4.0)],
    ids=["as the others", "as the others, two ingresses", "long answers", "long prompts"],
)
def test_tenants_within_their_share_wait_little_longer_beside_one_that_sends_ten_times_its_share(
    noisy: dict[str, Any],
    ingresses: int,
    longer: float,
    make_cores: Callable[[int], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s = []
    for loads in (VICTIMS, [*VICTIMS, Load("noisy", rate=10 * CAPACITY / 6, **noisy)]):
        fleet = VirtualFleet(make_cores(16), monkeypatch, seed=1, ingresses=ingresses)
        fleet.run(loads, 45)
        waits_s.append(p99_of_victims(fleet))
    alone_s, beside_s = waits_s
    assert beside_s < longer * alone_s


@pytest.mark.parametrize(
    "loads",
    [
        [Load("one", depth=20), Load("three", depth=20, weight=3)],
        [Load("one", depth=12), Load("other", depth=12), Load("two", depth=10, weight=2)],
    ],
    ids=lambda loads: " ".join(load.tenant for load in loads),
)
def test_small_and_slow_engines_are_shared_by_weight(
    loads: list[Load], make_cores: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = VirtualFleet(make_cores(4), monkeypatch, seed=1, slowness=3.0)
    fleet.run(loads, 120)
    total, weights = fleet.tokens.total(), sum(load.weight for load in loads)
    assert [fleet.tokens[load.tenant] / total for load in loads] == pytest.approx(
        [load.weight / weights for load in loads], rel=0.1
    )
