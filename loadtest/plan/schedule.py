"""The schedule lists each request of a run with its due time, before the run.

The schedule depends only on the scenario's seed, arrival law and classes, never on workers or machine. Each request has its own random
number in each stream (class, input length, output length), so a change of one law changes no other draws. Workers take shares by a hash
of the id: each share of a Poisson process is a Poisson process, and the shares add up to the whole. In a closed loop a worker's share is
in proportion to its clients, because with a hash the clients of some workers would run out of requests before the others.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from loadtest.errors import UsageError
from loadtest.inputs import regular
from loadtest.plan.arrivals import MAX_REQUESTS, Times, due_times, generator
from loadtest.plan.class_times import changes_s, is_drawn
from loadtest.plan.laws import Closed, Trace
from loadtest.plan.prompts import record_of
from loadtest.plan.request_class import Length, Pause
from loadtest.plan.scenario import Scenario
from loadtest.plan.traces import read_trace, recorded_s, replay_times
from loadtest.plan.workload import fingerprint, splitmix64, tokens_of
from loadtest.records import PUT_BACK, ScheduledRequest, unreadable

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class Schedule:
    """All requests by id; ids follow the due times. The later turns of conversations come last."""

    requests: list[ScheduledRequest]
    num_left_out: int = 0
    """Requests of a trace that were left out because they have no tokens: recorded failures. 0 for a schedule that was read from a file."""
    num_after_end: int = 0
    """Requests of a trace after the scenario's ``duration_s``. 0 for a schedule that was read from a file."""

    @cached_property
    def sha256(self) -> str:
        """Return the digest of schedule.jsonl as `write` makes it, which also covers the inputs of the request bodies."""
        return hashlib.sha256(_ENCODER.encode_lines(self.requests)).hexdigest()

    def part(self, worker: int, num_workers: int, *, concurrency: int = 0) -> list[ScheduledRequest]:
        """Return the share of one worker, 0 <= worker < num_workers; the sizes of shares differ at random.

        All turns of a conversation have the same worker.

        Args:
            concurrency: Number of clients of a closed loop; 0 for an open loop. Worker w has each ``num_workers``-th client, from client w
                on, and requests in proportion to its clients. A free client takes the worker's next request.
        """
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker {worker} of {num_workers}")
        if concurrency:
            return [r for r in self.requests if r.id % concurrency % num_workers == worker]
        owners = (splitmix64(np.array([r.id for r in self.requests], dtype=np.uint64)) % np.uint64(num_workers)).tolist()
        for request in self.requests:
            if request.after is not None:
                owners[request.id] = owners[request.after]
        return [r for r, owner in zip(self.requests, owners, strict=True) if owner == worker]

    def write(self, path: Path) -> None:
        """Write one request per line.

        Raises:
            OSError: The disk is full, for example.
        """
        path.write_bytes(_ENCODER.encode_lines(self.requests))


def read_schedule(path: Path) -> Schedule:
    """Read what `Schedule.write` wrote.

    Raises:
        UsageError: The file cannot be read or is cut off, or a line is no request or out of order; the message has the line's number.
    """
    try:
        lines = regular(path).read_bytes().split(b"\n")
    except OSError as exc:
        raise UsageError(str(path), f"the schedule cannot be read: {exc.strerror}; {PUT_BACK}") from exc
    if lines.pop() or not lines:
        raise UsageError(f"{path}:{len(lines) + 1}", f"the schedule is empty or its last line is cut off; {PUT_BACK}")
    decoder = msgspec.json.Decoder(ScheduledRequest)
    requests: list[ScheduledRequest] = []
    due_s = 0.0
    for number, line in enumerate(lines):
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise UsageError(f"{path}:{number + 1}", unreadable(line, exc)) from exc
        if not follows(request, number, due_s):
            raise UsageError(f"{path}:{number + 1}", f"id {request.id} at {request.due_s} s is out of order; {PUT_BACK}")
        due_s = request.due_s or due_s
        requests.append(request)
    return Schedule(requests)


def follows(request: ScheduledRequest, number: int, due_before_s: float) -> bool:
    """Whether the request may be on line ``number`` of a schedule, counted from 0, after a request that is due at ``due_before_s``."""
    if request.after is not None:
        return request.id == number and 0 <= request.after < number and request.due_s is None
    return request.id == number and (request.due_s is None or request.due_s >= due_before_s)


