"""A scenario file with what the command line says over it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from loadtest.errors import UsageError
from loadtest.inputs import parse_yaml, read_yaml
from loadtest.plan.scenario import Scenario, load_scenario, scenario_file


def scenario_of(file: Path, sets: Sequence[str] | None, **options: Any) -> Scenario:
    """Load the scenario with what the command line says over it.

    Raises:
        UsageError: The message names the file, key or option.
    """
    values = read_yaml(scenario_file(file)) if sets else {}
    return load_scenario(file, overrides=overrides(values if isinstance(values, dict) else {}, sets or (), **options))


def overrides(values: dict[str, Any], sets: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the top-level keys to replace in ``values``: ``a.b=c`` changes a copy of what ``a`` is there.

    Raises:
        UsageError: A word is not like key=value, or its key leads nowhere.
    """
    found: dict[str, Any] = {}
    for word in sets:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError("--set", f"{word!r} is not like duration_s=60 or arrival.rate=8")
        top, *below = key.split(".")
        try:
            value = parse_yaml(text, f"--set: {word!r}")
            if not below:
                found[top] = value
                continue
            # Through YAML: a copy, so that the scenario that was read stays as it is.
            place = found[top] = yaml.safe_load(yaml.safe_dump(found.get(top, values.get(top, {}))))
            for name in below[:-1]:
                place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
            place[int(below[-1]) if isinstance(place, list) else below[-1]] = value
        except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise UsageError("--set", f"{word!r}: {exc}") from exc
    return found | {key: value for key, value in options.items() if value is not None}
