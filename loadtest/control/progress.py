"""The terminal shows a run's progress, read from the files that the run writes, and the verdict at its end."""

import bisect
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from loadtest.judge.metrics import is_good
from loadtest.judge.stats import quantile
from loadtest.judge.summary import Distribution, Summary, interval, rate_interval
from loadtest.plan.laws import Closed
from loadtest.plan.scenario import Scenario
from loadtest.plan.schedule import Schedule
from loadtest.records import HealthSample, Manifest, Row
from loadtest.report.tiles import ANSWERED, cost_lines
from loadtest.wording import VERDICTS, percentile, share

RECENT_S = 10.0
"""Window of the live figures: TTFT, goodput and lag are those of the last ten seconds."""
LINE_S = 5.0
"""Without a terminal, a line is printed every five seconds."""
ONE_LINE = 130
"""Terminal width at which counts, figures and bar fit on one line. In a narrower terminal the figures have their own line."""
SHOWN = (0.5, 0.9, 0.99)
"""Percentiles of the table at the end."""
T = TypeVar("T", bound=msgspec.Struct)


class Follower:
    """A reader that returns the lines appended to a file since its last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, kind: type[T]) -> list[T]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return msgspec.json.Decoder(kind).decode_lines(whole)


class Figures:
    """The live figures of the rows and samples so far. Pure; times are seconds from the epoch."""

    def __init__(self, scenario: Scenario, schedule: Schedule) -> None:
        self._limits = scenario.slo.limits
        self._end_s = scenario.duration_s
        self._closed = isinstance(scenario.arrival, Closed)
        self._streams = {cls.name: cls.stream for cls in scenario.requests}
        self._requests = schedule.requests
        self._due = [] if scenario.has_conversations else [r.due_s for r in schedule.requests if r.due_s is not None]
        self._recent: deque[tuple[float, float | None, bool]] = deque()
        self._health: dict[int, HealthSample] = {}
        self.states: Counter[str] = Counter()

    def add(self, rows: list[Row], samples: list[HealthSample]) -> None:
        for row in rows:
            left_out = row.state == "never_sent" and row.due_s >= self._end_s
            self.states["left out" if left_out else row.state] += 1
            if row.end_s is not None:
                begin_s = row.sent_s if self._closed and row.sent_s is not None else row.due_s
                ttft_s = row.first_s - begin_s if row.state in ANSWERED and row.first_s is not None else None
                self._recent.append((row.end_s, ttft_s, self._is_good(row)))
        self._health.update({sample.worker: sample for sample in samples})

    def _is_good(self, row: Row) -> bool:
        request = self._requests[row.id]
        return is_good(request, row, self._limits, closed=self._closed, stream=self._streams[request.cls])

    @property
    def num_done(self) -> int:
        return self.states.total()

    def text(self, now_s: float, *, between: str = "  ") -> str:
        """Return counts and figures, separated by ``between``."""
        while self._recent and self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        ttft = np.array([value for _, value, _ in self._recent if value is not None])
        good = sum(is_good for _, _, is_good in self._recent) / max(1.0, min(now_s, RECENT_S))
        left_out = self.states["left out"]
        failed = self.num_done - self.states["ok"] - self.states["cancelled"] - left_out
        num_sent = sum(sample.num_sent for sample in self._health.values())
        due = [f"due {bisect.bisect_right(self._due, now_s)}"] if self._due else []
        counts = [*due, f"sent {num_sent}", f"done {self.num_done - left_out}", f"failed {failed}"]
        figures: list[str] = []
        if ttft.size:
            figures.append(f"TTFT p50 {quantile(ttft, 0.5) * 1e3:.0f} ms")
        if self._recent:
            figures.append(f"good {good:.1f}/s")
        if self._health:
            figures.append(f"lag {max(sample.lag_max_s for sample in self._health.values()) * 1e3:.0f} ms")
        return between.join("  ".join(each) for each in (counts, figures) if each)


class Progress:
    """A bar with live figures on a terminal, plain lines elsewhere."""

    def __init__(self, out: Path, scenario: Scenario, schedule: Schedule, *, quiet: bool) -> None:
        self._figures = Figures(scenario, schedule)
        self._followers = Follower(out / "rows.jsonl"), Follower(out / "health.jsonl")
        self._quiet = quiet
        self._console = Console(stderr=True)
        self._between = "  " if self._console.width >= ONE_LINE else "\n"
        self._bar: Bar | None = None
        if self._console.is_terminal and not quiet:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn()
            self._bar = Bar(*columns, console=self._console, auto_refresh=False)
            self._task = self._bar.add_task(scenario.name, total=len(schedule.requests))
        self._name = scenario.name
        self._began_at: float | None = None
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        if self._bar:
            self._bar.stop()

    def start(self, epoch_unix_s: float) -> None:
        self._began_at = time.perf_counter() + epoch_unix_s - time.time()

    def update(self) -> None:
        now = time.perf_counter()
        if not self._quiet and now - self._shown_at > (0.5 if self._bar else LINE_S):
            self._show()

    def _show(self) -> None:
        if self._quiet or self._began_at is None:
            return
        self._shown_at = time.perf_counter()
        now_s = self._shown_at - self._began_at
        rows, health = self._followers
        self._figures.add(rows.read(Row), health.read(HealthSample))
        if self._bar:
            text = f"{self._name}  {self._figures.text(now_s, between=self._between)}"
            self._bar.update(self._task, completed=self._figures.num_done, description=text, refresh=True)
        elif now_s >= 0:
            print(f"{now_s:6.0f} s  {self._figures.text(now_s)}", file=sys.stderr, flush=True)


def print_verdict(summary: Summary, manifest: Manifest, where: Path) -> None:
    """Print the verdict and figures of the run; for an invalid run the reasons and no figures."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 110)  # a table that is cut off would hide figures
    states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summary.states.items())
    note = " (interrupted)" if manifest.state == "interrupted" else ""
    if summary.verdict == "pass" and not summary.slo:
        note += " (there is no SLO to judge by)"
    verdict = VERDICTS[summary.verdict]
    console.print(
        f"[bold {verdict.colour}]{verdict.word}[/]{note}  {summary.scenario}, {summary.loop} loop: {states or 'no requests'}"
    )
    if summary.verdict == "invalid":
        for gate in summary.gates:
            if not gate.ok:
                console.print(f"  {gate.name}: {gate.text}", markup=False)
    else:
        _print_figures(console, summary)
    for threat in summary.threats if summary.verdict != "invalid" else ():
        console.print(f"  note: {threat}", markup=False)
    console.print(f"  {where}", markup=False)


