"""This module puts `loadtest.control.runner` around a run that Locust's own command or web UI starts, in Locust's process."""

import logging
import sys
from pathlib import Path
from typing import Any

from loadtest.control.runner import Beside, conclude, default_out, prepare, settle
from loadtest.errors import ExitCode, UsageError
from loadtest.plan.scenario import load_scenario
from loadtest.wire.target import Target


class Standalone:
    """The owner of each run's folder."""

    def __init__(self, environment: Any, api_key: str) -> None:
        self._environment = environment
        self._options = environment.parsed_options
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per scrape
        self._api_key = api_key

    def open_run(self) -> Path:
        """Make a new folder for each start of a test.

        Raises:
            UsageError: As `run`.
        """
        if self._options.run_time:
            raise UsageError(
                "--run-time", "has no effect: the scenario's duration_s says how long; change it there and leave this out"
            )
        if not self._options.scenario:
            raise UsageError("--scenario", "is missing: name a file, or a scenario that comes with the kit, such as chat-qps-4")
        # Not earlier: the host may have been typed into the web UI.
        self._target = target = Target(self._environment.host or "", self._api_key)
        scenario = load_scenario(Path(self._options.scenario))
        out = Path(self._options.out) if self._options.out else default_out(scenario)
        prepare(scenario, target, out, command=sys.argv)
        self._beside = Beside(scenario, target, out)
        self._environment.host = self._beside.url
        return out

    def on_start(self, epoch_unix_s: float) -> None:
        self._beside.start(epoch_unix_s)

    def close_run(self, out: Path) -> ExitCode:
        """Judge the run.

        Raises:
            LoadtestError: As `conclude`.
        """
        self._environment.host = self._target.base_url  # for the next start
        with self._beside:
            pass
        settle(out, self._beside.problems, self._beside.not_begun)
        return conclude(out)
