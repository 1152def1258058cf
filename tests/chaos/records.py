"""This module writes the measurements of a scenario, one JSON line per run.

python -m tests.chaos.records FOLDER          the worst of each scenario's runs
python -m tests.chaos.records FOLDER --rows   the same as rows of the table in benchmarks/results/faults.md, but for its first column
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType

import msgspec

from loadtest.judge.stats import share_bound
from serve_app.books.ledger_lines import LedgerLine, ledger_files
from tests.e2e_fleet.streams import Answer

NUM_RUNS = 5


@dataclass(frozen=True)
class Record:
    """One run. ``healed_s``: as its test says. Silences are of all streams, in seconds."""

    scenario: str
    seed: int
    n: int
    failures: int
    healed_s: float
    longest_silences_s: list[float]
    load_1min: float
    measured: dict[str, float] = field(default_factory=dict)
    """Measurements of this scenario alone, by names that end with their unit."""
    commit: str = ""
    missed: list[str] = field(default_factory=list)
    """Limits that it did not keep, in words."""


def folder() -> Path | None:
    """Return where runs are recorded: only ``make chaos`` says so."""
    found = os.environ.get("SERVE_APP_CHAOS")
    return Path(found) if found else None


def seeds(*, long: bool = False) -> range:
    """Return one seed per run. A scenario is ``long`` that takes over three minutes: it runs once."""
    return range(1, 1 + (NUM_RUNS if folder() and not long else 1))


def read(root: Path) -> list[Record]:
    return [Record(**json.loads(line)) for file in sorted(root.glob("*.jsonl")) for line in file.read_text().splitlines()]


def is_there(scenario: str, seed: int) -> bool:
    """Return whether the run was recorded and kept its limits. One that did not runs again, and both count."""
    root = folder()
    return root is not None and any((r.scenario, r.seed, r.missed) == (scenario, seed, []) for r in read(root))


def audit(
    scenario: str,
    seed: int,
    answers: Sequence[Answer],
    undisturbed: Answer,
    *,
    healed_s: float,
    measured: Mapping[str, float] = MappingProxyType({}),
    at_most: Mapping[str, float] = MappingProxyType({}),
) -> Record:
    """Count as failed each answer that is not complete or not token for token the undisturbed one; keep the record.

    ``at_most`` are limits of ``failures`` (else 0), of ``healed_s``, and of what is ``measured``. Those of times count only where runs are
    recorded: a test of a busy machine has no business with them.

    Raises:
        AssertionError: A limit was not kept.
    """
    failures = sum(not a.is_complete() or a.folded() != undisturbed.folded() for a in answers)
    silences = sorted(round(a.longest_silence_s(), 2) for a in answers)
    load_1min, others = round(os.getloadavg()[0], 1), {name: round(value, 2) for name, value in measured.items()}
    seen = {"failures": failures, "healed_s": healed_s, **measured}
    limits = {"failures": 0, **{name: limit for name, limit in at_most.items() if folder() or not name.endswith("_s")}}
    missed = [f"{name} {seen[name]:.4g} > {limit:g}" for name, limit in limits.items() if seen[name] > limit]
    record = Record(scenario, seed, len(answers), failures, round(healed_s, 2), silences, load_1min, others, commit(), missed)
    keep(record)
    assert not missed, missed
    return record


def keep(record: Record) -> None:
    """Add it to the records, where runs are recorded."""
    if (root := folder()) is not None:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{record.scenario}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def ledger_lines(root: Path) -> list[LedgerLine]:
    """Return what the ledger says of each request that has ended."""
    found = [line for file in ledger_files(root) for line in file.read_bytes().splitlines()]
    return [msgspec.json.decode(line, type=LedgerLine) for line in found if line.startswith(b'{"seq"')]


def commit() -> str:
    """Return what is checked out, with ``-dirty`` where files differ from it."""
    described = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(described, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def worst(records: Sequence[Record]) -> str:
    """Return a line of one scenario's runs. Bounds are 95 % upper ones: of answers as if each had its own fault, and of runs."""
    n, failures = sum(r.n for r in records), sum(r.failures for r in records)
    silences = [silence for r in records for silence in r.longest_silences_s]
    healed_s = max(r.healed_s for r in records)
    load = max(r.load_1min for r in records)
    bad_runs = sum(r.failures > 0 for r in records)
    below = f"below {share_bound(failures, n):.1%} of answers, {share_bound(bad_runs, len(records)):.0%} of runs"
    line = f"{records[0].scenario:28} runs {len(records)}  n {n}  failures {failures} ({below})  healed after {healed_s:.1f} s"
    others = [f"  {name} at most {max(r.measured[name] for r in records):g}" for name in records[0].measured]
    return f"{line}  silence p50 {median(silences):.1f} s, worst {max(silences):.1f} s{''.join(others)}  load {load:.1f}"


def row(records: Sequence[Record]) -> str:
    """Return one scenario's runs as columns: runs and answers, failures, healed p50 and worst, silence p50 and worst, loads."""
    n, failures = sum(r.n for r in records), sum(r.failures for r in records)
    silences = [silence for r in records for silence in r.longest_silences_s]
    healed, loads = [r.healed_s for r in records], [math.ceil(r.load_1min) for r in records]
    counted = (
        f"{len(records)}, {n} | {failures} (< {math.ceil(1000 * share_bound(failures, n)) / 10:.1f} %)"  # a bound is rounded up
    )
    times = " | ".join(f"{median(values):.1f} / {max(values):.1f} s" for values in (healed, silences))
    return f"| {records[0].scenario} | {counted} | {times} | {' to '.join(map(str, sorted({min(loads), max(loads)})))} |"


def main() -> None:
    records = read(Path(sys.argv[1]))
    shown = row if "--rows" in sys.argv[2:] else worst
    for scenario in sorted({r.scenario for r in records}):
        print(shown([r for r in records if r.scenario == scenario]))
    if late := [f"{r.scenario}, seed {r.seed}: {', '.join(r.missed)}" for r in records if r.missed]:
        raise SystemExit("\n".join(["limits that were not kept; remove these lines once their cause is mended:", *late]))


if __name__ == "__main__":
    main()
