"""`explanation` describes one decision of the autoscaler in words, with the numbers from which it was made. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from serve_app.autoscaling.decision import Decision, Observation
from serve_app.autoscaling.decision_log import Record
from serve_app.autoscaling.feedback import MEASURED_S
from serve_app.autoscaling.fleet import INGRESSES
from serve_app.autoscaling.model_autoscaler import LENGTHS_S, TAUGHT
from serve_app.autoscaling.signals import ModelLoad
from serve_app.core.step_costs import MeasuredCosts

WISHES: Mapping[str, str] = {
    "first": "requests arrive, and need one replica",
    "demand": "the demand needs that many",
    "growth": "the demand grows, and will need that many when a new replica serves",
    "queue": "the demand and the queue need that many",
    "batches": "the demand and the open batches, each within its window, need that many",
    "unmeasured": "nothing was measured yet, so the number stays",
    "queue without measure": "requests wait and nothing was measured yet: one more",
    "kv cache full": "the KV cache is full: one more",
    "late first tokens": "too many first tokens are later than the SLO: one more",
    "rejected": "requests were refused: one more",
    "keep": "no more is wanted, and the replicas stay for a while",
    "low for long": "no more was wanted for long enough",
    "headroom": "a step in the load up to replicas.headroom needs that many",
    "silent members": "fewer would do, but some members do not report: their share stays",
    "minimum": "the least that the configuration allows",
    "maximum": "the most that the configuration allows",
    "GPUs are short": "the models together want more GPUs than autoscaling.max_gpus",
    "another model's turn": "requests wait for another model, the GPUs suffice for one of them, and this one is idle or has had its turn",
    "awake": "no more is wanted, and its idle engine will sleep",
    "asleep": "its engine sleeps: the next request wakes it, sooner than a replica starts",
    "streams": "the open streams need that many",
    "cpu": "the CPU use of the ingresses needs that many",
}
"""Why the number is what it is, for each `Decision.wish`."""
REFUSED_S = 60.0
"""Refusals by quotas are shown as their rate over this time: those of one second vary by chance."""
COSTS = ("the step", "an output token", "a prompt token")
LIMITS: Mapping[str, str] = {
    "itl": "tokens would come slower than the ITL limit",
    "ttft": "first tokens would come later than the TTFT limit",
    "batch": "its KV cache or max_num_seqs would be full",
}


def explanation(record: Record, name: str, records: Iterable[Record] = ()) -> Iterator[str]:
    """Yield the lines for one model, or for `INGRESSES`. ``records``: the whole log, for rates over the last minute."""
    decision = record.decided[name]
    seen = record.seen.ingress if name == INGRESSES else record.seen.models[name]
    assert seen is not None  # otherwise nothing was decided for it
    at = datetime.fromtimestamp(record.time, UTC)
    change = "stays at" if decision.desired == seen.target else f"{seen.target} ->"
    reason = WISHES.get(decision.wish, decision.wish)
    if decision.wish == "keep" and decision.desired <= seen.minimum:
        reason = "no more is wanted, and the configuration allows no fewer" if decision.desired else "no requests arrive"
    yield f"{name}, {at:%Y-%m-%dT%H:%M:%SZ}: {change} {decision.desired}, because {reason}"
    if isinstance(seen, Observation):
        yield from _model(seen, decision)
        recent = [each for each in records if record.time - REFUSED_S < each.time < record.time]
        yield from _over_quota([each.seen.models[name].load for each in [*recent, record] if name in each.seen.models])
    else:
        cores = decision.inputs["cpu_cores"]
        yield f"  seen      {seen.running} serve, {seen.target} asked for; {seen.streams:.0f} streams, {cores:.2f} cores busy"
    if decision.alternatives:
        yield "  rules     " + ", ".join(f"{wish} {replicas}" for wish, replicas in decision.alternatives.items())
    yield f"  bounds    {seen.minimum} to {seen.maximum}"
    if silent := seen.load.silent if isinstance(seen, Observation) else seen.silent:
        yield f"  silent    {', '.join(silent)}"
    if decision.ready_at is not None:
        ready = datetime.fromtimestamp(record.time + decision.ready_at - record.seen.at, UTC)
        start_s = decision.inputs["cold_start_s"]
        known = isinstance(seen, Observation) and seen.load.cold_start_s
        source = (
            "the 90th percentile of the replicas' own" if known else "of earlier replicas, or a guess: no replica was measured"
        )
        yield f"  expected  to serve at {ready:%H:%M:%SZ}, after a cold start of {start_s:.0f} s ({source})"


def _over_quota(loads: Sequence[ModelLoad]) -> Iterator[str]:
    """Yield a line about requests that quotas refused, as their rate over all of these intervals, if there were any."""
    over_s = sum(load.interval_s for load in loads)
    refused, unread = sum(load.over_quota for load in loads), sum(load.over_quota_unread for load in loads)
    if not over_s or not refused + unread:
        return
    rates = [f"{refused / over_s:.2f} requests/s that tenants' quotas refused"] if refused else []
    if unread:
        more = "more" if refused else "requests/s that tenants' quotas refused"
        rates.append(f"up to {unread / over_s:.2f} {more} before their model was read")
    yield f"  refused   not in the demand: {', and '.join(rates)} (over {over_s:.0f} s)"


def _source(measured: MeasuredCosts | None, of: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines about the source of a step's costs."""
    if TAUGHT[0] not in of:
        yield "  source    fitted to the load; costs that the load does not separate are a guess: no replica has measured itself"
        return
    if measured is None:
        yield "  source    measured, before they took requests, by replicas that have ended;"
    else:
        pairs = (
            (measured.step_s, measured.step_error_s),
            (measured.output_token_s, measured.output_token_error_s),
            (measured.prompt_token_s, measured.prompt_token_error_s),
        )
        found = " + ".join(f"{1000 * cost_s:.3g}+-{1000 * error_s:.2g}" for cost_s, error_s in pairs)
        yield f"  source    replicas measured {found} ms before they took requests;"
    taught = ", ".join(f"{of[name]:.0%} of {cost}" for name, cost in zip(TAUGHT, COSTS, strict=True))
    yield f"            the load has since determined {taught}"


