"""``serve-app ui`` serves the pages; ``serve-app up`` starts the same process beside itself."""

import contextlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import typer
from rich.console import Console

from serve_app.cli.options import INTERRUPTED
from serve_app.cli.startable import refuse_taken_port
from serve_app.config import Settings
from serve_app.config.checks import is_loopback
from serve_app.environment import as_typed
from serve_app.errors import ConfigError, ListenFailed
from serve_app.host.core_files import leave_no_core_file

_END_S = 5.0
_INSTALL = f"{as_typed('pip')} install 'serve-app[ui]'"


def ui(url: str, host: str, port: int, *, ends_with_input: bool, kills: bool = False) -> None:
    """Run `serve-app ui`. If it ``kills``, the fleet page offers to kill an engine.

    Raises:
        ConfigError: The URL is wrong or holds a password, or Gradio is not installed.
        ListenFailed: The port is taken.
    """
    _refuse_unusable(url)
    if not is_installed():
        raise ConfigError("", f"Gradio is not installed for {sys.executable}", _INSTALL)
    console = Console(stderr=True, highlight=False)
    try:
        from serve_app.ui.app import run

        here = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        console.print(f"chat page {here}/, fleet page {here}/fleet", markup=False)
        leave_no_core_file()
        run(url, host, port, ends_with_input=ends_with_input, kills=kills)
    except KeyboardInterrupt:
        console.print(f"\nthe pages ended by Ctrl-C; {url} continues without them", markup=False)
        raise typer.Exit(INTERRUPTED) from None


def _refuse_unusable(url: str) -> None:
    example = "give the address of the service, for example http://127.0.0.1:8010"
    try:
        parsed = urlsplit(url)
        parsed.port  # noqa: B018  # raises if the port is not a number
    except ValueError as exc:
        raise ConfigError("--url", f"is not a URL: {exc}", example) from exc
    if parsed.username is not None or parsed.password is not None:
        raise ConfigError("--url", "holds a user name or a password, which the pages would show to all users", example)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise ConfigError("--url", f"is {url!r}", example)


def is_installed() -> bool:
    """Return whether this Python has Gradio, without importing it: that takes seconds."""
    return importlib.util.find_spec("gradio") is not None


@contextlib.contextmanager
def pages(settings: Settings, console: Console, *, demo: bool = False) -> Iterator[None]:
    """Serve the pages of a running service while the block lasts; print their addresses, or why there are no pages, in one line.

    With ``demo`` the fleet page offers to kill an engine, if only this machine reaches the pages.

    The pages' process ends when its standard input is closed, so that it does not outlive a killed `serve-app up`.
    """
    where = settings.ui
    if demo and where is None:
        console.print("--demo has no effect: this file asks for no pages; add `ui: {}` to it", markup=False)
    if where is None or not _can_start(where.host, where.port, console):
        yield
        return
    kills = demo and is_loopback(where.host)
    if demo and not kills:
        console.print(f"the fleet page does not offer to kill an engine: other machines may reach {where.host}", markup=False)
    command = [sys.executable, "-m", "serve_app.cli.main", "ui", "--url", settings.ingress.local_url, "--ends-with-input"]
    # A session of its own, so that Ctrl-C does not end the pages before the service has finished its streams.
    process = subprocess.Popen(
        [*command, "--host", where.host, f"--port={where.port}", *(["--kills"] if kills else [])],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    ending = threading.Event()
    threading.Thread(target=_report_end, args=(process, ending, console), daemon=True).start()
    try:
        yield
    finally:
        ending.set()
        process.terminate()
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _report_end(process: subprocess.Popen[bytes], ending: threading.Event, console: Console) -> None:
    """Wait for the end of the pages' process; print a line if `pages` did not end it."""
    status = process.wait()
    if not ending.is_set():
        console.print(f"no chat page: its process ended with status {status}; the service continues without it", markup=False)


def _can_start(host: str, port: int, console: Console) -> bool:
    if not is_installed():
        console.print(f"no chat page: Gradio is not installed; {_INSTALL}", markup=False)
        return False
    try:
        refuse_taken_port(host, port, "ui.port")
    except ListenFailed as exc:
        console.print(f"no chat page: {exc}", markup=False)
        return False
    return True
