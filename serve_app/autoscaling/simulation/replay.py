"""A replay runs the arrivals of an autoscaler's log again, in simulated time and under other rules, and reports what they would have cost.

Pure. The replicas are as the log measured them: fitted step times, the share of the KV cache that requests used, cold starts. The log has
only the number of requests of each second, and the mean lengths of prompts and answers. So arrivals are spread evenly within a second,
and lengths of answers are drawn from an exponential distribution with the mean of their minute. Two runs with one seed have the same
requests.
"""

import copy
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import median_low

from serve_app.autoscaling.capacity import StepTimes
from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.decision_log import Record
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler
from serve_app.autoscaling.orders import DEFAULT_COLD_START_S
from serve_app.autoscaling.simulation.simulated_fleet import OBSERVE_S, Outcome, SimulatedFleet, World
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, steps_of_times
from serve_app.errors import DecisionLogError

MINUTE_S = 60.0
LONGEST = 10.0
"""The longest answer, in means."""
UNLIMITED = 1 << 20
"""The limit that is assumed if the log has none."""

MOST_CACHED = 0.99
"""Share of a prompt: an engine always computes its last token."""
MOST_PER_S = 1e5
"""Requests per second; a log with more is damaged."""
MOST_TOKENS = 1e8
"""Tokens of a request; a log with more is damaged."""
LONGEST_STEP_S = 60.0
"""Seconds; a log in which a step or a token took longer is damaged."""

Bounds = Callable[[str, Record, float], tuple[int, int]]
"""Least and most replicas of a model at the time of a record, with its cold start in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one model's scaling."""

    attainment: float
    """Share of the requests whose first token came within the SLO; refused ones missed it."""
    ttft_p95_s: float | None
    """None if only the share is known."""
    replica_s: float
    """Integral of the replicas asked for."""
    changes: int
    most: int


def lived(records: Sequence[Record], model: str) -> Result:
    """Return the result that the log itself shows for a model."""
    loads, targets = [r.seen.models[model].load for r in records], [r.seen.models[model].target for r in records]
    first = sum(load.first_tokens for load in loads)
    good = first - sum(load.late_first_tokens for load in loads)
    asked = first + sum(load.rejected for load in loads)
    return Result(
        attainment=good / asked if asked else 1.0,
        ttft_p95_s=None,
        replica_s=sum(load.interval_s * target for load, target in zip(loads, targets, strict=True)),
        changes=sum(a != b for a, b in pairwise(targets)),
        most=max(targets),
    )


def measured(records: Sequence[Record]) -> list[str]:
    """Return the models for which the log has step times."""
    return [name for name in sorted(records[0].seen.models) if _step_times(records, name) is not None]


def again(
    records: Sequence[Record],
    rules: FleetRules,
    bounds: Bounds,
    *,
    no_replica_s: float,
    max_waiting_requests: int,
    seed: int = 1,
) -> dict[str, Result]:
    """Return model -> result when ``rules`` scale simulated replicas for the log's arrivals. Ingresses are not scaled.

    Args:
        records: One of `decision_log.stretches`. Models that are not `measured` are left out.
        rules: A model without rules has the minimum of ``bounds``.
        bounds: See `Bounds`.
        no_replica_s: Seconds that a request waits for a replica.
        max_waiting_requests: Further requests are refused.
        seed: Seed of arrivals and lengths.

    Raises:
        DecisionLogError: The log holds an impossible load.
    """
    began, duration_s = records[0], records[-1].time - records[0].time
    scaler = copy.deepcopy(began.scaler)
    assert scaler is not None  # every stretch begins with a snapshot
    slo_s = {name: model.slo.ttft_s for name, model in scaler.rules.models.items()}
    scaler.obey(rules)
    runs = {}
    for name in measured(records):
        world = replace(_world(records, name), ttft_s=slo_s[name], no_replica_s=no_replica_s)
        fleet = SimulatedFleet(replace(world, max_waiting_requests=max_waiting_requests))
        runs[name] = fleet.steps(jobs_of(records, name, seed), duration_s)
    times = [record.time for record in records]
    wanted: dict[str, int | None] = dict.fromkeys(runs)
    results: dict[str, Result] = {}
    while runs:
        seen: dict[str, Observation] = {}
        at = 0.0
        for name, run in list(runs.items()):
            try:
                at, seen[name] = run.send(wanted[name])  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as stop:
                results[name] = _result(stop.value, duration_s, slo_s[name])
                del runs[name]
        record = records[min(len(times) - 1, bisect_left(times, began.time + at))]
        wanted = _decide(
            scaler, began.seen.at + at, seen, {name: bounds(name, record, scaler.cold_start_s(name)) for name in seen}
        )
    return results


def _decide(
    scaler: FleetScaler, at: float, seen: Mapping[str, Observation], bounds: Mapping[str, tuple[int, int]]
) -> dict[str, int | None]:
    """Return model -> replicas wanted; a model that the rules do not scale has its minimum."""
    scaled = {
        name: replace(observation, minimum=bounds[name][0], maximum=bounds[name][1])
        for name, observation in seen.items()
        if name in scaler.rules.models
    }
    decided = scaler.observe(FleetObservation(at=at, models=scaled))
    return {name: decided[name].desired if name in decided else bounds[name][0] for name in seen}


