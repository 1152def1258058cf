"""The summary is one run's figures as data: `loadtest.judge.analysis` makes it; reports, comparisons and searches read it.

Only `read_summary` does IO.
"""

import math
from pathlib import Path
from typing import Literal

import msgspec

from loadtest.errors import UsageError
from loadtest.inputs import regular
from loadtest.judge.cost import Cost
from loadtest.wording import seconds


class Quantile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A percentile with its 95 % interval."""

    q: float
    value_s: float | None
    """None: it lies beyond all that was measured (``censored_s`` or ``failed``), or there is no sample."""
    low_s: float | None = None
    high_s: float | None = None
    """None: the sample is too small to bound it on that side, or ``high_failed``."""
    censored_s: float | None = None
    """The percentile is at least this, the timeout: it cannot be told more exactly."""
    failed: bool = False
    """The percentile lies among requests that failed, which are infinitely slow. A field of its own: JSON has no infinity."""
    high_failed: bool = False
    """The upper bound lies among requests that failed, timed out or were left: a larger sample would not make it finite."""


class Distribution(msgspec.Struct, frozen=True, omit_defaults=True):
    """One latency metric over all requests that were due in the window (itl: over their gaps), failed ones as infinite."""

    metric: str
    """ttft, e2e from the due time; send_ttft, send_e2e from sending; lag; tpot, max_itl of a request; itl: each gap between tokens."""
    n: int
    num_failed: int
    """Of n: failed, timed out, rejected; they stay inside as the largest values."""
    n_eff: float
    """How many independent samples the series is worth for its p99; each percentile's interval is by its own."""
    method: str
    """How the intervals were made."""
    mean_s: float | None
    """Of all n; None: some failed, whose time is infinite, or were left."""
    quantiles: list[Quantile]
    mean_answered_s: float | None = None
    """Of those known exactly: n less ``num_failed`` and ``num_left``. Lower than what users had, where some failed or timed out."""
    num_left: int = 0
    """Of n: this side left them before the metric was known. They count as at least so long."""

    def at(self, q: float) -> Quantile | None:
        """Return the percentile; None: it was not computed."""
        return next((quantile for quantile in self.quantiles if quantile.q == q), None)


class Gate(msgspec.Struct, frozen=True):
    """One condition under which the numbers may be believed."""

    name: str
    ok: bool
    value: float | None
    limit: float
    text: str
    """For people: what was seen, and what to do when it is not ok."""


class LimitResult(msgspec.Struct, frozen=True):
    """One limit of the SLO, judged."""

    limit: str
    verdict: Literal["pass", "fail", "undecided"]
    attained: float
    """Share of the scheduled requests (of itl: of the gaps) inside the limit, without those that are ``unknown``; 0: all are."""
    low: float
    high: float
    """The 95 % interval. All that is unknown counts as over the limit for ``low``, and as inside for ``high``."""
    n_eff: float
    """Independent samples that it was judged by."""
    unknown: float = 0.0
    """Share of the scheduled requests that this side left before the limit: it is not known whether they would have kept it."""

    @property
    def at_least(self) -> float:
        """The share that is known to be inside the limit."""
        return self.attained * (1 - self.unknown)

    @property
    def at_most(self) -> float:
        """The share that is not known to be over the limit."""
        return self.at_least + self.unknown

    @property
    def counts(self) -> tuple[float, float]:
        """The independent samples, and how many of them are not known to be inside the limit; both real."""
        return self.n_eff, self.n_eff * (1 - self.at_least)


class Throughput(msgspec.Struct, frozen=True):
    """Per second of the window; requests and tokens."""

    offered: float
    completed: float
    goodput: float
    """Requests inside all limits of the SLO; without an SLO, the completed ones."""
    output_tokens: float
    total_tokens: float | None = None
    """Prompt tokens included, as some published tables count. None: of some answer the server did not say how many its prompt had."""
    intervals: dict[str, tuple[float, float]] = {}
    """By field: 95 % interval of the rate that a longer run would have (`loadtest.judge.stats.rate_interval`).

    Without the fields that count fewer than `loadtest.judge.stats.MIN_COUNTED` requests.
    """


class Group(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Some of the window's requests."""

    n: int
    num_failed: int
    prompt_tokens: float | None
    """Mean of what the server counted; None: it did not say."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    """None: it lies among the requests that failed."""
    num_good: int | None = None
    """Those that ended within all limits of the SLO; None: the scenario has none."""


class Turn(Group, frozen=True, omit_defaults=True, kw_only=True):
    """All requests of the window that were their conversation's turn ``number``. All that was said before is in their prompts."""

    number: int
    """From 1."""


class ClassOfRequests(Group, frozen=True, omit_defaults=True, kw_only=True):
    """All requests of the window that are of one class of the scenario."""

    name: str
    model: str
    """What they asked."""


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything a report prints. ``distributions`` and ``throughput`` are empty of an invalid run."""

    scenario: str
    verdict: Literal["pass", "slo-missed", "undecided", "invalid"]
    loop: Literal["open", "closed"]
    window_s: tuple[float, float]
    gates: list[Gate]
    states: dict[str, int]
    """How many scheduled requests of the window ended how; ``unaccounted`` has no row."""
    schedule_sha256: str
    slo: list[LimitResult] = []
    throughput: Throughput | None = None
    distributions: dict[str, Distribution] = {}
    num_stalls: int = 0
    coalesced_share: float = 0.0
    """Share of reads that held several events: the server or a proxy batches, or the client was late."""
    warmup_cut_s: float = 0.0
    steady: bool | None = None
    """None: the run was too short to say."""
    threats: list[str] = []
    """Threats to validity, one sentence each."""
    cost: Cost | None = None
    """None: the run is invalid, or its window empty."""
    turns: list[Turn] = []
    """Empty: the scenario has no conversations."""
    classes: list[ClassOfRequests] = []
    """Empty: the scenario has one class of requests."""
    tokens: dict[str, int] = {}
    """Output tokens by usage, by chunks and by the tokenizer, and how many rows disagree."""


def read_summary(run: Path) -> Summary:
    """Read summary.json of a run.

    Raises:
        UsageError: There is none, or it is broken, or an earlier version wrote it.
    """
    path = run / "summary.json"
    try:
        return msgspec.json.decode(regular(path).read_bytes(), type=Summary)
    except OSError as exc:
        raise UsageError(str(run), f"holds no summary: {exc.strerror}; `report` makes it from the records") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UsageError(str(path), f"{exc}; `report` makes it again from the records") from exc


def rate_interval(throughput: Throughput, name: str) -> str:
    """Return such as ``12.3 [11.8, 12.8]``: a rate of the field ``name`` per second, four digits."""
    value, bounds = getattr(throughput, name), throughput.intervals.get(name)
    return f"{value:,.4g}" if bounds is None else f"{value:,.4g} [{bounds[0]:,.4g}, {bounds[1]:,.4g}]"


def interval(quantile: Quantile) -> str:
    """Return such as ``123 ms [118, 130]`` or ``123 ms [118, ∞]``.

    ``≥ 120 s`` or ``∞ (failed)`` when the percentile lies among the requests without a value.
    """
    if quantile.value_s is None:
        if quantile.failed:
            return "∞ (failed)"
        return "n too small" if quantile.censored_s is None else f"≥ {seconds([quantile.censored_s])[0]}"
    value, *bounds = seconds([quantile.value_s, quantile.low_s, math.inf if quantile.high_failed else quantile.high_s])
    return f"{value} [{bounds[0]}, {bounds[1]}]"
