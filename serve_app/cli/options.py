"""Options that several commands have in common. Imports nothing that `--help` can do without."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
