"""Locust loads this file: ``locust -f loadtest/control/locustfile.py --scenario FILE --host URL``, web UI or ``--headless``.

``serve-app-loadtest run`` starts Locust with ``--run-folder`` instead; the folder then holds manifest and schedule already.
The API key is taken from LOADTEST_API_KEY, on workers too.
"""

import logging
import os
from pathlib import Path
from typing import Any

import gevent
import gevent.os
from locust import LoadTestShape, User, events
from locust.exception import StopUser
from locust.runners import WorkerRunner

from loadtest.control.dispatch import install_worker
from loadtest.control.master import Master
from loadtest.errors import ExitCode, UsageError
from loadtest.records import read_manifest
from loadtest.wire.target import API_KEY_VARIABLE

WHO_DECIDES = (
    "The scenario decides how many requests go out, when, and for how long; so users, ramp up and run time are greyed. "
    "Choose the scenario under Custom parameters; its file describes the load."
)
"""A line above Locust's own page, which greys these fields without an explanation."""
PARENT_GONE_S = 15.0
"""Time that a process has, after its owner has ended, to hand over its rows."""


class Dispatcher(User):  # type: ignore[misc]
    """The one user of a worker."""

    def drive(self) -> None:
        self.environment.loadtest_drive()
        raise StopUser

    tasks = [drive]  # noqa: RUF012


class StartAndStop(LoadTestShape):  # type: ignore[misc]
    """Locust's shape: one user per worker until the run is over. It does not decide when requests are sent."""

    def tick(self) -> tuple[int, float] | None:
        master = self.runner.environment.loadtest_master
        return None if master.over() else (master.num_workers, master.num_workers)


class GivenRun:
    """The hooks for a run whose folder belongs to the process that started this process."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def open_run(self) -> Path:
        """Return the folder.

        Raises:
            UsageError: Another process has begun this run and ended: each request would be sent twice.
        """
        if read_manifest(self._out).epoch_unix_s:
            raise UsageError(str(self._out), "this run was begun before, and a run is not begun twice; make a new one")
        return self._out

    def on_start(self, epoch_unix_s: float) -> None:
        pass

    def close_run(self, out: Path) -> ExitCode:
        return ExitCode.PASS  # the owner judges the run


def add_options(parser: Any) -> None:
    group = parser.add_argument_group("serve-app-loadtest")
    group.add_argument(
        "--scenario", default="", help="scenario file, or the name of one that comes with it; the target is --host"
    )
    group.add_argument("--out", default="", help="folder of the run; default results/<scenario>-<time>")
    # Not in the group: only the parser itself has include_in_web_ui.
    parser.add_argument("--run-folder", default="", help="set by serve-app-loadtest", include_in_web_ui=False)
    parser.add_argument("--obey-stdin", action="store_true", help="set by serve-app-loadtest", include_in_web_ui=False)


def install(environment: Any, web_ui: Any = None, **_: Any) -> None:
    options, api_key = environment.parsed_options, os.environ.get(API_KEY_VARIABLE, "")
    environment.loadtest_drive = install_worker(environment, api_key)
    master = None
    if not isinstance(environment.runner, WorkerRunner):
        hooks = GivenRun(Path(options.run_folder)) if options.run_folder else _standalone(environment, api_key)
        master = environment.loadtest_master = Master(environment, hooks)
    if options.run_folder:
        logging.getLogger("locust.stats_logger").setLevel(logging.WARNING)  # its tables would hide errors
    environment.process_exit_code = ExitCode.PASS  # independent of Locust's own error count
    if web_ui is not None:
        web_ui.app.after_request(_say_who_decides)
    if options.obey_stdin:
        gevent.spawn(obey_stdin, master)


def _say_who_decides(response: Any) -> Any:
    """Insert the line into Locust's page, above the element `root` into which Locust's scripts draw."""
    if response.mimetype == "text/html" and not response.direct_passthrough:
        line = f'<p style="margin: 0; padding: 0.6em 1.5em; font-family: sans-serif">{WHO_DECIDES}</p>'
        response.set_data(response.get_data(as_text=True).replace('<div id="root">', f'{line}<div id="root">', 1))
    return response


def _standalone(environment: Any, api_key: str) -> Any:
    from loadtest.control.standalone import Standalone  # imports all of analysis and report

    return Standalone(environment, api_key)


def obey_stdin(master: Master | None) -> None:
    """Execute the owner's commands; end when the owner is gone."""
    gevent.os.make_nonblocking(0)
    orders = {"interrupt": master.interrupt, "lost": master.lost} if master else {}
    rest = b""
    while data := gevent.os.nb_read(0, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order, _, reason = line.decode().partition(" ")
            orders[order](reason)
    if master:
        master.abandon("the process that started this run is gone")
    gevent.sleep(PARENT_GONE_S)
    os._exit(ExitCode.INVALID)


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(install)
