"""This module reads a run's scenario from the run's manifest."""

from pathlib import Path
from typing import Any

from loadtest.errors import UsageError
from loadtest.plan.request_class import RECORDED
from loadtest.plan.scenario import Scenario, parse_scenario
from loadtest.records import PUT_BACK, Manifest


def recorded_scenario(run: Path, manifest: Manifest) -> Scenario:
    """Return the scenario that ran.

    Raises:
        UsageError: The manifest was changed; the message has the path of the key, its value and the expected value.
    """
    try:
        return parse_scenario(manifest.scenario, context=RECORDED)
    except UsageError as exc:
        key = "scenario" if exc.where == "scenario" else f"scenario.{exc.where}"
        raise UsageError(f"{run / 'manifest.json'}: {key}", f"{exc.problem}; {PUT_BACK}") from exc


def asked_of(scenario: Scenario, manifest: Manifest) -> dict[str, Any]:
    """Return the scenario's keys and values without the seed, for comparison; ``model`` is the model that requests named."""
    asked = scenario.model_dump(mode="json", exclude={"seed"})
    for fault in asked["faults"]:
        fault["below_pid"] = None  # the target's process may have been started again
    return asked | {"model": manifest.model}
