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
    """The percentile; None: it lies beyond all measured values (``censored_s`` or ``failed``), or there is no sample."""
    low_s: float | None = None
    high_s: float | None = None
    """Upper end of the interval; None: the sample is too small to bound it on that side, or ``high_failed``."""
    censored_s: float | None = None
    """The timeout, if the percentile is at least that and no more is known."""
    failed: bool = False
    """Whether the percentile lies among failed requests, which are infinitely slow. A field of its own, because JSON has no infinity."""
    high_failed: bool = False
    """Whether the upper bound lies among requests that failed, timed out or were cancelled: a larger sample would not make it finite."""


class Distribution(msgspec.Struct, frozen=True, omit_defaults=True):
    """One latency metric over all requests that were due in the window (itl: over their gaps); failed requests are infinite."""

    metric: str
    """ttft and e2e count from the due time, send_ttft and send_e2e from sending; lag; tpot and max_itl per request; itl: each gap."""
    n: int
    num_failed: int
    """Of n, the requests that failed, timed out or were rejected; they count as the largest values."""
    n_eff: float
    """Number of independent samples that the series is worth for its p99; the interval of each percentile uses its own number."""
    method: str
    """Method of the intervals."""
    mean_s: float | None
    """Mean of all n; None: some requests failed, whose time is infinite, or were cancelled."""
    quantiles: list[Quantile]
    mean_answered_s: float | None = None
    """Mean of the exactly known values: n less ``num_failed`` and ``num_left``. Users had a higher mean if requests failed or timed out."""
    num_left: int = 0
    """Of n, the requests that the load generator cancelled before the metric was known. They count as "at least so long"."""

    def at(self, q: float) -> Quantile | None:
        """Return the percentile; None: it was not computed."""
        return next((quantile for quantile in self.quantiles if quantile.q == q), None)


class Gate(msgspec.Struct, frozen=True):
    """One condition for the validity of the numbers."""

    name: str
    ok: bool
    value: float | None
    limit: float
    text: str
    """A sentence for readers: the observed value and, if it is not ok, the way out."""


class LimitResult(msgspec.Struct, frozen=True):
    """One limit of the SLO, judged."""

    limit: str
    verdict: Literal["pass", "fail", "undecided"]
    attained: float
    """Share of the scheduled requests (itl: of the gaps) inside the limit, without the ``unknown`` ones; 0 if all are unknown."""
    low: float
    high: float
    """Upper end of the 95 % interval. Unknown requests count as over the limit for ``low``, and as inside for ``high``."""
    n_eff: float
    """Number of independent samples behind the judgement."""
    unknown: float = 0.0
    """Share of the scheduled requests that the load generator cancelled before the limit: it is unknown if they would have kept it."""

    @property
    def at_least(self) -> float:
        """Return the share that is known to be inside the limit."""
        return self.attained * (1 - self.unknown)

    @property
    def at_most(self) -> float:
        """Return the share that is not known to be over the limit."""
        return self.at_least + self.unknown

    @property
    def counts(self) -> tuple[float, float]:
        """Return the independent samples, and how many of them are not known to be inside the limit; both real numbers."""
        return self.n_eff, self.n_eff * (1 - self.at_least)


class Throughput(msgspec.Struct, frozen=True):
    """Rates of requests and tokens per second of the window."""

    offered: float
    completed: float
    goodput: float
    """Requests inside all limits of the SLO; without an SLO, completed requests."""
    output_tokens: float
    total_tokens: float | None = None
    """Output and prompt tokens, as some published tables count. None: for some answer the server did not report the prompt's tokens."""
    intervals: dict[str, tuple[float, float]] = {}
    """By field, the 95 % interval of the rate that a longer run would have (`loadtest.judge.stats.rate_interval`).

    Fields that count fewer than `loadtest.judge.stats.MIN_COUNTED` requests are left out.
    """


class Group(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The figures of a group of the window's requests."""

    n: int
    num_failed: int
    prompt_tokens: float | None
    """Mean of the server's counts; None: the server reported none."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    """The p95 of the TTFT; None: it lies among failed requests."""
    num_good: int | None = None
    """Number of requests inside all limits of the SLO; None: the scenario has none."""


class Turn(Group, frozen=True, omit_defaults=True, kw_only=True):
    """All requests of the window that were turn ``number`` of their conversation. Their prompts contain all earlier messages."""

    number: int
    """Number of the turn, from 1."""


class ClassOfRequests(Group, frozen=True, omit_defaults=True, kw_only=True):
    """All requests of the window that are of one class of the scenario."""

    name: str
    model: str
    """The model that the requests named."""


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """All figures of a report. ``distributions`` and ``throughput`` are empty for an invalid run."""

    scenario: str
    verdict: Literal["pass", "slo-missed", "undecided", "invalid"]
    loop: Literal["open", "closed"]
    window_s: tuple[float, float]
    gates: list[Gate]
    states: dict[str, int]
    """Number of the window's scheduled requests by final state; ``unaccounted`` requests have no row."""
    schedule_sha256: str
    slo: list[LimitResult] = []
    throughput: Throughput | None = None
    distributions: dict[str, Distribution] = {}
    num_stalls: int = 0
    coalesced_share: float = 0.0
    """Share of reads that held several events: the server or a proxy batches, or the client was late."""
    warmup_cut_s: float = 0.0
    steady: bool | None = None
    """Whether the run is steady; None: the run was too short to decide."""
    threats: list[str] = []
    """Threats to validity, one sentence each."""
    cost: Cost | None = None
    """Cost of the window; None: the run is invalid, or its window empty."""
    turns: list[Turn] = []
    """Figures per turn; empty if the scenario has no conversations."""
    classes: list[ClassOfRequests] = []
    """Figures per class; empty if the scenario has one class of requests."""
    tokens: dict[str, int] = {}
    """Output tokens by usage, by chunks and by the tokenizer, and the number of rows that disagree."""


def read_summary(run: Path) -> Summary:
    """Read summary.json of a run.

    Raises:
        UsageError: The file is missing or broken, or an earlier version wrote it.
    """
    path = run / "summary.json"
    try:
        return msgspec.json.decode(regular(path).read_bytes(), type=Summary)
    except OSError as exc:
        raise UsageError(str(run), f"holds no summary: {exc.strerror}; `report` makes it from the records") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UsageError(str(path), f"{exc}; `report` makes it again from the records") from exc


def rate_interval(throughput: Throughput, name: str) -> str:
    """Return text like ``12.3 [11.8, 12.8]``: the rate of the field ``name`` per second, four digits."""
    value, bounds = getattr(throughput, name), throughput.intervals.get(name)
    return f"{value:,.4g}" if bounds is None else f"{value:,.4g} [{bounds[0]:,.4g}, {bounds[1]:,.4g}]"


def interval(quantile: Quantile) -> str:
    """Return text like ``123 ms [118, 130]`` or ``123 ms [118, ∞]``.

    It is ``≥ 120 s`` or ``∞ (failed)`` if the percentile lies among requests without a value.
    """
    if quantile.value_s is None:
        if quantile.failed:
            return "∞ (failed)"
        return "n too small" if quantile.censored_s is None else f"≥ {seconds([quantile.censored_s])[0]}"
    value, *bounds = seconds([quantile.value_s, quantile.low_s, math.inf if quantile.high_failed else quantile.high_s])
    return f"{value} [{bounds[0]}, {bounds[1]}]"