def _world(records: Sequence[Record], model: str) -> World:
    loads = [record.seen.models[model].load for record in records]
    cold_starts = dict.fromkeys(
        value for load in loads for value in load.cold_start_s
    )  # each replica repeats its own in all reports
    times = _step_times(records, model)
    assert times is not None  # it is `measured`
    hardware = Hardware(
        step_s=steps_of_times(times),
        kv_tokens=_kv_tokens(records, model),
        max_num_seqs=int(min((load.max_num_seqs for load in loads if load.max_num_seqs), default=UNLIMITED)),
        cached_share=_cached_share(records, model),
    )
    return World(
        hardware=hardware,
        initial=records[0].seen.models[model].target,
        cold_starts_s=(*cold_starts, median_low(cold_starts or [DEFAULT_COLD_START_S])),
        measures=any(load.measured is not None for load in loads),
    )


def _step_times(records: Sequence[Record], model: str) -> StepTimes | None:
    names = [f.name for f in fields(StepTimes)]
    for record in reversed(records):
        inputs = record.decided[model].inputs if model in record.decided else {}
        if all(name in inputs for name in names):
            for name in names:
                _require(0 <= inputs[name] <= LONGEST_STEP_S, record, f"{name} = {inputs[name]:g}")
            return StepTimes(**{name: inputs[name] for name in names})
    return None


def _cached_share(records: Sequence[Record], model: str) -> float:
    """Return the share of the prompts' tokens that prefix caches saved, 0 <= x <= `MOST_CACHED`."""
    loads = [record.seen.models[model].load for record in records]
    cached, computed = sum(load.cached_tokens for load in loads), sum(load.prefilled_tokens for load in loads)
    return min(MOST_CACHED, cached / (cached + computed)) if cached else 0.0


def _kv_tokens(records: Sequence[Record], model: str) -> int:
    """Return the size of a KV cache in which as many requests run at once as in the log's replicas.

    A simulated replica reserves the whole length of a request. With exponential lengths, running answers are longer: 2 x the mean.
    """
    held = share = 0.0
    computed = 1 - _cached_share(records, model)
    for record in records:
        seen, inputs = record.seen.models[model], record.decided[model].inputs
        if seen.load.running and seen.load.kv_usage and "output_tokens" in inputs:
            tokens = inputs["prompt_tokens"] / computed + 2 * inputs["output_tokens"]
            _require(0 < tokens < math.inf, record, f"{tokens:g} tokens of a request")
            held += seen.load.running / max(1, seen.running) * tokens
            share += seen.load.kv_usage
    return int(held / share) if share else UNLIMITED


def jobs_of(records: Sequence[Record], model: str, seed: int) -> Iterator[Job]:
    """Yield the requests of the log, by time since its first record."""
    rng = random.Random(f"{seed}/{model}")
    answers = _mean_answers(records, model)
    began, owed, number = records[0].time, 0.0, 0
    for record in records:
        load = record.seen.models[model].load
        _require(0 <= load.requests <= MOST_PER_S * max(1.0, load.interval_s), record, f"{load.requests:g} requests")
        for tokens, requests in ((load.prompt_tokens, load.requests), (load.finished_tokens, load.finished)):
            _require(0 <= tokens <= MOST_TOKENS * max(1.0, requests), record, f"{tokens:g} tokens of {requests:g} requests")
        at = record.time - began
        owed += load.requests
        due = sorted(max(0.0, at - rng.random() * load.interval_s) for _ in range(int(owed)))
        owed -= len(due)
        mean = answers[int(at // MINUTE_S)]
        for due_at in due:
            tokens = math.ceil(min(LONGEST * mean, rng.expovariate(1 / mean)))
            yield Job(f"{model}-{number}", due_at, max(1, round(load.prompt_tokens / load.requests)), tokens)
            number += 1


def _require(makes_sense: bool, record: Record, what: str) -> None:
    if not makes_sense:  # comparisons with NaN are false
        raise DecisionLogError(f"record {record.number} has {what}", "the log is damaged: take another piece")


def _mean_answers(records: Sequence[Record], model: str) -> Mapping[int, float]:
    """Return minute -> mean output tokens of answers that ended in it or the minute after; without any, the mean of the whole log."""
    tokens: dict[int, float] = defaultdict(float)
    ended: dict[int, float] = defaultdict(float)
    for record in records:
        load, minute = record.seen.models[model].load, int((record.time - records[0].time) // MINUTE_S)
        for known in (minute, minute - 1):
            tokens[known] += load.finished_tokens
            ended[known] += load.finished
    whole = sum(tokens.values()) / sum(ended.values()) if any(ended.values()) else 1.0
    return defaultdict(lambda: whole, {minute: max(1.0, tokens[minute] / n) for minute, n in ended.items() if n})


def _result(outcome: Outcome, duration_s: float, ttft_s: float) -> Result:
    timeline = [wanted for at, wanted, _, _ in outcome.timeline if at <= duration_s]
    return Result(
        attainment=outcome.attainment(ttft_s),
        ttft_p95_s=outcome.ttft_s(0.95),
        replica_s=sum(timeline) * OBSERVE_S,
        changes=len(outcome.changes),
        most=max(timeline),
    )
