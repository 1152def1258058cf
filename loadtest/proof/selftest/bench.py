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
"""Gates that a busy machine fails: such a run is repeated. Any other that fails is a defect."""
TRIES = 3
Verdict = Literal["pass", "FAIL", "skipped", "covered"]


class Point(msgspec.Struct, frozen=True):
    """One thing that a check saw."""

    case: str
    seen: str
    limit: str
    verdict: Verdict
    timing: bool = False
    """A busy machine can make it fail: the check is tried again."""


def judged(case: str, seen: str, limit: str, ok: bool, *, timing: bool = False) -> Point:
    return Point(case, seen, limit, "pass" if ok else "FAIL", timing)


class Disturbed(Exception):
    """The generator called each of several runs invalid, or one for what no busy machine explains, and says why."""


class Skipped(Exception):
    """Something that the check needs is not on this machine."""


class Observed:
    """A run and what the law server says of it."""

    def __init__(self, folder: Path, log: Path, code: ExitCode) -> None:
        self.folder, self.log, self.code = folder, log, code
        self.manifest = read_manifest(folder)
        self.rows = list(read_lines(folder / "rows.jsonl", Row))
        prefix = f"lt-{self.manifest.schedule_sha256[:8]}-"
        lines = (line for line in read_lines(log, dict[str, Any]) if line["kind"] == "request")
        entries = [msgspec.convert(line, Entry) for line in lines]
        self.told = [(int(entry.request_id.removeprefix(prefix)), entry) for entry in entries]
        """By the server, in the order in which answers ended; one that it was told to process twice is there twice."""

    @cached_property
    def summary(self) -> Summary:
        return analyse(self.folder)

    @property
    def failed_gates(self) -> dict[str, str]:
        return {gate.name: gate.text for gate in self.summary.gates if not gate.ok}

    @cached_property
    def pairs(self) -> list[tuple[Row, Entry]]:
        """Both sides of each complete answer."""
        told = dict(self.told)
        return [(row, told[row.id]) for row in self.rows if row.state == "ok"]

    @cached_property
    def late_s(self) -> Floats:
        """How late the client says the first token came, by the server's own time from reading the request to writing it."""
        return np.array([(r.first_s or 0.0) - (r.sent_s or 0.0) - (e.sent_first_s or 0.0) for r, e in self.pairs])

    @cached_property
    def answer_late_s(self) -> Floats:
        """The part of ``late_s`` from the server's write to the client's read; what is left is the request's way."""
        clock = np.median([e.arrival_unix_s - e.arrival_s for _, e in self.told])  # the manifest's epoch is Unix time
        epoch = self.manifest.epoch_unix_s - clock
        return np.array([epoch + (r.first_s or 0.0) - e.arrival_s - (e.sent_first_s or 0.0) for r, e in self.pairs])

    @cached_property
    def server_late_s(self) -> Floats:
        """How late the server wrote the first token, by its own schedule."""
        return np.array([(e.sent_first_s or 0.0) - (e.scheduled_first_s or 0.0) for _, e in self.pairs])

    def percentile(self, metric: str, q: float) -> float | None:
        """Return what the report prints, in seconds; None where it prints none, as of an invalid run."""
        found = self.summary.distributions.get(metric)
        at = found.at(q) if found else None
        return at.value_s if at else None

    def lateness(self) -> str:
        """Return both sides' delays for people, in ms as p50 p99."""

        def both(late_s: Floats) -> str:
            return f"{ms(quantile(late_s, 0.5))} {ms(quantile(late_s, 0.99))}"

        way = both(self.answer_late_s)
        return f"client - server {both(self.late_s)} ms (way back {way}); server late {both(self.server_late_s)} ms"


class Bench:
    """Where the checks run; each run keeps its files in a folder of its own below ``folder``."""

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
        """Serve the law; gives a new folder, with the log in truth.jsonl, and the URL."""
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
        """Run, whatever comes of it.

        Raises:
            SystemExit: It was interrupted by hand.
        """
        with self.serving(law) as (folder, url):
            code = run(parse_scenario(scenario), Target(url), folder / "run", quiet=True, report=False)
        observed = Observed(folder / "run", folder / "truth.jsonl", code)
        if observed.manifest.state == "interrupted" and not observed.manifest.problems:
            raise SystemExit(ExitCode.INVALID)
        return observed

    def run(self, law: dict[str, Any], scenario: dict[str, Any]) -> Observed:
        """Run until the generator was well, `TRIES` times at most.

        Raises:
            Disturbed: It never was.
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
    """Give child processes these variables."""
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
    """Have a thread of each Locust process execute these lines of Python once it has loaded what sends requests."""
    # Python imports sitecustomize before all else: Locust has not patched threads yet.
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


def scenario_of(
    arrival: dict[str, Any], duration_s: float, *, output_tokens: int = 1, endpoint: str = "completions", **more: Any
) -> dict[str, Any]:
    """Return a scenario without a warm-up and without scrapes."""
    asked = {"input_tokens": {"mean": 8}, "output_tokens": {"mean": output_tokens}}
    base = {"name": "selftest", "warmup_s": 0, "drain_s": 15, "timeout_s": 15, "observe": {"metrics_url": "none"}}
    return base | {"arrival": arrival, "requests": [asked], "duration_s": duration_s} | more


def poisson(rate: float, duration_s: float, **more: Any) -> dict[str, Any]:
    return scenario_of({"law": "poisson", "rate": rate}, duration_s, **more)


def fault(at_s: float, action: str, process: str = "", **more: Any) -> dict[str, Any]:
    """Return a fault of our own processes."""
    return {"at_s": at_s, "action": action, "process": process, "below_pid": os.getpid(), **more}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def cpu_waited_s() -> float:
    """Return for how long in all something on this machine waited for a CPU; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except OSError:
        return 0.0
