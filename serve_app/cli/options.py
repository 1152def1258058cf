"""This module has options, command classes and an exit status that several commands share, and imports nothing that `--help` can spare."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
import typer.core

INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell reports it."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class WithSlashes(typer.core.TyperCommand):
    """A command that also takes options named per second with a slash: click would read `--requests/s` as two names of one flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--NAME/s` as `--NAME-per-s`."""
        return list(super().parse_args(ctx, [re.sub(r"^(--[a-z]+)/s(?==|$)", r"\1-per-s", arg) for arg in args]))


class NamesFile(typer.core.TyperCommand):
    """A command whose configuration file comes after `-f`. `serve-app check FILE` takes it without."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a file without `-f` by the line to write: click would say that `--file` is missing."""
        if args and re.search(r"\.ya?ml$", args[0]):
            ctx.fail(f"write -f before the file: {ctx.command_path} -f {args[0]}")
        return list(super().parse_args(ctx, args))


class TakesFile(typer.core.TyperCommand):
    """A command whose configuration file is its argument. `serve-app up -f FILE` takes it after `-f`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a file after `-f` by the line to write: click would say that there is no such option."""
        if len(args) > 1 and args[0] in ("-f", "--file"):
            ctx.fail(f"write the file without {args[0]}: {ctx.command_path} {args[1]}")
        return list(super().parse_args(ctx, args))


_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("start", "run", "serve", "deploy"), "up"),
    **dict.fromkeys(("stop", "shutdown", "delete"), "down"),
    **dict.fromkeys(("ps", "list", "get"), "status"),
    **dict.fromkeys(("validate", "lint"), "check"),
    "version": "--version",
}
"""Names of commands in other systems -> ours."""


class WithOtherNames(typer.core.TyperGroup):
    """The commands. A name that other systems have for one is refused with ours, and not with the nearest in letters: `top` for `stop`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Refuse names of other systems; all else is typer's."""
        if meant := _OTHER_NAMES.get(args[0]):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{meant}'?")
        return super().resolve_command(ctx, args)
