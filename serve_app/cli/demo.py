"""``serve-app demo``: start a fleet, ask it, break a replica under a stream, load it for half a minute, and sum up."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from serve_app.cli.cluster import local_cluster, members
from serve_app.cli.demo_client import Answer, Client, load_table
from serve_app.cli.startable import refuse_hopeless_start
from serve_app.cli.up import running
from serve_app.config import ModelSettings, Settings, default_cache_dir, load_settings

QUESTION = "What is the capital of France?"
STORY = "Tell me a story about a lighthouse keeper and a lost sailor."
STORY_TOKENS = 150
BREAK_AFTER_TOKENS = 20
LOAD_S = 30.0
NUM_STREAMS = 8
REPLACED_LIMIT_S = 180.0

console = Console(highlight=False)


def demo(
    file: Annotated[Path, typer.Option("--file", "-f", help="The configuration file.")] = Path("examples/cpu.yaml"),
) -> None:
    """Show a fleet at work: an answer, a replica that dies under a stream, a short load. Exit status 0 if all went well."""
    settings = load_settings(file)
    for model in settings.models:
        _fetch(model)
    refuse_hopeless_start(settings)
    with local_cluster(settings) as address, running(settings, address, threading.Event()):
        passed = asyncio.run(_show(settings))
    console.print("stopped; nothing is left running")
    raise typer.Exit(0 if passed else 1)


def _fetch(model: ModelSettings) -> None:
    from serve_app.checkpoints import fetch_embedded

    name = model.model.removeprefix("embedded:")
    if name != model.model:
        fetch_embedded(name, default_cache_dir())


async def _show(settings: Settings) -> bool:
    async with Client(settings) as client:
        await client.wait_for_replicas(REPLACED_LIMIT_S)
        asked = await _ask(client)
        broken = await _break_a_replica(settings, client)
        loaded = await _load(client)
    return asked and broken and loaded


async def _ask(client: Client) -> bool:
    console.rule("[bold]1. A question", align="left")
    console.print(f"[cyan]> {QUESTION}")
    answer = await client.chat(QUESTION, max_tokens=40)
    _print_outcome(answer)
    console.print(f"[cyan]> {QUESTION}[/] (streamed)")
    streamed = await client.chat(QUESTION, max_tokens=40, on_text=_print_text)
    console.print()
    _print_error(streamed)
    return not answer.error and not streamed.error


async def _break_a_replica(settings: Settings, client: Client) -> bool:
    console.rule("[bold]2. A replica dies under a stream", align="left")
    if client.num_replicas < 2:
        console.print("skipped: it takes two replicas; set models[0].replicas.min to 2")
        return True
    console.print(f"[cyan]> {STORY}[/] (first undisturbed, unseen; now again)")
    undisturbed = await client.chat(STORY, max_tokens=STORY_TOKENS)
    engines = {m["replica_id"]: m["load"].get("engine_pid") for m in members(settings.name) if m["role"] == "replica"}
    victim = _Victim(client, engines)
    answer = await client.chat(STORY, max_tokens=STORY_TOKENS, on_text=victim.on_text)
    console.print()
    _print_error(answer)
    same = answer.text == undisturbed.text
    console.print("[green]identical to the undisturbed answer" if same else "[red]not the undisturbed answer")
    started = time.monotonic()
    with console.status("Ray Serve replaces the replica"):
        await client.wait_for_replicas(REPLACED_LIMIT_S)
    console.print(f"the replica is replaced after {time.monotonic() - started:.0f} s")
    return same and victim.killed and not answer.error


class _Victim:
    """Prints a stream and kills the engine that computes it, once."""

    def __init__(self, client: Client, engines: dict[str, int]) -> None:
        self.killed = False
        self._client = client
        self._engines = engines
        self._num_pieces = 0

    async def on_text(self, text: str) -> None:
        await _print_text(text)
        self._num_pieces += 1
        if self._num_pieces < BREAK_AFTER_TOKENS or self.killed:
            return
        for replica_id in await self._client.holders():
            if pid := self._engines.get(replica_id):
                os.kill(pid, signal.SIGKILL)
                self.killed = True
                console.print(f"[bold red] [killed the engine of replica {replica_id}, process {pid}] ", end="", markup=True)
                return


async def _load(client: Client) -> bool:
    console.rule(f"[bold]3. {NUM_STREAMS} streams for {LOAD_S:.0f} s", align="left")
    with console.status("loading"):
        answers, elapsed_s = await client.load(QUESTION, num_streams=NUM_STREAMS, seconds=LOAD_S)
    console.print(load_table(answers, elapsed_s))
    return bool(answers) and not any(a.error for a in answers)


async def _print_text(text: str) -> None:
    console.print(escape(text), end="", soft_wrap=True)


def _print_outcome(answer: Answer) -> None:
    console.print(escape(answer.text), soft_wrap=True)
    _print_error(answer)


def _print_error(answer: Answer) -> None:
    if answer.error:
        console.print(f"[red]error: {escape(answer.error)}")