def _print_figures(console: Console, summary: Summary) -> None:
    for result in summary.slo:
        bounds = f"{share(result.low)} .. {share(result.high)}"
        what = "gaps" if result.limit.startswith("itl_") else "requests"
        console.print(f"  {result.limit}: {result.verdict}, {share(result.attained)} of the {what} inside ({bounds})")
    if summary.throughput:
        t = summary.throughput
        completed, good, tokens = (rate_interval(t, name) for name in ("completed", "goodput", "output_tokens"))
        console.print(
            f"  offered {t.offered:.2f}/s, completed {completed}/s, good {good}/s; {tokens} output tokens/s", markup=False
        )
    if summary.cost and (lines := [f"{line.value} {line.note}" for line in cost_lines(summary.cost)]):
        console.print(f"  cost: {', '.join(lines)}", markup=False)
    table = Table("95 % interval", "n", "n_eff", *map(percentile, SHOWN), box=None, padding=(0, 2), header_style="dim")
    for column in table.columns:
        column.no_wrap = True
    for metric in ("ttft", "tpot", "itl", "max_itl", "e2e", "send_ttft", "lag"):
        if distribution := summary.distributions.get(metric):
            table.add_row(*_table_row(distribution))
    console.print(table)


def _table_row(distribution: Distribution) -> list[str]:
    counts = [str(distribution.n), f"{distribution.n_eff:.0f}"]
    return [distribution.metric, *counts, *(interval(at) if (at := distribution.at(q)) else "" for q in SHOWN)]
