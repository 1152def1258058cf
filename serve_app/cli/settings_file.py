"""This module reads the configuration file of a command, and reports all its mistakes at once."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import typer

from serve_app.config import Settings, mapping_in, parse_settings, problems, read_text
from serve_app.errors import ConfigError


def read_settings(file: Path) -> Settings:
    """Return the settings of ``file``. If anything in it is wrong, print each mistake on a line and end the command.

    Raises:
        ConfigError: The file cannot be read, or is not YAML.
    """
    try:
        values = mapping_in(read_text(file), file)
    except ConfigError as exc:
        raise in_file(file, exc) from exc
    refuse(file, problems(values))
    return parse_settings(values)


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
