"""``python -m loadtest.proof.truth --port 18200 --law law.yaml --log truth.jsonl`` serves until SIGTERM or SIGINT."""

import asyncio
import gc
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from loadtest.errors import ExitCode, UsageError
from loadtest.proof.truth.server import serve
from loadtest.proof.truth.settings import Law, load_law


async def _serve_until_signal(law: Law, *, log: Path, host: str, port: int, seed: int) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(law, log=log, host=host, port=port, seed=seed) as url:
        print(f"listening on {url}", flush=True)
        gc.freeze()  # collections then look only at objects made by requests
        await stop.wait()


def main(
    port: Annotated[int, typer.Option(help="0 takes a free one, which is printed.")],
    law: Annotated[Path, typer.Option(help="The law file; loadtest/proof/truth/settings.py describes its keys.")],
    log: Annotated[Path, typer.Option(help="Gets a JSON line for each request; appended to.")],
    host: str = "127.0.0.1",
    seed: int = 0,
) -> None:
    """Serve known latencies, counts and failures."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(load_law(law), log=log, host=host, port=port, seed=seed))
    except (UsageError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    typer.run(main)
