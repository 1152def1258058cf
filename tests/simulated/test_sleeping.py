from dataclasses import replace

import pytest

from serve_app.simulated.profiles import PROFILES
from serve_app.simulated.sleeping import SleepTimes, copy_s, held_bytes

A10G = PROFILES["a10g-llama-8b"]


def test_weights_cross_the_bus_of_each_accelerator() -> None:
    """8,030,261,248 parameters of 2 bytes at 0.8 x 31.5e9 bytes a second: 0.6373 s."""
    assert copy_s(A10G) == pytest.approx(0.6373, abs=1e-4)
    assert copy_s(replace(A10G, num_accelerators=2)) == pytest.approx(0.6373 / 2, abs=1e-4)
    assert copy_s(PROFILES["h100-llama-8b"]) == pytest.approx(0.6373 / 2, abs=1e-4)


def test_host_memory_is_taken_at_level_1_alone() -> None:
    assert (held_bytes(A10G, 1), held_bytes(A10G, 2)) == (2 * 8_030_261_248, 0)


def test_level_1_copies_both_ways_and_level_2_loads_again() -> None:
    times = SleepTimes(A10G, load_s=40.0)
    both = times.of("sleep", {"level": 1}), times.of("wake_up", {"tags": None})
    assert both == (copy_s(A10G), copy_s(A10G))
    calls: list[tuple[str, dict[str, object]]] = [
        ("sleep", {"level": 2}),
        ("wake_up", {"tags": ["weights"]}),
        ("reload_weights", {}),
        ("wake_up", {"tags": ["kv_cache"]}),
    ]
    assert [times.of(name, arguments) for name, arguments in calls] == [0.0, 0.0, 40.0, 0.0]