def make_schedule(scenario: Scenario) -> Schedule:
    """Return the one schedule of the scenario.

    Raises:
        UsageError: No request is due, there are too many, or the trace or the tokenizer cannot be used.
    """
    arrival = scenario.arrival
    schedule = _replayed(scenario, arrival) if isinstance(arrival, Trace) else Schedule(_drawn(scenario))
    shared = {each.name: each.shared_prefix_tokens for each in scenario.requests if each.shared_prefix_tokens}
    schedule.requests[0] = msgspec.structs.replace(schedule.requests[0], workload=fingerprint(scenario), shared=shared or None)
    return schedule


def written_schedule(scenario: Scenario, path: Path | None) -> Schedule:
    """Return the schedule, which is in the file now, if a file is given.

    Raises:
        UsageError: As `make_schedule`, or the file cannot be written.
    """
    schedule = make_schedule(scenario)
    if path is not None:
        try:
            schedule.write(path)
        except OSError as exc:
            raise UsageError("--schedule", f"{path} cannot be written: {exc.strerror}") from exc
    return schedule


def _drawn(scenario: Scenario) -> list[ScheduledRequest]:
    times = due_times(scenario.arrival, duration_s=scenario.duration_s, seed=scenario.seed)
    due: list[float] | list[None] = [None] * times.size if isinstance(scenario.arrival, Closed) else times.tolist()
    which = _classes(scenario, times)
    inputs, outputs = (generator(scenario.seed, stream).random(len(due)) for stream in ("input tokens", "output tokens"))
    num_inputs, num_outputs = np.zeros(len(due), dtype=np.int64), np.zeros(len(due), dtype=np.int64)
    for index, cls in enumerate(scenario.requests):
        chosen = which == index
        num_inputs[chosen] = lengths(cls.input_tokens, inputs[chosen])
        num_outputs[chosen] = lengths(cls.output_tokens, outputs[chosen])
    names = [scenario.requests[index].name for index in which.tolist()]
    columns = zip(due, names, num_inputs.tolist(), num_outputs.tolist(), strict=True)
    first = [ScheduledRequest(number, *column) for number, column in enumerate(columns)]
    later = _later_turns(scenario, first)
    return _with_prompts(scenario, first, later)


def _with_prompts(scenario: Scenario, first: list[ScheduledRequest], later: list[ScheduledRequest]) -> list[ScheduledRequest]:
    """Return all requests. A prompt from a file sets its request's length; a conversation ends with its record."""
    files = {cls.name: cls.prompts for cls in scenario.requests if cls.prompts is not None}
    if not files:
        return first + later
    num_tokens = cache(partial(tokens_of, scenario))  # a million requests may share a few records
    turns: dict[int, list[str]] = {}  # by the id of a conversation's first request: the messages still to send
    kept: list[ScheduledRequest] = []
    ids: dict[int, int] = {}  # requests that are left out get no new id
    for request in (*first, *later):
        said = turns.pop(request.after, []) if request.after is not None else []
        if (path := files.get(request.cls)) is not None:
            if request.after is None:
                said = list(record_of(path, seed=scenario.seed, cls=request.cls, first_id=request.id).turns)
            if not said:
                continue
            turns[request.id] = said[1:]
            request = msgspec.structs.replace(request, input_tokens=num_tokens(said[0]))
        ids[request.id] = len(kept)
        after = None if request.after is None else ids[request.after]
        kept.append(msgspec.structs.replace(request, id=len(kept), after=after))
    return kept


def _later_turns(scenario: Scenario, first: list[ScheduledRequest]) -> list[ScheduledRequest]:
    """Return the later turns of the conversations that begin with ``first``, conversation by conversation."""
    later: list[ScheduledRequest] = []
    for cls in scenario.requests:
        begun = [request for request in first if request.cls == cls.name]
        if cls.conversation is None or not begun:
            continue
        turns = lengths(cls.conversation.turns, generator(scenario.seed, f"{cls.name}: turns").random(len(begun))) - 1
        if (num := len(first) + len(later) + int(turns.sum())) > MAX_REQUESTS:
            raise UsageError(
                "requests", f"{cls.name}: {num:,} turns, at most {MAX_REQUESTS:,}; lower the rate, duration_s or turns"
            )
        drawn = [
            generator(scenario.seed, f"{cls.name}: {what}").random(int(turns.sum())) for what in ("inputs", "outputs", "pauses")
        ]
        inputs, outputs = lengths(cls.input_tokens, drawn[0]).tolist(), lengths(cls.output_tokens, drawn[1]).tolist()
        pauses = _pauses_s(cls.conversation.think_s, drawn[2]).tolist()
        columns = zip(inputs, outputs, pauses, strict=True)
        for request, num in zip(begun, turns.tolist(), strict=True):
            after = request.id
            for _ in range(num):
                number = len(first) + len(later)
                num_in, num_out, think_s = next(columns)
                later.append(ScheduledRequest(number, None, cls.name, num_in, num_out, after=after, think_s=think_s))
                after = number
    return later


