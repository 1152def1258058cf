"""These are the options that several commands have in common. The module imports nothing that `--help` can do without."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
