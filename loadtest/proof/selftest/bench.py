"""A bench is what the checks need: a law server as a process, a run against it, and the records of both, joined by request."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import yaml

from loadtest.control.runner import run
from loadtest.errors import ExitCode
from loadtest.judge.analysis import analyse
from loadtest.judge.stats import Floats, quantile
from loadtest.judge.summary import Summary
from loadtest.plan.scenario import parse_scenario
from loadtest.proof.truth.ledger import Entry
from loadtest.records import Row, read_lines, read_manifest
from loadtest.wire.target import Target

ABOUT_TIME = {
    *("lag p50", "lag p99", "read lag p50", "read lag p99", "loop stalls"),
    *("CPU p95", "health samples", "delivered arrivals", "CPU throttling"),
}
"""Gates that fail on a busy machine: such a run is repeated. A failure of any other gate is a defect."""
TRIES = 3
Verdict = Literal["pass", "FAIL", "skipped", "covered"]


class Point(msgspec.Struct, frozen=True):
    """One observation of a check."""

    case: str
    seen: str
    limit: str
    verdict: Verdict
    timing: bool = False
    """Whether a busy machine can make it fail, so that the check is repeated."""


def judged(case: str, seen: str, limit: str, ok: bool, *, timing: bool = False) -> Point:
    return Point(case, seen, limit, "pass" if ok else "FAIL", timing)


class Disturbed(Exception):
    """Each of several runs was invalid, or one run for a reason that a busy machine does not explain; the message has the reason."""


class Skipped(Exception):
    """This machine lacks something that the check needs."""


class Observed:
    """A run, and the law server's log of it."""

    def __init__(self, folder: Path, log: Path, code: ExitCode) -> None:
        self.folder, self.log, self.code = folder, log, code
        self.manifest = read_manifest(folder)
        self.rows = list(read_lines(folder / "rows.jsonl", Row))
        prefix = f"lt-{self.manifest.schedule_sha256[:8]}-"
        lines = (line for line in read_lines(log, dict[str, Any]) if line["kind"] == "request")
        entries = [msgspec.convert(line, Entry) for line in lines]
        self.told = [(int(entry.request_id.removeprefix(prefix)), entry) for entry in entries]
        """The server's entries in the order in which answers ended; a request that the law processes twice is there twice."""

    @cached_property
    def summary(self) -> Summary:
        return analyse(self.folder)

    @property
    def failed_gates(self) -> dict[str, str]:
        return {gate.name: gate.text for gate in self.summary.gates if not gate.ok}

    @cached_property
    def pairs(self) -> list[tuple[Row, Entry]]:
        """Return row and entry of each complete answer."""
        told = dict(self.told)
        return [(row, told[row.id]) for row in self.rows if row.state == "ok"]

    @cached_property
    def late_s(self) -> Floats:
        """Return the client's time to the first token minus the server's own time from reading the request to writing the token."""
        return np.array([(r.first_s or 0.0) - (r.sent_s or 0.0) - (e.sent_first_s or 0.0) for r, e in self.pairs])

    @cached_property
    def answer_late_s(self) -> Floats:
        """Return the part of ``late_s`` from the server's write to the client's read; the rest is the request's travel."""
        clock = np.median([e.arrival_unix_s - e.arrival_s for _, e in self.told])  # the manifest's epoch is Unix time
        epoch = self.manifest.epoch_unix_s - clock
        return np.array([epoch + (r.first_s or 0.0) - e.arrival_s - (e.sent_first_s or 0.0) for r, e in self.pairs])

    @cached_property
    def server_late_s(self) -> Floats:
        """Return the delay of the server's first token against the server's schedule."""
        return np.array([(e.sent_first_s or 0.0) - (e.scheduled_first_s or 0.0) for _, e in self.pairs])

    def percentile(self, metric: str, q: float) -> float | None:
        """Return the report's percentile in seconds; None if the report has none, for example of an invalid run."""
        found = self.summary.distributions.get(metric)
        at = found.at(q) if found else None
        return at.value_s if at else None

    def lateness(self) -> str:
        """Return the delays of both sides as text, in ms as p50 p99."""

        def both(late_s: Floats) -> str:
            return f"{ms(quantile(late_s, 0.5))} {ms(quantile(late_s, 0.99))}"

        way = both(self.answer_late_s)
        return f"client - server {both(self.late_s)} ms (way back {way}); server late {both(self.server_late_s)} ms"


