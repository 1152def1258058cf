"""Options and the exit status that several commands have in common. The module imports nothing that `--help` can do without."""

import re
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
