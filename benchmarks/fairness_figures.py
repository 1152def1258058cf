"""This module computes the figures of `benchmarks.fairness` from its phases: pure.

A request that was refused or failed has an infinite time to its first token. A request that the end of the phase has cut counts with the
time that it had waited until then; `Ttft.cut` counts such requests.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tenant_loads import Phase, Sent
from loadtest.quantiles import Floats, quantile

Groups = Mapping[tuple[str, str, str, int], Sequence[Phase]]
"""By part, name, side and number of ingresses: the phase of each seed, in the order of the seeds."""
WEIGHTS = {"weight-1": 1.0, "weight-2": 2.0, "weight-4": 4.0}
EQUAL = dict.fromkeys(("reader-1", "reader-2", "writer-1", "writer-2"), 1.0)
MAX_MACHINE, MAX_GENERATOR, MAX_LAG_S = 0.85, 0.85, 0.05
"""Busy share of all cores, on average; cores of the generator, on average; p99 of the time from a request's due time to its sending."""
RETRY_WITHIN = 0.25
REFUSED = (429, 503)
_RETRY = re.compile(r"retry in ([0-9.]+) s")


@dataclass(frozen=True)
class Ttft:
    """Times to the first token, from the due time, in seconds."""

    values_s: Floats
    cut: int
    refused: int
    failed: int

    def quantile(self, q: float) -> float:
        return quantile(self.values_s, q)


def window(phase: Phase, prefix: str = "", *, attempt: int | None = 0) -> list[Sent]:
    """Return the requests that were due within the window, of the tenants whose names begin with ``prefix``; ``attempt``: None for all."""
    return [
        sent
        for sent in phase.sent
        if sent.tenant.startswith(prefix) and attempt in (None, sent.attempt) and phase.warmup_s <= sent.row.due_s < phase.until_s
    ]


def ttft(sent: Iterable[Sent]) -> Ttft:
    kinds, values = Counter[str](), []
    for row in (each.row for each in sent):
        if row.first_s is not None:
            values.append(row.first_s - row.due_s)
        elif row.state == "timeout" and row.end_s is not None:
            kinds["cut"] += 1
            values.append(row.end_s - row.due_s)
        else:
            kinds["refused" if row.status in REFUSED else "failed"] += 1
            values.append(np.inf)
    return Ttft(np.sort(np.array(values, dtype=float)), kinds["cut"], kinds["refused"], kinds["failed"])


def answered_ttft(sent: Iterable[Sent]) -> Ttft:
    """Return the times of the requests that were admitted and did not end at their deadline. Those that did are in `ended_at_deadline`."""
    return ttft(each for each in sent if each.row.status not in REFUSED and not _waited(each))


def tokens_per_s(phase: Phase, prefix: str = "") -> float:
    """Return the tokens of answers that came within the window, in a second."""
    total = 0
    for row in (each.row for each in phase.sent if each.tenant.startswith(prefix) and each.row.sent_s is not None):
        begin, end = (1000 * (at - (row.sent_s or 0.0)) for at in (phase.warmup_s, phase.until_s))
        total += sum(num for ms, num in row.chunks if begin <= ms < end)
    return total / (phase.until_s - phase.warmup_s)


def hit_share(phase: Phase) -> float:
    """Return which share of the prompts' tokens was in a prefix cache, of the requests that began to be answered in the window."""
    return sum(each.cached for each in phase.served.values()) / max(1, sum(each.prompt for each in phase.served.values()))


def shares(phase: Phase) -> dict[str, float]:
    """Return each tenant's share of the GPU-seconds in the window."""
    total = sum(each.gpu_s for each in phase.served.values())
    return {tenant: each.gpu_s / total for tenant, each in sorted(phase.served.items())}


def jain(values: Iterable[float]) -> float:
    """Return Jain's index, from 1/n, where one has all, to 1, where all have the same."""
    x = np.array(list(values), dtype=float)
    return float(x.sum() ** 2 / (x.size * (x**2).sum()))


def worst_share_error(phase: Phase, weights: Mapping[str, float]) -> float:
    """Return the largest deviation of a tenant's share from the share of its weight, relative to that."""
    found, total = shares(phase), sum(weights.values())
    return max(abs(found.get(name, 0.0) / (weight / total) - 1) for name, weight in weights.items())


def goodput(phase: Phase, within_s: float, *, attempt: int | None = None) -> float:
    """Return the requests of the window whose first token came in time after they were sent, in a second. Further attempts count too."""
    good = [each for each in window(phase, attempt=attempt) if in_time(each, within_s)]
    return len(good) / (phase.until_s - phase.warmup_s)


