"""This module reports a search: SEARCH/saturate.json (`loadtest.judge.search.Capacity`), and its probes' runs."""

import shlex
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadtest.errors import UsageError
from loadtest.inputs import regular
from loadtest.judge.analysis import analyse
from loadtest.judge.search import Capacity, Probe
from loadtest.judge.summary import Quantile, Summary, interval, read_summary
from loadtest.plan.recorded import recorded_scenario
from loadtest.plan.slo import Limit
from loadtest.records import Manifest, read_manifest
from loadtest.report.figure_kinds import LOAD_KINDS, Found
from loadtest.report.figures import draw_all
from loadtest.report.plots_load import ProbePoint
from loadtest.wording import percentile


def search_context(search: Path) -> dict[str, Any]:
    """Draw the search's figures; return the values of its page.

    Raises:
        UsageError: saturate.json cannot be read, or a probe's folder is missing.
    """
    try:
        capacity = msgspec.json.decode(regular(search / "saturate.json").read_bytes(), type=Capacity)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UsageError(str(search / "saturate.json"), f"{exc}; put back the file as the search wrote it") from exc
    runs = dict(_runs(search, {probe.ask.seed for probe in capacity.probes}))
    missing = [probe.ask.seed for probe in capacity.probes if probe.ask.seed not in runs]
    if missing or not runs:
        raise UsageError(str(search), f"the runs of {len(missing)} probes are missing, the first with seed {missing[:1]}")
    folder, manifest, _ = next(iter(runs.values()))
    scenario = recorded_scenario(folder, manifest)
    limit = scenario.slo.limits[0]
    points, rows = [], []
    for probe in capacity.probes:
        summary = runs[probe.ask.seed][2]
        points.append(_point(probe, summary, capacity, limit))
        rows.append(_row(probe, points[-1], summary, limit))
    threats = Counter(threat for *_, summary in runs.values() for threat in summary.threats)
    found = Found(points, f"{limit.metric.upper()} {percentile(limit.quantile)}", limit.limit_s, capacity.low, capacity.high)
    head = ("rate", "purpose", "verdict of the rate", "steady", "n", "completed/s", "goodput/s", found.metric)
    return {
        "title": f"Capacity: {manifest.scenario['name']}",
        "subtitle": f"{', '.join(scenario.models(manifest.model))} at {manifest.target}, SLO {scenario.slo}",
        "verdict": _verdict(capacity, found.knees()),
        "probes": {"head": head, "rows": rows},
        "load_figures": draw_all(LOAD_KINDS, found, search / "figures"),
        "command": shlex.join(manifest.command),
        "threats": [f"{threat} ({num} of {len(runs)} probes)" for threat, num in sorted(threats.items())],
    }


def _runs(search: Path, seeds: Container[int]) -> Iterator[tuple[int, tuple[Path, Manifest, Summary]]]:
    """Yield the runs of the probes with their seeds; each probe has its own seed."""
    for folder in sorted(path.parent for path in search.glob("*/manifest.json")):
        try:
            manifest = read_manifest(folder)
        except UsageError:  # the run never began, so the search does not have it either
            continue
        if (seed := int(manifest.scenario["seed"])) in seeds:
            yield seed, (folder, manifest, read_summary(folder) if (folder / "summary.json").exists() else analyse(folder))


def _quantile(summary: Summary, limit: Limit) -> Quantile | None:
    distribution = summary.distributions.get(limit.metric)
    return distribution.at(limit.quantile) if distribution else None


def _point(probe: Probe, summary: Summary, capacity: Capacity, limit: Limit) -> ProbePoint:
    verdict = next((rate.verdict for rate in capacity.rates if rate.rate == probe.ask.rate), "undecided")
    quantile, done = _quantile(summary, limit), summary.throughput
    return ProbePoint(
        rate=probe.ask.rate,
        verdict=verdict if probe.valid else "invalid",
        goodput=done.goodput if done else 0.0,
        completed=done.completed if done else 0.0,
        latency_s=quantile.value_s if quantile else None,
        n=sum(summary.states.values()),
    )


def _row(probe: Probe, point: ProbePoint, summary: Summary, limit: Limit) -> list[str]:
    quantile = _quantile(summary, limit)
    steady = {True: "yes", False: "no", None: "not known"}[summary.steady]
    words = [f"{point.rate:.3g}/s", probe.ask.purpose, point.verdict, steady, str(point.n)]
    if not probe.valid:
        return [*words, "", "", ""]
    return [*words, f"{point.completed:.2f}", f"{point.goodput:.2f}", interval(quantile) if quantile else ""]


def _verdict(capacity: Capacity, knees: dict[str, float]) -> dict[str, Any]:
    low, high = (None if rate is None else f"{rate:.3g}" for rate in (capacity.low, capacity.high))
    lines = [
        f"Highest rate that passed: {capacity.winner:.4g}/s, {'confirmed' if capacity.confirmed else 'NOT confirmed'} with fresh seeds."
        if capacity.winner is not None
        else "No rate passed.",
    ]
    if knees:
        lines.append("Knee: " + ", ".join(f"{knee:.3g}/s by {name}" for name, knee in knees.items()) + ".")
    lines += [f"Invalid at {probe.ask.rate:.3g}/s: {probe.reason}." for probe in capacity.probes if not probe.valid]
    if capacity.ended:
        lines.append(f"The search ended before it was done: {capacity.ended}.")
    if capacity.generator_limited:
        lines.append("The generator was sick at a rate that the target might have kept: the capacity may be higher.")
    if capacity.rate is None:
        return {"tone": "undecided", "words": "The capacity is outside the tried rates", "lines": lines}
    interval = f"{low or 'below all tried rates'} to {high or 'above all tried rates'}"
    tone = "pass" if capacity.confirmed else "undecided"
    return {"tone": tone, "words": f"Capacity {capacity.rate:.3g} requests/s, 95 % interval {interval}", "lines": lines}