def _pauses_s(law: Pause, uniform: Times) -> Times:
    return np.round(np.full(uniform.shape, law.mean) if law.dist == "constant" else -law.mean * np.log1p(-uniform), 6)


def _replayed(scenario: Scenario, trace: Trace) -> Schedule:
    """Return the schedule of a trace. A request keeps its recorded class if the scenario has that class; else one is drawn by weight."""
    recorded = read_trace(trace.file)
    times = replay_times(
        np.array([recorded_s(r) for r in recorded.requests]),
        speed=trace.speed,
        dequantise_s=trace.dequantise_s,
        seed=scenario.seed,
    )
    num_due = int(np.searchsorted(times, scenario.duration_s))
    if not num_due:
        raise UsageError(
            "duration_s", f"{scenario.duration_s:g} ends before the trace's first request at {times[0]:g} s; raise it"
        )
    names = [c.name for c in scenario.requests]
    drawn = _classes(scenario, times[:num_due]).tolist()
    requests = [
        msgspec.structs.replace(request, due_s=due_s, cls=request.cls if request.cls in names else names[index])
        for request, due_s, index in zip(recorded.requests, times.tolist(), drawn, strict=False)
    ]
    _check_named(scenario, requests)
    return Schedule(requests, recorded.num_left_out, len(times) - num_due)


def _check_named(scenario: Scenario, requests: list[ScheduledRequest]) -> None:
    """Refuse a trace in which a request names a class at a time when the class is not drawn."""
    for number, cls in enumerate(scenario.requests):
        due_s = (recorded_s(request) for request in requests if request.cls == cls.name)
        if (at_s := next((at_s for at_s in due_s if not is_drawn(cls, at_s)), None)) is not None:
            key = "from_s" if at_s < cls.from_s else "until_s"
            what = f"{getattr(cls, key):g} leaves out {at_s:g} s, when the trace asks {cls.name}; leave the key out"
            raise UsageError(f"requests.{number}.{key}", what)


def _classes(scenario: Scenario, due_s: Times) -> NDArray[np.int64]:
    """Draw the class of each request by weight, among the classes at its due time. Times are sorted."""
    numbers = generator(scenario.seed, "classes").random(due_s.size)
    indices = np.zeros(due_s.size, dtype=np.int64)
    for begin_s, end_s in pairwise([0.0, *changes_s(scenario.requests), math.inf]):
        first, end = np.searchsorted(due_s, [begin_s, end_s])
        if first == end:  # no request is due there; after duration_s there may be no class
            continue
        present = np.array([number for number, cls in enumerate(scenario.requests) if is_drawn(cls, begin_s)], dtype=np.int64)
        shares = np.cumsum([scenario.requests[number].weight for number in present])
        which = np.searchsorted(shares, numbers[first:end] * shares[-1], side="right")
        indices[first:end] = present[np.minimum(which, shares.size - 1)]
    return indices


def lengths(law: Length, uniform: Times) -> NDArray[np.int64]:
    """Return a whole number of tokens for each number in [0, 1).

    The law's quantile function between ``min`` - 1/2 and ``max`` + 1/2 is rounded. The distribution is that of drawing, rounding and
    drawing again when outside, but each length takes only one random number.

    Raises:
        UsageError: Almost none of the distribution is between min and max.
    """
    low, high = law.min - 0.5, law.max + 0.5
    match law.dist:
        case "constant":
            drawn = np.full(uniform.shape, law.mean)
        case "uniform":
            drawn = low + uniform * (high - low)
        case "exponential":  # memoryless: above ``low`` the law is the same again
            drawn = low - law.mean * np.log1p(uniform * np.expm1((low - high) / law.mean))
        case "lognormal":
            sigma = math.sqrt(math.log1p(law.cv**2))
            mu = math.log(law.mean) - sigma**2 / 2
            at_low, at_high = ndtr(
                (mu - np.log([low, high])) / sigma
            )  # upper tails instead of lower ones, which would lose digits near 1
            if not at_low - at_high > 1e-9:
                raise UsageError(
                    "requests", f"lognormal of mean {law.mean:g} and cv {law.cv:g} is never in {law.min} .. {law.max}"
                )
            drawn = np.exp(mu - sigma * ndtri(at_low * (1 - uniform) + at_high * uniform))
    whole: NDArray[np.int64] = np.clip(np.rint(drawn), law.min, law.max).astype(np.int64)
    return whole
