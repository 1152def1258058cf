"""`SimulatedFleet` runs a whole fleet in simulated time: one ingress, replicas that start, serve and drain, and a policy that scales them.

Pure. Admission, routing and scaling are the product's own code (`FleetState`, `FleetScaler`). Simulated are arrivals, replicas
(`simulated_replica.py`) and their starts.
"""

import heapq
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from serve_app.autoscaling.decision import Observation
from serve_app.autoscaling.signals import INCREMENTS, ModelLoad
from serve_app.autoscaling.simulation.simulated_replica import Hardware, Job, Replica, SimulatedOutput
from serve_app.core.events import HeartbeatArrived, LinkEnd, LinkLost, LinkOpened, OutputsArrived, RequestArrived, Ticked
from serve_app.core.fleet import FleetState
from serve_app.core.fleet_report import num_lines
from serve_app.core.fleet_settings import FleetSettings
from serve_app.core.instructions import AbortAttempts, FailRequest, Instruction, StartAttempt
from serve_app.core.request import EngineOutput, Resume

CREDIT = 2048
OBSERVE_S = 1.0
"""Seconds between two observations of the autoscaler. The observed load is as old, because members report every second."""
UNTIL_EMPTY_S = 1e9
"""The time that a draining replica says it has left. Here it goes when it is empty, so that no request moves."""


class Scaling(Protocol):
    """Decides the number of replicas: the product's `FleetScaler`, or another policy to compare with."""

    def __call__(self, at: float, seen: Observation) -> int:
        """Return the replicas wanted, within the observation's bounds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The surroundings of the fleet. Times in seconds."""

    hardware: Hardware
    minimum: int = 1
    maximum: int = 1000
    initial: int = 1
    cold_starts_s: tuple[float, ...] = (60.0,)
    """The cold start of each replica in the order of their starts, the initial ones (already running) first; the last value is that of all
    further replicas."""
    ttft_s: float = 2.0
    no_replica_s: float = 30.0
    max_waiting_requests: int = 1000
    measures: bool = True
    """Whether replicas measure themselves at their start. Replicas with older code do not."""


@dataclass(slots=True)
class Change:
    """A change of the number of replicas wanted."""

    at: float
    before: int
    after: int


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    jobs: list[Job]
    duration_s: float
    replica_s: float = 0.0
    """Replica seconds that are paid for: from the order of each replica to the end of its drain."""
    changes: list[Change] = field(default_factory=list)
    timeline: list[tuple[float, int, int, float]] = field(default_factory=list)
    """(at, wanted, serving, requests arrived in the second)."""

    def attainment(self, ttft_s: float) -> float:
        """Return the share of all requests whose first token came within the limit; refused ones missed it."""
        good = sum(1 for j in self.jobs if j.first_at is not None and j.first_at - j.due_at <= ttft_s)
        return good / len(self.jobs) if self.jobs else 1.0

    def ttft_s(self, share: float) -> float:
        """Return the quantile of the time to the first token, counting requests without one as infinite."""
        times = sorted(j.first_at - j.due_at if j.first_at is not None else float("inf") for j in self.jobs)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


@dataclass(slots=True)
class _PrefillStats:
    """The part of vLLM's prefill statistics that the fleet reads."""

    num_cached_tokens: int


@dataclass(slots=True)
class _Member:
    replica: Replica
    ordered_at: float
    cold_start_s: float
    serving: bool = False
    draining: bool = False
    gone: bool = False
    version: int = 0
    """Version of the member's entry in the agenda; older entries are void."""
    reported: dict[str, int] = field(default_factory=dict)
    """Attempt -> output tokens that were reported to the ingress."""


@dataclass(slots=True)
class _Gone:
    """The work of replicas that have stopped."""

    replica_s: float = 0.0
    steps: int = 0
    busy_s: float = 0.0


