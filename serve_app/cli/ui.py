"""``serve-app ui``, and the same process beside ``serve-app up``."""

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

from rich.console import Console

from serve_app.cli.startable import refuse_taken_port
from serve_app.config import Settings
from serve_app.errors import ConfigError, ListenFailed

_END_S = 5.0
_INSTALL = "pip install 'serve-app[ui]'"


def ui(url: str, host: str, port: int, *, ends_with_input: bool) -> None:
    """Do what the command `serve-app ui` says of itself.

    Raises:
        ConfigError: The URL is none, or Gradio is not installed.
        ListenFailed: The port is taken.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("--url", f"is {url!r}", "give the address of the service, for example http://127.0.0.1:8010")
    if not is_installed():
        raise ConfigError("", f"Gradio is not installed for {sys.executable}", _INSTALL)
    from serve_app.ui.app import run

    Console(stderr=True, highlight=False).print(f"chat page http://{host}:{port}/, fleet page http://{host}:{port}/fleet")
    run(url, host, port, ends_with_input=ends_with_input)


def is_installed() -> bool:
    """Return whether this Python has Gradio, without importing it: that takes seconds."""
    return importlib.util.find_spec("gradio") is not None


@contextlib.contextmanager
def pages(settings: Settings, console: Console) -> Iterator[None]:
    """Serve the pages of a running service while the block lasts; say in one line where they are, or why there are none.

    The process ends when its standard input does, so that it does not outlive a `serve-app up` that was killed.
    """
    where = settings.ui
    if where is None or not _can_start(where.host, where.port, console):
        yield
        return
    command = [sys.executable, "-m", "serve_app.cli.main", "ui", "--url", settings.ingress.local_url, "--ends-with-input"]
    # A session of its own: Ctrl-C reaches the whole process group of the terminal, and the pages may stay until the streams have ended.
    process = subprocess.Popen(
        [*command, "--host", where.host, f"--port={where.port}"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _can_start(host: str, port: int, console: Console) -> bool:
    if not is_installed():
        console.print(f"no chat page: Gradio is not installed; {_INSTALL}", markup=False)
        return False
    try:
        refuse_taken_port(host, port, "ui.port")
    except ListenFailed as exc:
        console.print(f"no chat page: {exc}")
        return False
    return True
