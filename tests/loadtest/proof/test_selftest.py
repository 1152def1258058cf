"""These tests check the self-test's arithmetic, its table, and its quick checks without their time limits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.errors import ExitCode, UsageError
from loadtest.proof import selftest as kit
from loadtest.proof.selftest import CHECKS, COVERED, Check, Result, carried_out, choose, points_of, selftest, simulated
from loadtest.proof.selftest.bench import ABOUT_TIME, Bench, Disturbed, Observed, Point, Skipped, judged
from loadtest.proof.selftest.refusals import blocked, loss_capacity
from loadtest.proof.selftest.times import gap_errors_s, ks_distance, tpot_error_s
from loadtest.proof.truth.ledger import Entry
from loadtest.records import Row


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, quick=True)


def test_without_an_offset_the_distance_is_kolmogorov_and_smirnovs() -> None:
    values = np.random.default_rng(3).exponential(0.1, 500)
    law = stats.expon(scale=0.1)
    assert ks_distance(values, law.cdf, offset_s=0.0) == pytest.approx(stats.kstest(values, law.cdf).statistic)


def test_a_client_that_is_late_by_less_than_the_offset_still_sees_the_law_and_another_does_not() -> None:
    law = stats.expon(scale=0.1)
    values = law.ppf((np.arange(1000) + 0.5) / 1000)
    assert ks_distance(values + 0.002, law.cdf, offset_s=0.002) <= 0.0011
    assert ks_distance(values + 0.007, law.cdf, offset_s=0.002) == pytest.approx(0.05, abs=0.003)  # 5 ms of a mean of 100
    assert ks_distance(values - 0.005, law.cdf, offset_s=0.002) > 0.04  # too early is never excused


def test_gaps_are_compared_between_the_servers_writes_however_the_client_read_them() -> None:
    told = Entry("x-0", 1, 1, "/", 0.0, 0.0, writes=[(0.1, 2), (0.12, 2), (0.15, 1)])
    seen = Row(0, 0, 0.0, "ok", chunks=[(101.0, 2), (121.0, 1), (121.5, 1), (153.0, 1)])
    assert gap_errors_s(seen, told) == pytest.approx([0.0, 0.002])
    together = Row(0, 0, 0.0, "ok", chunks=[(101.0, 2), (152.0, 3)])
    assert gap_errors_s(together, told) == pytest.approx([0.031, -0.03])


def test_the_time_per_token_is_compared_with_that_of_the_servers_writes() -> None:
    told = Entry("x-0", 1, 1, "/", 0.0, 0.0, writes=[(0.1, 2), (0.12, 2), (0.18, 1)])
    seen = Row(0, 0, 0.0, "ok", sent_s=0.0, first_s=0.101, last_s=0.189, output_tokens=5)
    assert tpot_error_s(seen, told) == pytest.approx(0.002)  # 88 ms and 80 ms over four gaps


def test_the_capacity_of_a_server_without_a_queue_is_that_of_the_tables() -> None:
    assert blocked(2, 1.0) == pytest.approx(0.2)  # 1/2 of 1 + 1 + 1/2
    assert loss_capacity(8, 0.9) == pytest.approx(5.597, abs=0.001)  # tables of Erlang's B: 8 lines, 10 %


def test_simulated_workers_that_end_seconds_before_the_others_are_well() -> None:
    few = [seed for seed in range(len(simulated.CASES)) if simulated.CASES[seed * 5 % len(simulated.CASES)][1:3] == (2, 3)]
    assert len(few) == 12
    assert [simulated.failed_gates(simulated.HEALTHY, seed) for seed in few] == [[]] * 12


class Script:
    """A check that sees one thing after another."""

    def __init__(self, *tries: list[Point] | Exception) -> None:
        self._tries = list(tries)
        self.__doc__ = "It holds.\n\n    The\n    rule."

    def __call__(self, bench: Bench) -> Iterator[Point]:
        seen = self._tries.pop(0)
        if isinstance(seen, Exception):
            raise seen
        yield from seen


def wrong(*, timing: bool) -> list[Point]:
    return [judged("count", "3", "3", True), judged("p99", "9 ms", "5 ms", False, timing=timing)]


RIGHT = [judged("count", "3", "3", True), judged("p99", "1 ms", "5 ms", True, timing=True)]


@pytest.mark.parametrize(
    ("tries", "verdicts", "num_tries"),
    [
        ([RIGHT], ["pass", "pass"], 1),
        ([wrong(timing=True), RIGHT], ["pass", "pass"], 2),
        ([wrong(timing=True)] * 3, ["pass", "FAIL"], 3),
        ([wrong(timing=False), RIGHT], ["pass", "FAIL"], 1),  # a wrong count is no matter of luck
        ([Disturbed("busy")], ["FAIL"], 1),
        ([Skipped("no such library")], ["skipped"], 1),
        ([ZeroDivisionError("division by zero")], ["FAIL"], 1),
    ],
)
def test_only_what_a_busy_machine_explains_is_tried_again(
    bench: Bench, tries: list[Any], verdicts: list[str], num_tries: int
) -> None:
    findings = carried_out(Check("T1", Script(*tries)), bench)
    assert [finding.verdict for finding in findings] == verdicts
    assert {(finding.test, finding.tries) for finding in findings} == {("T1", num_tries)}


def test_every_test_of_the_method_is_there_and_every_check_states_its_claim_and_rule() -> None:
    assert {check.test for check in CHECKS} | set(COVERED) == {f"T{n}" for n in range(1, 22)}
    for check in CHECKS:
        claim, _, rule = (check.run.__doc__ or "").partition("\n\n")
        assert claim.endswith(".")
        assert rule.strip()
    for _, folder, files in COVERED.values():
        assert all((Path(__file__).parents[3] / folder / name).exists() for name in files.split())


def test_names_choose_checks_and_quick_has_fewer_cases() -> None:
    assert [check.test for check in choose("T3,T12", quick=False)] == ["T3"]
    assert [len(check.cases) for check in choose("T3", quick=True)] == [1]
    assert choose("T15", quick=True) == []
    with pytest.raises(UsageError, match=r"no check T99; there are T1, T2, .*T21"):
        choose("T99,T3", quick=False)


@pytest.mark.parametrize(("script", "code"), [(Script(RIGHT), 0), (Script(wrong(timing=False)), 3), (Script(Skipped("none")), 0)])
def test_the_exit_status_tells_whether_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, code: int
) -> None:
    monkeypatch.setattr(kit, "CHECKS", (Check("T1", script),))
    assert selftest(only="T1,T18", out=tmp_path / "out") == ExitCode(code)
    result = msgspec.json.decode((tmp_path / "out" / "selftest.json").read_bytes(), type=Result)
    assert (result.findings[-1].test, result.findings[-1].verdict) == ("T18", "covered")
    assert {(f.claim, f.rule) for f in result.findings if f.test == "T1"} == {("It holds", "The rule.")}
    lines = (tmp_path / "out" / "selftest.md").read_text().splitlines()
    assert "| **T1** | **It holds.** The rule. | | | |" in lines
    assert [line.rpartition("| ")[2].split()[0] for line in lines if line.startswith("| | ")] == [
        f.verdict for f in result.findings
    ]
    with pytest.raises(UsageError, match="not empty"):
        selftest(only="T1", out=tmp_path / "out")


LONG = ("T4", "T6", "T8", "T14", "T21")
"""The checks of the self-test that take the longest. `make selftest-loadtest` and `make test-all` have them."""


def quick_cases() -> list[Any]:
    """Return each case of ``selftest --quick`` as a parameter."""
    chosen = [(check, case) for check in choose("", quick=True) for case in check.cases or ("",)]
    return [
        pytest.param(
            check._replace(cases=(case,) if case else ()),
            id=f"{check.test} {check.run.__name__} {case}",
            marks=[pytest.mark.slow] if check.test in LONG else [],
        )
        for check, case in chosen
    ]


class Busy(Bench):
    """A bench on a machine that may be busy: of a run that is invalid for its time alone all else is judged."""

    def run(self, law: dict[str, Any], scenario: dict[str, Any]) -> Observed:
        observed = self.once(law, scenario)
        if not observed.failed_gates.keys() <= ABOUT_TIME:
            raise Disturbed("the generator has a defect: " + "; ".join(observed.failed_gates.values()))
        return observed


@pytest.mark.apart
@pytest.mark.parametrize("check", quick_cases())
def test_the_quick_checks_fail_in_nothing_but_time(check: Check, tmp_path: Path) -> None:
    """Run each check once without time limits. `serve-app-loadtest selftest` judges times, and repeats checks on a busy machine."""
    points = list(points_of(check.run(Busy(tmp_path, quick=True), *check.cases)))
    assert points
    assert [p for p in points if p.verdict == "FAIL" and not p.timing] == []


def test_the_command_prints_a_table() -> None:
    result = CliRunner().invoke(app, ["selftest", "--only", "T18"])
    assert result.exit_code == 0
    assert "test_autoscale.py" in result.output