class SimulatedFleet:
    """Runs jobs against replicas that a policy scales."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.fleet = FleetState(
            FleetSettings(
                model="simulated",
                max_waiting_requests=world.max_waiting_requests,
                no_replica_s=world.no_replica_s,
                ttft_s=world.ttft_s,
            )
        )
        self._members: dict[str, _Member] = {}
        self._num_started = 0
        self._gone = _Gone()
        self._agenda: list[tuple[float, int, str, _Member | None, int]] = []
        self._order = 0
        self._jobs: dict[str, Job] = {}
        self._taken = dict.fromkeys((*INCREMENTS, "steps", "busy_s"), 0.0)
        self._target = world.initial
        self._pending = ModelLoad()
        self._measured = world.hardware.measured() if world.measures else None

    def run(self, jobs: Iterable[Job], duration_s: float, scaling: Scaling) -> Outcome:
        """Run ``jobs``, in the order of their due times, for ``duration_s`` and until all have ended."""
        steps = self.steps(jobs, duration_s)
        try:
            seen = next(steps)
            while True:
                seen = steps.send(scaling(*seen))
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome

    def steps(self, jobs: Iterable[Job], duration_s: float) -> Generator[tuple[float, Observation], int, Outcome]:
        """Run as `run` does, for a caller that scales several fleets together: yield (at, observation), take the replicas wanted."""
        outcome = Outcome([], duration_s)
        for _ in range(self.world.initial):
            self._serve(self._start(0.0), 0.0)
        self._put(OBSERVE_S, "observe", None)
        arrivals = iter(jobs)
        job = next(arrivals, None)
        while job is not None or self.fleet.requests or (self._agenda and self._agenda[0][0] <= duration_s):
            at = self._agenda[0][0] if self._agenda else float("inf")
            if job is not None and job.due_at <= at:
                outcome.jobs.append(job)
                self._arrive(job)
                job = next(arrivals, None)
                continue
            at, _, kind, member, version = heapq.heappop(self._agenda)
            if kind == "observe":
                if (seen := self._observe(at)) is not None:
                    self._scale((yield at, seen), at, outcome)
                outcome.timeline.append((at, self._target, self._num_serving(), self._pending.requests))
            elif member is not None and kind == "ready":
                if not member.gone:
                    self._serve(member, at)
            elif member is not None and version == member.version and not member.gone:
                self._advance(member, at)
        end = max(duration_s, *(j.done_at or 0.0 for j in outcome.jobs)) if outcome.jobs else duration_s
        outcome.replica_s = self._gone.replica_s + sum(end - m.ordered_at for m in self._members.values())
        outcome.duration_s = end
        return outcome

    def _put(self, at: float, kind: str, member: _Member | None, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (at, self._order, kind, member, version))

    def _start(self, at: float) -> _Member:
        starts_s = self.world.cold_starts_s
        replica = Replica(f"r{self._num_started:06d}", self.world.hardware, at)
        member = _Member(replica, at, starts_s[min(self._num_started, len(starts_s) - 1)])
        self._num_started += 1
        self._members[member.replica.replica_id] = member
        return member

    def _serve(self, member: _Member, at: float) -> None:
        member.serving = True
        member.replica.at = at
        self._carry_out(self.fleet.handle(LinkOpened(member.replica.replica_id, CREDIT), now=at), at)

    def _arrive(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        sizes = job.prompt_tokens, job.output_tokens
        event = RequestArrived(job.request_id, *sizes, Resume.CONTINUE, fingerprint=job.request_id, background=job.background)
        self._carry_out(self.fleet.handle(event, now=job.due_at), job.due_at)

    def _carry_out(self, instructions: Sequence[Instruction], at: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, StartAttempt):
                member = self._members[instruction.replica_id]
                happened = member.replica.run_to(at)
                member.replica.add(self._jobs[instruction.request_id], instruction.attempt_id, at)
                member.reported[instruction.attempt_id] = 0
                self._report(member, happened, at)
                self._schedule(member)
            elif isinstance(instruction, AbortAttempts):
                member = self._members[instruction.replica_id]
                member.replica.abort(instruction.attempt_ids)
                for attempt_id in instruction.attempt_ids:
                    del member.reported[attempt_id]
                self._schedule(member)
            elif isinstance(instruction, FailRequest):
                self._jobs.pop(instruction.request_id).refused = type(instruction.error).__name__

    def _schedule(self, member: _Member) -> None:
        member.version += 1
        if (next_at := member.replica.next_at()) is not None:
            self._put(next_at, "step", member, member.version)

    def _advance(self, member: _Member, at: float) -> None:
        self._report(member, member.replica.run_to(at), at)
        self._schedule(member)

    def _report(self, member: _Member, happened: Sequence[tuple[Job, str, bool]], at: float) -> None:
        """Report first and last tokens to the ingress. Tokens between them go with the last, or with the report of each second."""
        outputs: list[EngineOutput] = []
        for job, attempt_id, ended in happened:
            tokens = (job.output_tokens if ended else 1) - member.reported[attempt_id]
            stats = _PrefillStats(job.cached_tokens)
            outputs.append(SimulatedOutput(attempt_id, [0] * tokens, "length" if ended else None, prefill_stats=stats))
            if ended:
                del member.reported[attempt_id], self._jobs[job.request_id]
            else:
                member.reported[attempt_id] += tokens
        if outputs:
            self._carry_out(self.fleet.handle(OutputsArrived(member.replica.replica_id, outputs), now=at), at)
        if member.draining and member.replica.is_idle():
            self._remove(member, at)

    def _remove(self, member: _Member, at: float) -> None:
        member.gone = True
        self._gone.replica_s += at - member.ordered_at
        self._gone.steps += member.replica.steps
        self._gone.busy_s += member.replica.busy_s
        del self._members[member.replica.replica_id]
        if member.serving:
            self._carry_out(self.fleet.handle(LinkLost(member.replica.replica_id, LinkEnd.SAID_GOODBYE), now=at), at)

    def _observe(self, at: float) -> Observation | None:
        """Let members report after one second; return what they reported a second ago, which the policy sees now."""
        for member in list(self._members.values()):
            if member.serving:
                self._progress(member, at)
        self._carry_out(self.fleet.handle(Ticked(), now=at), at)
        self._put(at + OBSERVE_S, "observe", None)
        seen, self._pending = self._pending, self._load()
        if not seen.interval_s:
            return None  # there is no report yet
        running, world = self._num_serving(), self.world
        return Observation(running=running, target=self._target, minimum=world.minimum, maximum=world.maximum, load=seen)

    def _num_serving(self) -> int:
        return sum(m.serving and not m.draining for m in self._members.values())

    def _progress(self, member: _Member, at: float) -> None:
        replica = member.replica
        self._advance(member, at)
        if member.gone:
            return
        self._beat(member, at)
        outputs: list[EngineOutput] = []
        for ends_at, attempt_id, job in replica.running:
            done = job.output_tokens - (ends_at - replica.steps)
            if (new := done - member.reported[attempt_id]) > 0:
                outputs.append(SimulatedOutput(attempt_id, [0] * new))
                member.reported[attempt_id] = done
        if outputs:
            self._carry_out(self.fleet.handle(OutputsArrived(replica.replica_id, outputs), now=at), at)

    def _beat(self, member: _Member, at: float) -> None:
        replica = member.replica
        beat = HeartbeatArrived(replica.replica_id, replica.load(), member.draining, drain_left_s=UNTIL_EMPTY_S)
        self._carry_out(self.fleet.handle(beat, now=at), at)

    def _load(self) -> ModelLoad:
        members = [m for m in self._members.values() if m.serving]
        replicas = [m.replica for m in members]
        counted = {name: float(getattr(self.fleet.tally, name)) for name in INCREMENTS}
        counted["steps"] = self._gone.steps + sum(r.steps for r in replicas)
        counted["busy_s"] = self._gone.busy_s + sum(r.busy_s for r in replicas)
        increments = {name: value - self._taken[name] for name, value in counted.items()}
        self._taken = counted
        held, queued = num_lines(self.fleet)
        return replace(
            ModelLoad(**increments),  # type: ignore[arg-type]  # all of them are numbers
            interval_s=OBSERVE_S,
            waiting=len(self.fleet.waiting),
            queued=max(0, sum(len(r.waiting) for r in replicas) - queued),
            lines_held=held,
            lines_queued=queued,
            running=sum(r.num_running for r in replicas),
            kv_usage=sum(r.reserved / r.hardware.kv_tokens for r in replicas) / max(1, len(replicas)),
            reporting=len(replicas),
            max_num_seqs=self.world.hardware.max_num_seqs,
            cold_start_s=tuple(m.cold_start_s for m in members),
            measured=self._measured if members else None,
        )

    def _scale(self, target: int, at: float, outcome: Outcome) -> None:
        if target == self._target:
            return
        outcome.changes.append(Change(at, self._target, target))
        self._target = target
        staying = [m for m in self._members.values() if not m.draining]
        for _ in range(target - len(staying)):
            member = self._start(at)
            self._put(at + member.cold_start_s, "ready", member)
        # Serve first stops replicas that do not run yet, then the newest.
        for member in sorted(staying, key=lambda m: (m.serving, -m.ordered_at))[: max(0, len(staying) - target)]:
            member.draining = True
            if not member.serving or member.replica.is_idle():
                self._remove(member, at)
            else:
                self._beat(member, at)
