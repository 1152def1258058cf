"""This module reads a scenario file and applies the values that the command line overrides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from loadtest.errors import UsageError
from loadtest.inputs import parse_yaml, read_yaml
from loadtest.plan.scenario import Scenario, load_scenario, scenario_file
from loadtest.wording import shown


def scenario_of(file: Path, sets: Sequence[str] | None, **options: Any) -> Scenario:
    """Load the scenario with the values of the command line in place of its own.

    Raises:
        UsageError: The message names the file, key or option.
    """
    values = read_yaml(scenario_file(file)) if sets else {}
    return load_scenario(file, overrides=overrides(values if isinstance(values, dict) else {}, sets or (), **options))


def overrides(values: dict[str, Any], sets: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the top-level keys to replace in ``values``; ``a.b=c`` changes a copy of the value of ``a``.

    Raises:
        UsageError: A word is not like key=value, or its key is not in ``values``.
    """
    found: dict[str, Any] = {}
    for word in sets:
        key, equals, text = word.partition("=")
        said = repr(shown(word))
        if not equals:
            raise UsageError("--set", f"{said} is not like duration_s=60 or arrival.rate=8")
        top, *below = key.split(".")
        if not all((top, *below)):
            raise UsageError("--set", f"{said} has no key, or an empty part in it; write it like duration_s=60 or arrival.rate=8")
        value = parse_yaml(text, f"--set: {said}")
        if not below:
            found[top] = value
            continue
        try:
            # Copied through YAML, so that the scenario that was read is not changed.
            found[top] = yaml.safe_load(yaml.safe_dump(found.get(top, values.get(top, {}))))
            _put(found[top], top, below, value)
        except (yaml.YAMLError, ValueError, RecursionError) as exc:
            raise UsageError("--set", f"{said}: {exc}") from exc
    return found | {key: value for key, value in options.items() if value is not None}


def _put(place: Any, path: str, below: Sequence[str], value: Any) -> None:
    """Set the value at the path ``below`` inside ``place``, whose own path is ``path``.

    Raises:
        ValueError: The path does not exist.
    """
    name, *rest = below
    index: Any = name
    if isinstance(place, list):
        if name not in map(str, range(len(place))):
            raise ValueError(f"{path} is a list of {len(place)}, counted from 0; {shown(name)!r} is none of its numbers")
        index = int(name)
    elif not isinstance(place, dict):
        raise ValueError(f"{path} is {shown(repr(place))}, which has no keys; set it as a whole, like {path}=VALUE")
    if not rest:
        place[index] = value
        return
    if isinstance(place, dict):
        place.setdefault(name, {})
    _put(place[index], f"{path}.{name}", rest, value)
