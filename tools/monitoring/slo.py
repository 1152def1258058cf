"""This module makes the objectives: recording rules of what fails them, and alerts on how fast the error budget of 30 days burns.

Source: "The Site Reliability Workbook", chapter 5, multi-window multi-burn-rate alerts. The long window shows that the problem matters, and
the short window that it persists. An alert needs traffic: one failed request of three in a night is no outage.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.monitoring.rule import IN_JOB, Alert

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))
"""Burn rate, long window, short window: 2 % of the budget in an hour, 5 % in six hours. The person on call is paged."""
SLOW = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))
"""10 % of the budget in a day or in three days. This can wait until the morning."""

COUNTED = 'model!="",outcome!~"invalid|held_back|over_quota"'
"""Requests that count, without clients' mistakes, without what a tenant's own quota refuses, and without lines of a batch that are tried
again because a chat had the place."""
BAD = 'model!="",outcome=~"failed|rejected"'


class Slo(NamedTuple):
    """An objective. ``errors``: the share of bad events within ``WINDOW``, by job and model. ``objective`` is the name of a fact."""

    name: str
    objective: str
    errors: str
    alert: str
    what: str
    board: str

    def recorded(self, window: str) -> str:
        """Return the name of the recorded share of bad events."""
        return f"serve_app:{self.name}_errors:ratio_rate{window}"


def _requests(which: str) -> str:
    return f"sum by (job, model) (rate(serve_app_requests_total{{{IN_JOB},{which}}}[WINDOW]))"


def _late(series: str, limit: str, selector: str = IN_JOB, model: str = "model") -> str:
    """Return the share above a limit in a histogram whose label with the name of the model is ``model``.

    The Python client writes the end of a bucket as 1.0, other clients as 1.
    """
    bucket = f'sum by (job, {model}) (rate({series}_bucket{{{selector},le=~"{limit}([.]0)?"}}[WINDOW]))'
    return f"1 - {bucket} / sum by (job, {model}) (rate({series}_count{{{selector}}}[WINDOW]))"


def _late_of_vllm(series: str, limit: str) -> str:
    """Return the share above a limit in a histogram of vLLM, whose label model_name becomes model."""
    late = _late(f"vllm:{series}", limit, model="model_name")
    return f'sum by (job, model) (label_replace({late}, "model", "$1", "model_name", "(.*)"))'


_INTERACTIVE = f'{IN_JOB},model!="",priority="interactive"'
"""Tenants of lower priorities, and lines of batches, wait by design while others fill the engines."""


SLOS = (
    Slo(
        "availability",
        "${availability}",
        f"{_requests(BAD)} / {_requests(COUNTED)}",
        "ServeAppRequestsFail",
        "of the requests for {{ $labels.model }} fail or are rejected",
        "overview",
    ),
    Slo(
        "ttft",
        "${ttft_objective}",
        _late("serve_app_ttft_seconds", "${ttft_s}", _INTERACTIVE),
        "ServeAppFirstTokensAreLate",
        "of the interactive answers of {{ $labels.model }} begin later than ${ttft_s} s after the request",
        "model",
    ),
    Slo(
        "itl",
        "${itl_objective}",
        _late_of_vllm("inter_token_latency_seconds", "${itl_s}"),
        "ServeAppTokensAreLate",
        "of the tokens of {{ $labels.model }} come later than ${itl_s} s after the previous token",
        "model",
    ),
)


def records() -> Iterator[dict[str, Any]]:
    """Yield the recording rules."""
    for window in WINDOWS:
        for slo in SLOS:
            yield {"record": slo.recorded(window), "expr": slo.errors.replace("WINDOW", window)}
    for window in ("1h", "6h"):
        counted = f"sum by (job, model) (increase(serve_app_requests_total{{{IN_JOB},{COUNTED}}}[{window}]))"
        yield {"record": f"serve_app:requests:increase{window}", "expr": counted}


def burns() -> Iterator[Alert]:
    """Yield two alerts for each objective."""
    for slo in SLOS:
        yield Alert(
            slo.alert,
            "critical",
            "2m",
            _burning(slo, FAST, "1h"),
            f"{{{{ $value | humanizePercentage }}}} {slo.what}; the objective is {_share(slo)}.",
            slo.board,
        )
        yield Alert(
            f"{slo.alert}Slowly",
            "warning",
            "15m",
            _burning(slo, SLOW, "6h"),
            f"{{{{ $value | humanizePercentage }}}} {slo.what}, for hours; the objective is {_share(slo)}.",
            slo.board,
        )


def _share(slo: Slo) -> str:
    return f"{{{{ {slo.objective} | humanizePercentage }}}} that do not"


def _burning(slo: Slo, pairs: tuple[tuple[float, str, str], ...], traffic: str) -> str:
    """Return the condition; its value is the share of bad events in the short window of the pair that holds."""
    either = " or ".join(
        f"({slo.recorded(short)}{{{IN_JOB}}} > {rate:g} * (1 - {slo.objective})"
        f" and {slo.recorded(long)}{{{IN_JOB}}} > {rate:g} * (1 - {slo.objective}))"
        for rate, long, short in pairs
    )
    return f"({either}) and on (job, model) (serve_app:requests:increase{traffic}{{{IN_JOB}}} >= ${{min_requests}})"
