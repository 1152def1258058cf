"""The scenario of a run, as its manifest holds it."""

from pathlib import Path
from typing import Any

from loadtest.errors import UsageError
from loadtest.plan.scenario import RECORDED, Scenario, parse_scenario
from loadtest.records import PUT_BACK, Manifest


def recorded_scenario(run: Path, manifest: Manifest) -> Scenario:
    """Return what ran.

    Raises:
        UsageError: The manifest was changed; the message has the path of the key, the value and what it should be.
    """
    try:
        return parse_scenario(manifest.scenario, context=RECORDED)
    except UsageError as exc:
        key = "scenario" if exc.where == "scenario" else f"scenario.{exc.where}"
        raise UsageError(f"{run / 'manifest.json'}: {key}", f"{exc.problem}; {PUT_BACK}") from exc


def asked_of(scenario: Scenario, manifest: Manifest) -> dict[str, Any]:
    """Return what was asked, by the scenario's keys, without the seed; ``model`` is the one that requests named."""
    asked = scenario.model_dump(mode="json", exclude={"seed"})
    for fault in asked["faults"]:
        fault["below_pid"] = None  # of the target's process, which may have been started again
    return asked | {"model": manifest.model}
