"""`serve-app` is the command. Its subcommands import what they need inside, so that `--help` and `check` answer at once."""

import errno
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli import autoscale, batch, ledger, model, models, tenants
from serve_app.cli.commands import check, demo, doctor, explain, fit, plan, rollout, top, ui, up
from serve_app.cli.options import NamesFile, TakesFile, WithOtherNames, WithSlashes
from serve_app.cli.status import down, status
from serve_app.environment import as_typed, clean
from serve_app.errors import KeyRefused, ServingError

app = typer.Typer(
    name="serve-app",
    cls=WithOtherNames,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"serve-app {metadata.version('serve-app')}")
        raise typer.Exit


@app.callback(help="Serve LLMs with vLLM on Ray: one OpenAI-compatible API over a fleet of engines.")
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end.")] = False,
) -> None:
    """Declare the options before a command."""


config_app = typer.Typer(help="The configuration file.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(model.app, name="model")
app.add_typer(models.app, name="models")
app.add_typer(autoscale.app, name="autoscale")
app.add_typer(ledger.app, name="ledger")
app.add_typer(batch.app, name="batch")
app.add_typer(tenants.app, name="tenants")
app.command(cls=TakesFile)(check)
app.command(cls=TakesFile)(doctor)
app.command(cls=WithSlashes)(fit)
app.command()(plan)
app.command(cls=NamesFile)(up)
app.command()(down)
app.command()(status)
app.command()(explain)
app.command()(top)
app.command()(rollout)
app.command(cls=NamesFile)(demo)
app.command()(ui)


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors and charts."""
    from serve_app.config import settings_json_schema

    typer.echo(json.dumps(settings_json_schema(), indent=2))


@config_app.command()
def serve(
    file: Annotated[Path, typer.Option("--file", "-f", help="The configuration file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which Ray reads as well.")] = False,
) -> None:
    """Print the Ray Serve config of FILE: for `serve run`, `serve deploy` and RayService's serveConfigV2."""
    import yaml

    from serve_app.application import serve_config
    from serve_app.cli.settings_file import read_settings

    config = serve_config(read_settings(file))
    typer.echo(json.dumps(config, indent=2) + "\n" if as_json else yaml.safe_dump(config, sort_keys=False), nl=False)


def main() -> None:
    """Run the command line. An error of ours is one line on stderr and exit status 1; a wrong command line or API key of a batch is 2."""
    clean(os.environ)
    try:
        try:
            # Completion is of the name alone: a shell uses it for every path that ends in the name.
            installs_completion = any(word.endswith("-completion") for word in sys.argv)
            app(prog_name=None if installs_completion else as_typed(), complete_var="_SERVE_APP_COMPLETE")
        finally:
            sys.stdout.flush()
    except ServingError as exc:
        typer.secho(f"error: {exc}", fg="red", err=True)
        sys.exit(2 if isinstance(exc, KeyRefused) else 1)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer has no room either
        typer.secho(f"error: {exc.filename or 'the output'} cannot be written: {exc.strerror}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
