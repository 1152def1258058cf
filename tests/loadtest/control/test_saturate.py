"""These tests check what a search concludes from a run, and its report of a sick run or one that could not start."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.control.repeat import repeat
from loadtest.control.saturate import probe_of, saturate
from loadtest.errors import ExitCode, UsageError
from loadtest.judge.search import Ask, Capacity, SearchSettings
from loadtest.plan.scenario import parse_scenario
from loadtest.proof.selftest.bench import Bench, fault, poisson
from loadtest.wire.target import Target
from tests.loadtest.synthetic import write_run

ASK = Ask(12.0, 600, 1, "search")
SLOW = {"ttft": {"law": "constant", "s": 1.0}}
"""Beside such times a busy machine is seldom too late."""


def test_a_probe_has_the_counts_of_a_valid_run_and_the_reason_of_an_invalid_one(tmp_path: Path) -> None:
    good = probe_of(ASK, write_run(tmp_path / "good"))
    assert (good.valid, good.reason, len(good.counts)) == (True, "", 2)
    assert all(n > over > 0 for n, over in good.counts)
    sick = probe_of(ASK, write_run(tmp_path / "sick", sick=True))
    assert (sick.valid, sick.counts) == (False, ((0.0, 0.0), (0.0, 0.0)))
    assert sick.reason.startswith("50% of 672 requests left within 195.8 ms of their due time, limit 9.0 ms")
    assert "the event loop's longest stop was " in sick.reason


def test_an_interrupted_probe_says_nothing_of_its_rate(tmp_path: Path) -> None:
    probe = probe_of(ASK, write_run(tmp_path / "run", state="interrupted", ended_s=66.0))
    assert (probe.valid, probe.reason) == (False, "interrupted")


def test_a_search_says_and_keeps_why_a_probe_was_invalid(tmp_path: Path) -> None:
    """One probe, in which the generator is stopped for longer than any gate allows."""
    scenario = poisson(50, 3, slo="ttft_p50=1s", faults=[fault(0.5, "stop", "locustfile", for_s=0.5)])
    settings = SearchSettings(start_rate=50, quantiles=(0.5,), max_probes=1)
    said: list[str] = []
    with Bench(tmp_path, quick=True).serving({}) as (folder, url):
        code = saturate(parse_scenario(scenario), Target(url), folder / "search", settings, command=(), say=said.append)
    assert code is ExitCode.INVALID
    (probe,) = msgspec.json.decode((folder / "search" / "saturate.json").read_bytes(), type=Capacity).probes
    assert "the event loop's longest stop was " in probe.reason
    assert f"probe-000: invalid: {probe.reason}" in said
    assert any(line.startswith("1 of 1 probes were invalid, the last at 50/s: ") for line in said)


def test_a_search_whose_target_is_gone_ends_with_what_it_knows(tmp_path: Path) -> None:
    """The server dies in the first probe, so the second probe has no target."""
    scenario = poisson(50, 3, slo="ttft_p50=1s", faults=[fault(1.6, "kill", "loadtest.proof.truth")])
    settings = SearchSettings(start_rate=50, quantiles=(0.5,))
    said: list[str] = []
    with Bench(tmp_path, quick=True).serving(SLOW) as (folder, url):
        code = saturate(parse_scenario(scenario), Target(url), folder / "search", settings, command=(), say=said.append)
    found = msgspec.json.decode((folder / "search" / "saturate.json").read_bytes(), type=Capacity)
    ended = f"probe-{len(found.probes):03d}: "
    assert found.ended.startswith(ended)
    assert f"the search ended before it was done: {found.ended}" in said
    # A busy machine may make a probe invalid; without a valid one there is nothing to show.
    page, some = folder / "search" / "report.html", any(probe.valid for probe in found.probes)
    assert (code, page.exists()) == (ExitCode.UNDECIDED if some else ExitCode.INVALID, some)
    assert not some or f"The search ended before it was done: {ended}" in page.read_text()


def test_replicates_beyond_the_largest_seed_are_refused_before_any_load(tmp_path: Path) -> None:
    scenario = parse_scenario(poisson(5, 2, seed=2**63 - 2))
    with pytest.raises(UsageError, match="--repeat: 3 runs from seed 9223372036854775806 on would need seed 9223372036854775808"):
        repeat(scenario, Target("http://127.0.0.1:1"), tmp_path / "runs", 3, command=(), say=print)
    assert not (tmp_path / "runs").exists()


def test_replicates_whose_target_is_gone_end_in_words(tmp_path: Path) -> None:
    scenario = poisson(50, 2, slo="ttft_p50=1s", faults=[fault(1.6, "kill", "loadtest.proof.truth")])
    said: list[str] = []
    with Bench(tmp_path, quick=True).serving(SLOW) as (folder, url):
        code = repeat(parse_scenario(scenario), Target(url), folder / "runs", 3, command=(), say=said.append, report=False)
    first = said[0].startswith("seed-1: invalid")  # by a busy machine
    assert code is (ExitCode.INVALID if first else ExitCode.UNDECIDED), said
    assert first or (said[1].startswith("seed-2: "), said[1].endswith("; the runs end here (1 of 3)")) == (True, True), said
    assert said[-1].startswith("not pooled: ")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["saturate", "--start-rate", "nan"], "--start-rate: nan is no rate from 0.001 to 100,000 requests/s; give one"),
        (["saturate", "--start-rate", "-3"], "--start-rate: -3 is no rate"),
        (["saturate", "--start-rate", "1e300"], "--start-rate: 1e+300 is no rate"),
        (["saturate"], "Connection refused"),
        (["run", "--repeat", "3"], "Connection refused"),
    ],
)
def test_what_ends_before_the_first_probe_leaves_no_folder(args: list[str], problem: str, tmp_path: Path) -> None:
    common = ["chat-qps-4", "--target", "http://127.0.0.1:1", "--set", "slo=ttft_p99=1s", "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, [*args, *common])
    assert problem in str(refused.exception)
    assert "probe-000" not in refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--max-probes", "--max-requests"])
def test_a_search_of_nothing_is_refused(option: str) -> None:
    refused = CliRunner().invoke(app, ["saturate", "chat-qps-4", "--target", "http://127.0.0.1:1", option, "0"])
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}'" in refused.output
    assert "greater than or equal to" in " ".join(refused.output.replace("\u2502", " ").split())


def test_a_search_of_classes_that_begin_during_a_run_is_refused(tmp_path: Path) -> None:
    scenario = parse_scenario(poisson(50, 3, slo="ttft_p50=1s", requests=[{"name": "a"}, {"name": "b", "from_s": 2}]))
    settings = SearchSettings(start_rate=50, quantiles=(0.5,))
    with pytest.raises(
        UsageError, match=r"requests\.1\.from_s: does not go with a search: each probe needs the same mix .*; leave it out"
    ):
        saturate(scenario, Target("http://127.0.0.1:1"), tmp_path / "search", settings, command=(), say=print)
    assert not (tmp_path / "search").exists()
