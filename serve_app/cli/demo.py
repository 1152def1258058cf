"""``serve-app demo`` starts a fleet, asks it, breaks a replica under a stream, loads it for half a minute, and prints a summary."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from serve_app.cli.check import file_problems
from serve_app.cli.cluster import local_cluster, members
from serve_app.cli.demo_answers import DemoAnswer, Summary
from serve_app.cli.demo_client import DemoClient
from serve_app.cli.options import INTERRUPTED
from serve_app.cli.settings_file import read_settings, refuse
from serve_app.cli.startable import refuse_hopeless_start, refuse_missing_vllm
from serve_app.cli.up import running
from serve_app.config import ModelSettings, Settings, default_cache_dir, from_here
from serve_app.config.checks import dotted

QUESTION = "What is the capital of France?"
STORY = "Tell me a story about a lighthouse keeper and a lost sailor."
STORY_TOKENS = 150
BREAK_AFTER_TOKENS = 20
LOAD_S = 30.0
NUM_STREAMS = 8
REPLACED_LIMIT_S = 300.0
"""Longest wait for all replicas. At a load of 17 on two cores a killed one was replaced after 99 s."""

console = Console(file=sys.stdout, highlight=False)


def demo(file: Path) -> None:
    """Run `serve-app demo`."""
    settings = read_settings(file)
    refuse(file, file_problems(settings, here=True))
    refuse_missing_vllm()
    for model in settings.models.values():
        _fetch(model)
    refuse_hopeless_start(settings)
    steps = f"Start {from_here(file)}, ask it, kill an engine while it answers, load it for {LOAD_S:.0f} s, stop"
    console.print(f"{steps}: 3 minutes, longer on a busy machine.")
    _heading("0. Starting: Ray, the ingress, the engines")
    try:
        passed = _started_and_shown(settings)
    except KeyboardInterrupt:
        console.print("\nstopped early: the ingress, the engines and Ray; nothing is left running")
        raise typer.Exit(INTERRUPTED) from None
    console.print("stopped; nothing is left running")
    console.print("[bold green]All went well." if passed else "[bold red]Not all went well, see above.")
    raise typer.Exit(0 if passed else 1)


def _started_and_shown(settings: Settings) -> bool:
    """Start the fleet, show it, and stop it, also when it is interrupted. Return whether all went well."""
    # Ray prints messages about the engine's death to standard output, in the middle of the answer.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        local_cluster(settings) as address,
        _sigterm_as_ctrl_c(),  # after Ray's start, which sets a handler that prints its stack and aborts
        running(settings, address, threading.Event(), threading.Event()),
    ):
        try:
            return _show(settings)
        finally:
            _heading("4. Stopping")


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does. A second SIGTERM, which `timeout make demo` sends at once, ends the demo without the drain."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fetch(model: ModelSettings) -> None:
    from serve_app.checkpoints import fetch_embedded

    name = model.model.removeprefix("embedded:")
    if name != model.model:
        fetch_embedded(name, default_cache_dir())


def _show(settings: Settings) -> bool:
    client = DemoClient(settings)
    client.wait_for_replicas(REPLACED_LIMIT_S)
    console.print(f"{client.num_replicas} replicas of {client.model} behind {settings.ingress.local_url}")
    asked = _ask(client)
    broken = _break_a_replica(settings, client)
    loaded = _load(client)
    return asked and broken and loaded


def _ask(client: DemoClient) -> bool:
    _heading("1. A question")
    _print_question(QUESTION)
    return _stream(client, QUESTION, max_tokens=40)


def _break_a_replica(settings: Settings, client: DemoClient) -> bool:
    _heading("2. A replica dies under a stream")
    if client.num_replicas < 2:
        console.print(f"skipped: it takes two replicas; set {dotted(('models', client.model, 'replicas', 'min'))} to 2")
        return True
    console.print("First undisturbed, to compare with:")
    _print_question(STORY)
    undisturbed = client.chat(STORY, max_tokens=STORY_TOKENS, on_text=_print_dimmed)
    console.print("\n\nThe same again, and one of the engines is killed:")
    _print_question(STORY)
    engines = {m["replica_id"]: m["load"].get("engine_pid") for m in members(settings.name) if m["role"] == "replica"}
    victim = _Victim(client, engines)
    answer = client.chat(STORY, max_tokens=STORY_TOKENS, on_text=victim.on_text)
    console.print()
    survived = _judge(undisturbed, answer, victim)
    if victim.killed_at is not None:
        console.print("Ray Serve starts another engine, which takes a minute, or two on a busy machine.")
        client.wait_for_replicas(REPLACED_LIMIT_S)
        console.print(f"Ray Serve had another replica ready {time.monotonic() - victim.killed_at:.0f} s after the kill.")
    return survived


def _judge(undisturbed: DemoAnswer, answer: DemoAnswer, victim: "_Victim") -> bool:
    """Print how the broken stream compares with the undisturbed one, and return whether it is as good."""
    for problem in filter(None, (undisturbed.problem, answer.problem)):
        _print_problem(problem)
    same = answer.text == undisturbed.text
    if victim.pause_s is None:
        _print_problem("no engine was killed during the stream")
    elif same:
        console.print(
            f"[green]The stream continued at the other replica after {victim.pause_s:.1f} s, word for word as undisturbed."
        )
    else:
        _print_problem(f"not the undisturbed answer, which is: {undisturbed.text}")
    return same and victim.pause_s is not None and not undisturbed.problem and not answer.problem


class _Victim:
    """Prints a stream, and once kills the engine that computes it."""

    def __init__(self, client: DemoClient, engines: dict[str, int]) -> None:
        self.killed_at: float | None = None
        self.pause_s: float | None = None
        """Seconds from the kill to the next piece of text."""
        self._client = client
        self._engines = engines
        self._num_pieces = 0

    def on_text(self, text: str) -> None:
        if self.killed_at is not None and self.pause_s is None:
            self.pause_s = time.monotonic() - self.killed_at
        _print_text(text)
        self._num_pieces += 1
        if self._num_pieces == BREAK_AFTER_TOKENS:
            self._kill()

    def _kill(self) -> None:
        for replica_id in self._client.holders():
            if pid := self._engines.get(replica_id):
                os.kill(pid, signal.SIGKILL)
                self.killed_at = time.monotonic()
                console.print(f"[bold red]{escape(f'[killed the engine of replica {replica_id}, process {pid}]')}", end="")
                return


def _load(client: DemoClient) -> bool:
    _heading(f"3. Load: {NUM_STREAMS} streams for {LOAD_S:.0f} s")
    with console.status("loading"):
        answers, elapsed_s = client.load(STORY, num_streams=NUM_STREAMS, seconds=LOAD_S)
    summary = Summary.of(answers, elapsed_s)
    console.print(summary.table())
    for problem in sorted({a.problem for a in answers if a.problem}):
        _print_problem(problem)
    return summary.good


def _stream(client: DemoClient, question: str, *, max_tokens: int) -> bool:
    """Print an answer as it comes, and return whether it is complete."""
    answer = client.chat(question, max_tokens=max_tokens, on_text=_print_text)
    console.print()
    if answer.problem:
        _print_problem(answer.problem)
    return not answer.problem


def _heading(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


def _print_question(text: str) -> None:
    console.print(f"[cyan]> {escape(text)}")


def _print_text(text: str) -> None:
    console.print(escape(text), end="", soft_wrap=True)


def _print_dimmed(text: str) -> None:
    console.print(f"[dim]{escape(text)}", end="", soft_wrap=True)


def _print_problem(text: str) -> None:
    console.print(f"[red]error: {escape(text)}", soft_wrap=True)
