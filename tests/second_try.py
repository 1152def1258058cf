"""`second_try` runs pytest, then runs each failed test once more, and lists as flaky the tests that pass then.

    python -m tests.second_try build/flaky.txt PYTEST_ARGUMENTS...

The exit status is 0 if every test passed in one of the two runs, else pytest's. The list is printed at the end and written to the file, a
line per test with its first error. A module that cannot be collected and a run that is interrupted have no second try.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

MAX_ERROR_CHARS = 200
_GROUP = re.compile(r"@[^@\[\]]+$")
"""The suffix that pytest-xdist adds to the name of a test in a group."""


class Outcomes:
    """Plugin of one run. pytest-xdist calls it in its main process, for the tests of all workers."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: dict[str, str] = {}
        """Node ids of failed tests and the first line of each error."""
        self.recovered: dict[str, str] = {}
        """The same for tests whose worker crashed and that passed when pytest-xdist ran them again."""
        self.is_complete = True
        """Whether every module could be collected."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, _first_line(report))
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
            if report.nodeid in self.failed:
                self.recovered[report.nodeid] = self.failed.pop(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_complete = False


def run_twice(arguments: list[str], cache: Path) -> tuple[int, dict[str, str]]:
    """Return the exit status and the flaky tests with their first errors. ``cache`` is emptied: pytest notes there what failed."""
    shutil.rmtree(cache, ignore_errors=True)
    arguments = [*arguments, "-o", f"cache_dir={cache}"]
    first = Outcomes()
    status = pytest.main(arguments, plugins=[first])
    if status != pytest.ExitCode.TESTS_FAILED or not first.is_complete:
        return int(status), first.recovered
    if not first.failed:
        return (0 if first.recovered else int(status)), first.recovered
    print(f"\n== second try of {len(first.failed)} failed tests", flush=True)
    second = Outcomes()
    status = pytest.main([*arguments, "--last-failed", "--last-failed-no-failures=none"], plugins=[second])
    flaky = {test: error for test, error in first.failed.items() if test in second.passed and test not in second.failed}
    # A test that skips itself on its second try has not passed.
    if status == pytest.ExitCode.OK and len(flaky) < len(first.failed):
        status = pytest.ExitCode.TESTS_FAILED
    return int(status), first.recovered | flaky


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit status."""
    flaky_list = Path(arguments[0]).resolve()
    flaky_list.parent.mkdir(parents=True, exist_ok=True)
    flaky_list.unlink(missing_ok=True)
    status, flaky = run_twice(arguments[1:], flaky_list.with_suffix(".cache"))
    lines = [f"flaky: {_GROUP.sub('', test)}: {error}" for test, error in flaky.items()]
    flaky_list.write_text("".join(f"{line}\n" for line in lines))
    if lines:
        print(f"\n== {len(lines)} tests failed and passed on their second try", *lines, sep="\n")
    return status


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).splitlines()
    return next((line for line in lines if line.strip()), "no message")[:MAX_ERROR_CHARS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
