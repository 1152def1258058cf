"""A service level objective is a limit on a latency metric, and the quantile of the requests that must keep the limit."""

import re
from typing import Literal, get_args

from pydantic import Field

from loadtest.errors import UsageError
from loadtest.plan.laws import Part
from loadtest.wording import percentile

Metric = Literal["ttft", "tpot", "itl", "max_itl", "e2e"]
"""TTFT and E2E count from the due time. TPOT is a request's mean gap between tokens, max_itl its largest gap; ITL is each gap."""


class Limit(Part):
    """The share ``quantile`` of all scheduled requests must have ``metric`` <= ``limit_s``; failed requests count as over the limit.

    For itl, the share is of all gaps; a failed request adds a gap over the limit for each token that it did not deliver.
    """

    metric: Metric
    quantile: float = Field(gt=0, lt=1)
    limit_s: float = Field(gt=0)

    def __str__(self) -> str:
        return f"{self.metric}_{percentile(self.quantile)}={self.limit_s * 1000:g}ms"


class Slo(Part):
    """The limits of a run. Goodput counts requests inside all limits, whatever the quantiles of the limits are."""

    name: str = ""
    limits: tuple[Limit, ...] = ()

    def __str__(self) -> str:
        words = ",".join(map(str, self.limits))
        return f"{self.name} ({words})" if self.name else words or "none"


def _mlperf(name: str, ttft_ms: float, tpot_ms: float) -> Slo:
    limits = (
        Limit(metric="ttft", quantile=0.99, limit_s=ttft_ms / 1000),
        Limit(metric="tpot", quantile=0.99, limit_s=tpot_ms / 1000),
    )
    return Slo(name=f"mlperf-{name}", limits=limits)


PRESETS = {
    slo.name: slo
    for slo in (
        _mlperf("llama3.1-8b", 2000, 100),
        _mlperf("llama3.1-8b-interactive", 500, 30),
        _mlperf("llama2-70b", 2000, 200),
        _mlperf("llama2-70b-interactive", 450, 40),
        _mlperf("llama3.1-405b", 6000, 175),
        _mlperf("llama3.1-405b-interactive", 4500, 80),
        _mlperf("mixtral-8x7b", 2000, 200),
        _mlperf("deepseek-r1", 2000, 80),
        _mlperf("deepseek-r1-interactive", 1500, 15),
        _mlperf("gpt-oss-120b", 3000, 80),
        _mlperf("gpt-oss-120b-interactive", 2000, 20),
    )
}
"""Server-scenario limits of MLPerf Inference (rules of 2026-07)."""

_TERM = re.compile(r"(?P<metric>[a-z0-9_]+)_p(?P<percent>[0-9.]+)=(?P<value>[0-9.]+)(?P<unit>ms|s)")


def parse_slo(text: str) -> Slo:
    """Parse the name of a preset, or terms such as ``ttft_p99=500ms,itl_p99=80ms``.

    Raises:
        UsageError: The message names the term and the way out.
    """
    text = text.strip()
    if text in PRESETS:
        return PRESETS[text]
    limits = []
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise UsageError("slo", f"{term.strip()!r} is neither like ttft_p99=500ms nor one of {', '.join(PRESETS)}")
        limits.append(_limit(term.strip(), match))
    return Slo(limits=tuple(limits))


def _limit(term: str, match: re.Match[str]) -> Limit:
    metric = match["metric"]
    if metric not in get_args(Metric):
        raise UsageError("slo", f"{term!r}: {metric} is not one of {', '.join(get_args(Metric))}")
    try:
        percent, value = float(match["percent"]), float(match["value"])
    except ValueError:
        raise UsageError("slo", f"{term!r} holds something that is no number") from None
    quantile = round(percent / 100, 9)  # 99.9 / 100 is not equal to the 0.999 of the presets
    if not 0 < quantile < 1 or value <= 0:
        raise UsageError("slo", f"{term!r}: the percentile must be between 0 and 100, with 7 decimals at most, the limit above 0")
    return Limit(metric=metric, quantile=quantile, limit_s=value / 1000 if match["unit"] == "ms" else value)
