"""A run that Locust's own command or web UI starts: `loadtest.runner` around it, in Locust's process."""

import logging
import sys
from pathlib import Path
from typing import Any

from loadtest.runner import Beside, conclude, default_out, prepare, settle
from loadtest.scenario import load_scenario
from loadtest.target import Target


class Standalone:
    """Owns the folder of each run."""

    def __init__(self, environment: Any, api_key: str) -> None:
        self._environment = environment
        self._options = environment.parsed_options
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per scrape
        self._target = Target(environment.host or "", api_key)

    def open_run(self) -> Path:
        """Make a folder of its own for each start of a test.

        Raises:
            UsageError: As `run`.
        """
        scenario = load_scenario(Path(self._options.scenario))
        out = Path(self._options.out) if self._options.out else default_out(scenario)
        prepare(scenario, self._target, out, command=sys.argv)
        self._beside = Beside(scenario, self._target, out)
        self._environment.host = self._beside.url
        return out

    def on_start(self, epoch_unix_s: float) -> None:
        self._beside.start(epoch_unix_s)

    def close_run(self, out: Path) -> None:
        with self._beside:
            pass
        settle(out, self._beside.problems)
        self._environment.process_exit_code = conclude(out)
