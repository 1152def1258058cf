"""This module lists the threats to a run's figures, a sentence each: other explanations, and what the figures cannot show."""

import numpy as np

from loadtest.judge.health import read_lag_name
from loadtest.judge.metrics import Records
from loadtest.judge.summary import Summary
from loadtest.judge.window import Window
from loadtest.plan.laws import Burst
from loadtest.wording import share, shown

NOT_ESTIMABLE = "no interval where the run is too short beside its own slow swings"
"""The method of a distribution whose percentiles cannot be estimated from one run."""
MAX_REASON = 300
"""Shown characters of a row's reason, and of the error of a source of figures: as many as a run records."""
MAX_COALESCED_SHARE = 0.05
MAX_CLOCK_DRIFT_S = 0.5
MAX_READ_LAG_SHARE = 0.1
"""Read lag that is reported as a threat, as a share of the p99 of the gaps."""


def threats(records: Records, summary: Summary, items: Window) -> list[str]:
    """Return the threats: other explanations of the figures, and what the figures cannot show, one sentence each."""
    found = _threats_of_the_run(records, summary) | _threats_of_the_figures(records, summary)
    return [*(sentence for sentence, holds in found.items() if holds), *first_reason(items), *silent_sources(records)]


def first_reason(items: Window) -> list[str]:
    """Return the most frequent reason of the failed requests, which may contain the way out."""
    rows = items.records.columns
    failed = items.rows[~rows.is_state("ok", "cancelled")[items.rows]]
    if not failed.size:
        return []
    counts = np.bincount(rows.reason[failed])
    most = int(counts.argmax())
    reason = shown(rows.reasons[most], MAX_REASON) or "no reason given"
    return [f"{failed.size} requests failed; the most frequent reason, of {int(counts[most])} of them: {reason.rstrip('.')}."]


def silent_sources(records: Records) -> list[str]:
    """Return the sources of the target's own figures that gave nothing, and why."""
    answered = {sample.source for sample in records.server if not sample.error}
    errors = {sample.source: shown(sample.error, MAX_REASON) for sample in records.server if sample.source not in answered}
    said = {source: f"Nothing is known of the target's own figures ({source}): {error}." for source, error in errors.items()}
    if "serve" in errors and "fleet" in answered and not records.scenario.observe.fleet:
        said["serve"] = (
            f"Ray's dashboard at {records.scenario.observe.ray_dashboard_url} reported no replicas ({errors['serve']}): this report "
            "has those of the target's /fleet, which does not count ingresses."
        )
    return list(said.values())


def _threats_of_the_run(records: Records, summary: Summary) -> dict[str, bool]:
    manifest, scenario = records.manifest, records.scenario
    rows = records.columns
    unsaid = rows.is_state("never_sent") & (rows.due_s >= scenario.duration_s) & scenario.has_conversations
    num_unsaid = int(unsaid.sum())
    why = rows.reasons[rows.reason[unsaid][0]] if num_unsaid else ""
    num_cancelled, num_disagree = summary.states.get("cancelled", 0), summary.tokens.get("disagree", 0)
    return {
        "A closed loop sends only when an answer has ended: a stall of the target removes load and hides its own waiting time.": (
            summary.loop == "closed"
        ),
        "The window holds no requests.": not summary.states,
        f"The run was interrupted at {summary.window_s[1]:.0f} s of {scenario.duration_s:.0f} s.": manifest.state
        == "interrupted",
        f"The wall clock was stepped by {manifest.clock_drift_s:.1f} s; no latency depends on it, but times in logs do.": (
            abs(manifest.clock_drift_s) > MAX_CLOCK_DRIFT_S
        ),
        "The target computes on a simulated accelerator: its times are those of a model, not of hardware.": bool(
            manifest.target_info.get("simulated")
        ),
        f"{sum(e.kind == 'fault' for e in records.events)} faults were injected on purpose.": bool(scenario.faults),
        f"{manifest.num_left_out:,} requests of the trace were left out: they have no tokens.": manifest.num_left_out > 0,
        f"{manifest.num_after_end:,} requests of the trace were left out: they come after {scenario.duration_s:g} s.": (
            manifest.num_after_end > 0
        ),
        f"{num_unsaid:,} later turns of conversations were not sent, the first because: {why}.": num_unsaid > 0,
        f"{num_cancelled} requests were cancelled by the load generator before their end; they have no tpot or e2e.": num_cancelled
        > 0,
        f"{num_disagree} answers have different token counts by usage, by chunks or by the tokenizer.": num_disagree > 0,
    }


def _threats_of_the_figures(records: Records, summary: Summary) -> dict[str, bool]:
    heads = [summary.distributions[m] for m in ("ttft", "e2e") if m in summary.distributions]
    p99s = [(d.metric, p99) for d in heads if (p99 := d.at(0.99)) and p99.high_s is None]
    infinite, unbounded = ([metric for metric, p99 in p99s if p99.high_failed is failed] for failed in (True, False))
    unknown = [
        f"{share(result.unknown)} of the requests were cancelled by the load generator before they reached {result.limit}"
        for result in summary.slo
        if result.unknown
    ]
    read_s, itl_s = _read_lag_and_itl(summary)
    warmup_s, varies = records.scenario.warmup_s, not isinstance(records.scenario.arrival, Burst)
    return {
        f"The p99 of {' and '.join(unbounded)} has no upper bound: too few independent samples; run longer or replicate.": (
            bool(unbounded)
        ),
        f"The p99 of {' and '.join(infinite)} has no upper bound: its interval reaches the requests that failed, timed out or were left, "
        "which have none. A longer run does not change that.": bool(infinite),
        f"{', '.join(unknown)}: the interval takes them as over at its low end and as inside at its high end.": bool(unknown),
        "Latencies swing more slowly than the run could see (near saturation): percentiles are not estimable from it alone.": (
            any(d.method == NOT_ESTIMABLE for d in heads)
        ),
        f"{summary.coalesced_share:.0%} of the reads held several events: the target or a proxy batches them, so gaps between "
        "tokens are intervals.": summary.coalesced_share > MAX_COALESCED_SHARE,
        f"Answers were read up to {read_s * 1e3:.1f} ms late at the p99: so much of the p99 of the ITL, {itl_s * 1e3:.1f} ms, may be the "
        "generator's own.": read_s > MAX_READ_LAG_SHARE * itl_s > 0,
        "Some complete answers do not say how many tokens their prompts had: there is no rate of tokens, prompts included.": (
            summary.throughput is not None and summary.throughput.total_tokens is None
        ),
        f"The warm-up took {summary.warmup_cut_s:.0f} s, not the {warmup_s:.0f} s of the scenario; all of it is left out.": (
            summary.warmup_cut_s > warmup_s
        ),
        "The run is not steady: backlog or latency changed over the window, and a longer run would have other percentiles.": (
            summary.steady is False
        ),
        "It is unknown whether the run is steady: too few requests, or too short compared with their latency.": (
            summary.steady is None and records.even
        ),
        "The offered load changes over the run by design: percentiles are those of this mixture.": not records.even and varies,
    }


def _read_lag_and_itl(summary: Summary) -> tuple[float, float]:
    """Return the p99 of read lag and of ITL in seconds; 0 if one is unknown."""
    read_s = next((gate.value for gate in summary.gates if gate.name == read_lag_name(0.99)), None)
    itl = summary.distributions.get("itl")
    p99 = itl.at(0.99) if itl else None
    return read_s or 0.0, (p99.value_s if p99 else None) or 0.0
