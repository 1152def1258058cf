"""The limit of a step follows from the settings and the model's device."""

import pytest

from serve_app.config import HealthSettings


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_cuda"),
    [
        ({}, 600.0, 60.0),
        ({"max_step_s": 90.0}, 90.0, 90.0),
        ({"eject_after_s": 300.0}, 600.0, 300.0),  # the default is never below what ejects a quiet engine
    ],
)
def test_a_step_may_last_longer_where_prompts_are_computed_on_a_cpu(
    given: dict[str, float], on_cpu: float, on_cuda: float
) -> None:
    health = HealthSettings(**given)
    assert (health.max_step_on("cpu"), health.max_step_on("cuda")) == (on_cpu, on_cuda)