class Bench:
    """The place of the checks; each run has its own folder below ``folder``."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.quick = quick
        self.num_repeated = 0
        self._folder = folder
        self._num = 0

    def new_folder(self) -> Path:
        self._num += 1
        folder = self._folder / f"{self._num:03d}"
        folder.mkdir(parents=True)
        return folder

    @contextmanager
    def serving(self, law: dict[str, Any]) -> Iterator[tuple[Path, str]]:
        """Serve the law; yield a new folder, with the log in truth.jsonl, and the URL."""
        folder = self.new_folder()
        (folder / "law.yaml").write_text(yaml.safe_dump(law))
        command = [sys.executable, "-m", "loadtest.proof.truth", "--port", "0", "--law", "law.yaml", "--log", "truth.jsonl"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                if not (line := process.stdout.readline()):
                    raise RuntimeError("the law server did not start; its own message is above")
                yield folder, line.split()[-1]
            finally:
                process.terminate()

    def once(self, law: dict[str, Any], scenario: dict[str, Any]) -> Observed:
        """Run once and return the run, valid or not.

        Raises:
            SystemExit: The run was interrupted by hand.
        """
        with self.serving(law) as (folder, url):
            code = run(parse_scenario(scenario), Target(url), folder / "run", quiet=True, report=False)
        observed = Observed(folder / "run", folder / "truth.jsonl", code)
        if observed.manifest.state == "interrupted" and not observed.manifest.problems:
            raise SystemExit(ExitCode.INVALID)
        return observed

    def run(self, law: dict[str, Any], scenario: dict[str, Any]) -> Observed:
        """Run until the generator was healthy, at most `TRIES` times.

        Raises:
            Disturbed: The generator was never healthy.
        """
        for _ in range(TRIES):
            observed = self.once(law, scenario)
            if observed.code is not ExitCode.INVALID:
                return observed
            self.num_repeated += 1
            if not observed.failed_gates.keys() <= ABOUT_TIME:
                raise Disturbed("the generator has a defect: " + "; ".join(observed.failed_gates.values()))
        raise Disturbed("the generator was not well: " + "; ".join(observed.failed_gates.values()))


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set these variables for child processes."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def beside_the_load(folder: Path, loop: str) -> Iterator[None]:
    """Make a thread of each Locust process execute these lines of Python once the process has loaded the dispatcher."""
    # Python imports sitecustomize first, before Locust patches threads.
    (folder / "sitecustomize.py").write_text(_BESIDE.format(loop))
    with environment({"PYTHONPATH": os.pathsep.join(filter(None, [str(folder.absolute()), os.environ.get("PYTHONPATH", "")]))}):
        yield


_BESIDE = """
import _thread, sys
from time import sleep
def beside():
    while "loadtest.control.dispatch" not in sys.modules:
        sleep(0.05)
    exec({!r})
if "loadtest.control.locust_command" in sys.orig_argv:
    _thread.start_new_thread(beside, ())
"""


def scenario_of(arrival: dict[str, Any], duration_s: float, *, output_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """Return a scenario without a warm-up and without scrapes."""
    asked = {"input_tokens": {"mean": 8}, "output_tokens": {"mean": output_tokens}}
    base = {"name": "selftest", "warmup_s": 0, "drain_s": 15, "timeout_s": 15, "observe": {"metrics_url": "none"}}
    return base | {"arrival": arrival, "requests": [asked], "duration_s": duration_s} | more


def poisson(rate: float, duration_s: float, **more: Any) -> dict[str, Any]:
    return scenario_of({"law": "poisson", "rate": rate}, duration_s, **more)


def fault(at_s: float, action: str, process: str = "", **more: Any) -> dict[str, Any]:
    """Return a fault for a process of this run."""
    return {"at_s": at_s, "action": action, "process": process, "below_pid": os.getpid(), **more}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def cpu_waited_s() -> float:
    """Return the total time in which some process of this machine waited for a CPU; 0 if the kernel does not report it."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except OSError:
        return 0.0
