"""This module reads the configuration file of a command, and reports all its mistakes at once."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from serve_app.config import Settings, mapping_in, parse_settings, problems, read_text
from serve_app.errors import ConfigError


def read_settings(file: Path) -> Settings:
    """Return the settings of ``file``. If anything in it is wrong, print each mistake on a line and end the command.

    Raises:
        ConfigError: The file cannot be read, or is not YAML.
    """
    return settings_in(file, read_text(file))


def settings_in(file: Path, text: str) -> Settings:
    """Return the settings in the ``text`` of ``file``, as `read_settings` does.

    Raises:
        ConfigError: It is not YAML, or has values of the Helm chart.
    """
    try:
        values = mapping_in(text, file)
    except ConfigError as exc:
        raise in_file(file, exc) from exc
    if hold_chart_values(values):
        way_out = f"give what is below config; check and fit take what they render: helm template demo helm/serve-app -f {file}"
        raise ConfigError(str(file), CHART_VALUES, way_out)
    refuse(file, problems(values))
    return parse_settings(values)


CHART_VALUES = "holds values of the Helm chart"


def hold_chart_values(values: Mapping[str, Any]) -> bool:
    """Return whether these are values of the Helm chart, which has a configuration below `config`."""
    return isinstance(values.get("config"), dict) and "models" not in values


def refuse(file: Path, wrong: Iterable[ConfigError]) -> None:
    """If there are problems, print each on a line with the file's name, and end the command."""
    lines = [f"error: {file}: {problem}" if problem.path else f"error: {problem}" for problem in wrong]
    for line in lines:
        typer.secho(line, fg="red", err=True)
    if lines:
        raise typer.Exit(1)


def in_file(file: Path, error: ConfigError) -> ConfigError:
    """Return the error with the file's name before the key; an error without a key names the file already."""
    return dataclasses.replace(error, path=f"{file}: {error.path}" if error.path else "")