def answered_per_s(phase: Phase) -> float:
    """Return the requests of the window that got a first token, late or not, in a second. Further attempts count too."""
    return sum(each.row.first_s is not None for each in window(phase, attempt=None)) / (phase.until_s - phase.warmup_s)


def in_time(sent: Sent, within_s: float) -> bool:
    return sent.row.first_s is not None and sent.row.first_s - sent.row.due_s <= within_s


def refusal_s(phase: Phase) -> Floats:
    """Return how long the refusals took from sending to the end of the answer, of requests that were refused when they came.

    A request that waited until its deadline was admitted: it counts in `ended_at_deadline`.
    """
    return np.array([_took(each) for each in window(phase, attempt=None) if each.row.status in REFUSED and not _waited(each)])


def ended_at_deadline(phase: Phase) -> int:
    """Return how many requests of the window were admitted and still waited when the time for their first token was over."""
    return sum(_waited(each) for each in window(phase, attempt=None))


def admitted(phase: Phase) -> int:
    """Return how many requests of the window were not refused when they came."""
    return sum(each.row.status not in REFUSED or _waited(each) for each in window(phase, attempt=None))


def _took(sent: Sent) -> float:
    return (sent.row.end_s or 0.0) - (sent.row.sent_s or 0.0)


def _waited(sent: Sent) -> bool:
    """Return whether the error, or the last event of a silent stream, says that the request has waited: 'the request has waited 1.0 s'."""
    found = re.search(r"the request has waited ([0-9.]+) s", sent.row.reason)
    return found is not None and float(found[1]) > 0


def retry_errors(phase: Phase, *, own: bool = False, header: bool = False) -> Floats:
    """Return, for each refusal in the window, by which share its Retry-After differs from the time in which all have started that waited.

    These are the requests that were sent before the refusal, were admitted, and had their first token after it. ``own``: only those of the
    refused client's tenant. ``header``: the header's whole seconds in place of the error's words.
    """
    admitted = [each for each in phase.sent if each.row.first_s is not None and each.row.sent_s is not None]
    sent_s, first_s = (np.array([getattr(each.row, name) for each in admitted], dtype=float) for name in ("sent_s", "first_s"))
    tenants = np.array([each.tenant for each in admitted])
    errors = []
    for each in window(phase, attempt=None):
        words = _RETRY.search(each.row.reason)
        if each.row.status not in REFUSED or words is None or each.row.end_s is None:
            continue
        waits = (sent_s < each.row.end_s) & (first_s > each.row.end_s) & ((tenants == each.tenant) | (not own))
        if waits.any():
            said = each.row.retry_after_s if header and each.row.retry_after_s is not None else float(words[1])
            errors.append(said / (first_s[waits].max() - each.row.end_s) - 1)
    return np.array(errors, dtype=float)


def retry_right(errors: Floats) -> float:
    """Return the share of the refusals whose Retry-After is right within `RETRY_WITHIN`."""
    return float((np.abs(errors) <= RETRY_WITHIN).mean()) if errors.size else float("nan")


def growth_mib(phase: Phase) -> float:
    """Return the largest growth of a process in the window: median of its last third less that of its first third."""
    grown = []
    for values in phase.memory_mib.values():
        kept = values[int(len(values) * phase.warmup_s / phase.until_s) :]
        third = max(1, len(kept) // 3)
        grown.append(float(np.median(kept[-third:]) - np.median(kept[:third])) if kept else 0.0)
    return max(grown, default=float("nan"))


def ends(sent: Iterable[Sent]) -> dict[str, int]:
    """Return how many requests ended how: by status, or by the reason of a request that failed."""
    return dict(Counter(_end(each) for each in sent))


def _end(sent: Sent) -> str:
    row = sent.row
    if row.state == "timeout":
        return "cut"
    return (
        "answered" if row.state == "ok" else str(row.status) if row.status not in (0, 200) else f"{row.state}: {row.reason[:60]}"
    )


def problems(phase: Phase) -> list[str]:
    """Return why the phase is invalid; nothing if it is valid."""
    found = []
    if (busy := mean(phase.machine)) > MAX_MACHINE:
        found.append(f"the machine was {busy:.0%} busy, limit {MAX_MACHINE:.0%}")
    if (cores := mean([each.cpu for each in phase.health])) > MAX_GENERATOR:
        found.append(f"the generator used {cores:.2f} cores, limit {MAX_GENERATOR}")
    if (lag_s := lag(phase)) > MAX_LAG_S:
        found.append(f"the p99 of the generator's lag was {1000 * lag_s:.0f} ms, limit {1000 * MAX_LAG_S:.0f}")
    return found


def lag(phase: Phase) -> float:
    lags = [each.row.sent_s - each.row.due_s for each in window(phase, attempt=None) if each.row.sent_s is not None]
    return quantile(np.array(lags, dtype=float), 0.99)


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
