"""This module drives `loadtest.judge.search` with real runs: a folder per probe, then saturate.json and a report at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loadtest.control.runner import check_target, run
from loadtest.errors import ExitCode, LoadtestError, UsageError
from loadtest.judge.analysis import analyse
from loadtest.judge.search import Ask, Capacity, Probe, Search, SearchSettings
from loadtest.plan.class_times import first_time_key
from loadtest.plan.laws import Constant, Gamma, Poisson
from loadtest.plan.scenario import Scenario
from loadtest.recorder import claim, give_up, write_json
from loadtest.records import Manifest, read_manifest
from loadtest.wire.target import Target
from loadtest.wording import share

MIN_RATE = 0.001
"""Smallest rate of a probe, in requests/s: the hundred requests of the smallest probe take a day at this rate."""


def saturate(
    scenario: Scenario,
    target: Target,
    out: Path,
    settings: SearchSettings,
    *,
    command: Sequence[str],
    say: Callable[[str], None],
) -> ExitCode:
    """Search the highest rate that keeps the scenario's SLO. A search that is interrupted or fails reports its result so far.

    Raises:
        UsageError: The scenario has no SLO, no rate, or classes that begin or end during a run; the folder is not empty; or the target
            cannot be used for the first probe.
        InvalidRun: The generator could not be started for the first probe.
    """
    if not scenario.slo.limits:
        raise UsageError("--slo", "needs at least one limit, as ttft_p99=500ms")
    if not isinstance(scenario.arrival, Constant | Poisson | Gamma):
        raise UsageError(
            "arrival.law", f"{scenario.arrival.law!r} has no one rate to search for; take poisson, gamma or constant"
        )
    if key := first_time_key(scenario.requests):
        raise UsageError(
            key, "does not go with a search: each probe needs the same mix of requests from start to end; leave it out"
        )
    if not MIN_RATE <= settings.start_rate <= settings.max_rate:  # also true for nan
        raise UsageError(
            "--start-rate",
            f"{settings.start_rate:g} is no rate from {MIN_RATE:g} to {settings.max_rate:,.0f} requests/s; give one",
        )
    check_target(scenario, target)
    is_new = claim(out, marker="saturate.json")
    search, ended = Search(settings), ""
    while not ended and (ask := search.next_rate()) is not None:
        folder = out / f"probe-{len(search.probes):03d}"
        probed = scenario_at(scenario, ask)
        say(f"{folder.name}: {ask.rate:.4g}/s for {probed.duration_s:.0f} s ({ask.purpose})")
        try:
            run(probed, target, folder, command=command, quiet=True, report=False)
        except LoadtestError as exc:  # the load may have been too much for the target; the result so far counts
            if not search.probes:
                give_up(out, ["saturate.json"], is_new=is_new)
                raise
            ended = f"{folder.name}: {exc}"
        else:
            search.add(probe_of(ask, folder))
            say(f"{folder.name}: {_outcome(search, search.probes[-1])}")
            ended = "interrupted" if _interrupted(read_manifest(folder)) else ""
        write_json(out / "saturate.json", msgspec.structs.replace(search.result(), ended=ended))
    return _conclude(msgspec.structs.replace(search.result(), ended=ended), out, say)


def _interrupted(manifest: Manifest) -> bool:
    """Whether the run was interrupted by hand; other early ends are problems of the generator."""
    return manifest.state == "interrupted" and not manifest.problems


def scenario_at(scenario: Scenario, ask: Ask) -> Scenario:
    """Return the scenario of one probe: with its rate and seed, and as long as its number of requests takes."""
    arrival = scenario.arrival.model_copy(update={"rate": ask.rate})
    duration_s = scenario.warmup_s + ask.num_requests / ask.rate
    return scenario.model_copy(update={"arrival": arrival, "seed": ask.seed, "duration_s": duration_s})


def probe_of(ask: Ask, folder: Path) -> Probe:
    """Return the result of the probe's run in the folder. An interrupted run has no result."""
    summary, manifest = analyse(folder), read_manifest(folder)
    if summary.verdict == "invalid" or manifest.state == "interrupted":
        reason = "; ".join(gate.text for gate in summary.gates if not gate.ok) or "interrupted"
        return Probe(ask, counts=tuple((0.0, 0.0) for _ in _limits(manifest)), valid=False, reason=reason)
    return Probe(ask, counts=tuple(result.counts for result in summary.slo), steady=summary.steady is not False)


def _limits(manifest: Manifest) -> list[object]:
    return list(manifest.scenario["slo"]["limits"])


def _outcome(search: Search, probe: Probe) -> str:
    if not probe.valid:
        return f"invalid: {probe.reason}"
    shares = ", ".join(f"{share(1 - over / n)} of {n:.0f}" if n else "none" for n, over in probe.counts)
    return f"inside the limits: {shares} independent samples; so far {search.verdict(probe.ask.rate)}"


def _conclude(capacity: Capacity, out: Path, say: Callable[[str], None]) -> ExitCode:
    from loadtest.report.report import write_report  # as in `loadtest.control.runner`

    def rate(value: float | None) -> str:
        return "outside what was tried" if value is None else f"{value:.4g}/s"

    say(f"capacity {rate(capacity.rate)}, 95 % interval {rate(capacity.low)} to {rate(capacity.high)}")
    say(f"highest rate that passed: {rate(capacity.winner)}, {'confirmed' if capacity.confirmed else 'NOT confirmed'}")
    if capacity.ended:
        say(f"the search ended before it was done: {capacity.ended}")
    if capacity.generator_limited:
        say("the generator was sick at a rate that the target might have kept: give it more workers or cores")
    if sick := [probe for probe in capacity.probes if not probe.valid]:
        say(
            f"{len(sick)} of {len(capacity.probes)} probes were invalid, the last at {sick[-1].ask.rate:.4g}/s: {sick[-1].reason}"
        )
    if not any(probe.valid for probe in capacity.probes):
        return ExitCode.INVALID
    say(str(write_report(out)))
    return ExitCode.PASS if capacity.confirmed else ExitCode.UNDECIDED
