"""This module has what the tests of whole runs share: a scenario, and the records of a run."""

from pathlib import Path
from typing import Any

from loadtest.judge.summary import read_summary
from loadtest.plan.schedule import Schedule, read_schedule
from loadtest.proof.selftest.bench import ABOUT_TIME
from loadtest.records import Row, read_lines, read_manifest

WITHIN_S = 90.0


def a_scenario(**values: Any) -> dict[str, Any]:
    lengths = {"input_tokens": {"mean": 8}, "output_tokens": {"mean": 8}}
    arrival = {"law": "poisson", "rate": 30}
    base = {"name": "short", "arrival": arrival, "requests": [lengths], "duration_s": 2, "warmup_s": 0.5, "drain_s": 10}
    return {**base, "timeout_s": 10, "observe": {"metrics_url": "none"}, **values}


class Finished:
    """The records of a run."""

    def __init__(self, out: Path) -> None:
        self.manifest = read_manifest(out)
        self.summary = read_summary(out)
        self.schedule: Schedule = read_schedule(out / "schedule.jsonl")
        self.rows = list(read_lines(out / "rows.jsonl", Row))
        self.failed_gates = {gate.name for gate in self.summary.gates if not gate.ok} - ABOUT_TIME

    def ids(self) -> list[int]:
        return sorted(row.id for row in self.rows)