def _model(seen: Observation, decision: Decision) -> Iterator[str]:
    load: ModelLoad = seen.load
    waiting = f"{load.running:.0f} requests run, {load.queued:.0f} wait at replicas and {load.waiting:.0f} at ingresses"
    yield f"  seen      {seen.running} serve, {seen.target} asked for; {waiting}; KV cache {load.kv_usage:.0%} used"
    of = decision.inputs
    if "demand" not in of:
        known = (
            "is not measured yet" if load.measured is None else f"is known {LENGTHS_S:.0f} s after the first of them was answered"
        )
        yield f"  demand    {of['requests_per_s']:.2f} requests/s; what they cost {known}"
        return
    rate, work = of["requests_per_s"], of["work_per_request_s"]
    over = f" (over {over_s:.0f} s)" if (over_s := of.get("rate_over_s", 0.0)) else ""  # logs of older code have no such key
    busy = f"{of['demand']:.2f} replicas that are busy all the time"
    yield f"  demand    {rate:.2f} requests/s{over} x {work:.3f} s of a replica = {busy}"
    per_token = f"{1000 * of['output_token_s']:.3f} ms an output token + {1000 * of['prompt_token_s']:.3f} ms a prompt token"
    cached = f" (without the {share:.0%} that were cached)" if (share := of.get("cached_share", 0.0)) else ""
    yield f"  measured  {of['prompt_tokens']:.0f} prompt{cached} + {of['output_tokens']:.0f} output tokens a request; a step takes"
    yield f"            {1000 * of['step_s']:.1f} ms + {per_token}"
    yield from _source(load.measured, of)
    if (unseen_s := of.get("taken_over_s")) is not None:
        yield f"            an earlier controller's knowledge was taken over when it was {unseen_s:.0f} s old"
    if error_s := of.get("work_error_s", 0.0):
        yield f"  caution   {1000 * error_s:.0f} ms of a request's work are one standard deviation that the load has not confirmed yet"
    most = f"above, more than {of['batch_limit']:.0f} requests would run at once too often: {LIMITS.get(decision.limit, decision.limit)}"
    yield f"  replica   may be busy {of['utilization']:.0%} of the time; {most}"
    if itl_s := of.get("itl_s", 0.0):
        measured = f"mean step {1000 * itl_s:.0f} ms (about the time between tokens inside the engine)"
        late = f"{of['late_share']:.1%} of first tokens are late without a queue"
        yield f"  feedback  {measured}, {1000 * of['expected_itl_s']:.0f} ms expected;"
        span_s = of.get("feedback_s", MEASURED_S)
        since = f"{span_s:.0f} s of an even load" + (f", corrects from {MEASURED_S:.0f} s on" if span_s < MEASURED_S else "")
        yield f"            {late} ({since}): capacity x {of['correction']:.2f}"
    if (prefill := of.get("prefill_share")) is not None:
        pools = f"{of['prefill_needed']:.0f} for long prompts (demand {of['prefill_demand']:.2f}) and {of['decode_needed']:.0f} for answers"
        yield f"  pools     {pools}: {prefill:.0%} of the need is that of prompts"
    if of["growth"]:
        yield f"  growth    {of['growth']:.2f} replicas more when a new one serves, after a cold start of {of['cold_start_s']:.0f} s"
    if of["queue_s"]:
        yield f"  queue     {of['queue_s']:.1f} s of a replica's work will wait when a new replica serves"
    if decision.wish == "keep" and decision.kept:
        yield f"  kept      {decision.kept} were wanted in the last {of['keep_s']:.0f} s, or may be needed by chance"
