"""A simulated replica schedules requests as vLLM's scheduler does, in simulated time and without vLLM. Pure.

Requests are served first come, first served; prompts are computed in chunks within the token budget, beside the decodes of the running
batch; new requests enter while sequences and KV cache allow. Nothing is preempted: a request takes its whole KV at its start. Between two
events all steps are equal, so that a whole run of them costs one computation, and an hour takes seconds.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from serve_app.autoscaling.capacity import StepTimes
from serve_app.core.load import EngineLoad
from serve_app.core.step_costs import CHUNK_TOKENS, CONTEXT_TOKENS, SEQUENCES, MeasuredCosts, TimedBatch, measured_costs
from serve_app.simulated.profiles import Profile
from serve_app.simulated.timing import StepWork, step_time_s

_TIMED_CONTEXT = 8192
"""Tokens of the long context that is timed, if the KV cache has room for twice as many. A replica times as many as it can in a second."""


class StepModel(Protocol):
    """Gives the duration of a step. Equal arguments must give equal seconds: `Replica` asks once for equal steps in a row."""

    def __call__(self, num_decodes: int, kv_tokens: int, prefill_tokens: int) -> float:
        """Return seconds for a step over ``num_decodes`` requests that hold ``kv_tokens``, and ``prefill_tokens`` of prompts."""
        ...


def steps_of_profile(profile: Profile) -> StepModel:
    """Return the step times of a simulated accelerator."""

    def step_s(num_decodes: int, kv_tokens: int, prefill_tokens: int) -> float:
        tokens = num_decodes + prefill_tokens
        pairs = kv_tokens + num_decodes + prefill_tokens * (prefill_tokens + 1) // 2
        return step_time_s(profile, StepWork(tokens, kv_tokens + tokens, pairs))

    return step_s


def steps_of_times(times: StepTimes) -> StepModel:
    """Return the step times of a fit."""

    def step_s(num_decodes: int, kv_tokens: int, prefill_tokens: int) -> float:
        return times.step_s + num_decodes * times.output_token_s + prefill_tokens * times.prompt_token_s

    return step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware of one replica."""

    step_s: StepModel
    kv_tokens: int
    max_num_seqs: int
    max_batched_tokens: int = 2048
    cached_share: float = 0.0
    """Share of each prompt's tokens that the prefix cache has, 0 <= x < 1."""

    def measured(self) -> MeasuredCosts | None:
        """Return what such a replica would measure at its start; None if its limits leave too few batches to separate the costs."""
        sizes = sorted({min(n, self.max_num_seqs) for n in SEQUENCES})
        decodes = [TimedBatch(output_tokens=n, prefilled_tokens=0, seconds=self.step_s(n, n * CONTEXT_TOKENS, 0)) for n in sizes]
        chunk = min(CHUNK_TOKENS, self.max_batched_tokens)
        prefill = TimedBatch(output_tokens=1, prefilled_tokens=chunk, seconds=self.step_s(0, 0, chunk))
        length = max(CONTEXT_TOKENS, min(_TIMED_CONTEXT, self.kv_tokens // 2))
        beyond, seconds = length - CONTEXT_TOKENS, self.step_s(1, length, 0)
        long = TimedBatch(output_tokens=1, prefilled_tokens=0, context_tokens=beyond, seconds=seconds)
        return measured_costs([*decodes, prefill, long])


@dataclass(slots=True)
class Job:
    """One request. ``first_at`` and ``done_at`` are None until then; ``refused`` has the name of the error, if any.

    ``cached_tokens``: tokens of the prompt that were in the prefix cache of the replica that began it last.
    """

    request_id: str
    due_at: float
    prompt_tokens: int
    output_tokens: int
    first_at: float | None = None
    done_at: float | None = None
    refused: str = ""
    cached_tokens: int = 0
    background: bool = False
    """Whether the request is a line of a batch."""


@dataclass(slots=True)
class SimulatedOutput:
    """New tokens of one attempt: what `serve_app.core` needs of vLLM's ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: object | None = None
    events: object | None = None
    prefill_stats: object | None = None
    stop_reason: object | None = None
    kv_transfer_params: object | None = None


class Replica:
    """One engine. Times are those of the simulation; ``at`` is the end of its last step."""

    def __init__(self, replica_id: str, hardware: Hardware, at: float) -> None:
        self.replica_id = replica_id
        self.hardware = hardware
        self.at = at
        self.steps = 0
        self.busy_s = 0.0
        self.waiting: deque[tuple[Job, str, float]] = deque()
        """(job, attempt, time of arrival)."""
        self.prefilling: deque[tuple[Job, str, int]] = deque()
        """(job, attempt, prompt tokens still to compute)."""
        self.running: list[tuple[int, str, Job]] = []
        """Heap of (number of the step that ends it, attempt, job)."""
        self.reserved = 0
        self.context = 0
        self._timed: tuple[int, int, int] | None = None
        """Arguments of the last call of `Hardware.step_s` (decodes, context, tokens of prompts); `_timed_s` is its result."""
        self._timed_s = 0.0

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.prefilling)

    def load(self) -> EngineLoad:
        """Return the load that the replica's heartbeats report."""
        return EngineLoad(self.steps, self.num_running, len(self.waiting), min(1.0, self.reserved / self.hardware.kv_tokens))

    def is_idle(self) -> bool:
        return not (self.running or self.prefilling or self.waiting)

    def add(self, job: Job, attempt_id: str, now: float) -> None:
        """Queue a request; it joins the next step that begins."""
        if self.is_idle():
            self.at = max(self.at, now)
        self.waiting.append((job, attempt_id, now))

    def abort(self, attempt_ids: Collection[str]) -> None:
        """Forget requests that have no token yet."""
        self.waiting = deque(entry for entry in self.waiting if entry[1] not in attempt_ids)
        for job, attempt_id, left in list(self.prefilling):
            if attempt_id in attempt_ids:
                self.prefilling.remove((job, attempt_id, left))
                self.reserved -= job.prompt_tokens + job.output_tokens
                self.context -= job.prompt_tokens - left

    def next_at(self) -> float | None:
        """Return the time of the next event: the end of a prefill step or of a request; None when idle."""
        self._admit()
        if self.prefilling:
            return self.at + self._step_s(self._chunk())
        if self.running:
            return self.at + self._num_decodes() * self._step_s(0)
        return None

    def run_to(self, now: float) -> list[tuple[Job, str, bool]]:
        """Make all steps that end by ``now``; return (job, attempt, whether it ended) of first and last tokens."""
        happened: list[tuple[Job, str, bool]] = []
        while (next_at := self.next_at()) is not None and next_at <= now + 1e-9:
            happened += self._prefill_step() if self.prefilling else self._decode_steps(self._num_decodes())
        if not self.prefilling and self.running:
            self._decode_steps(int((now - self.at) / self._step_s(0)))
        return happened

    def _admit(self) -> None:
        hardware = self.hardware
        while self.waiting and self.num_running < hardware.max_num_seqs:
            job, attempt_id, arrived_at = self.waiting[0]
            if arrived_at > self.at + 1e-9:
                return  # the current step began before it arrived
            need = job.prompt_tokens + job.output_tokens
            if self.reserved + need > hardware.kv_tokens and self.num_running:
                return
            self.waiting.popleft()
            self.reserved += need
            job.cached_tokens = self.begin(job)
            self.context += job.cached_tokens
            self.prefilling.append((job, attempt_id, job.prompt_tokens - job.cached_tokens))

    def begin(self, job: Job) -> int:
        """Note that a job leaves the queue; return how many of its prompt's tokens are cached, fewer than all of them."""
        return int(self.hardware.cached_share * job.prompt_tokens)

    def _num_decodes(self) -> int:
        """Return the steps until a request ends, or until the end of the step in which the first waiting request arrived."""
        count = self.running[0][0] - self.steps
        if self.waiting and (ahead_s := self.waiting[0][2] - self.at) > 1e-9:
            count = min(count, max(1, math.ceil(ahead_s / self._step_s(0) - 1e-9)))
        return count

    def _chunk(self) -> int:
        budget = self.hardware.max_batched_tokens - len(self.running)
        return min(max(1, budget), sum(left for _, _, left in self.prefilling))

    def _step_s(self, prefill_tokens: int) -> float:
        batch = len(self.running), self.context, prefill_tokens
        if batch != self._timed:
            self._timed, self._timed_s = batch, self.hardware.step_s(*batch)
        return self._timed_s

    def _prefill_step(self) -> list[tuple[Job, str, bool]]:
        chunk = self._chunk()
        happened = self._pass_steps(1, self._step_s(chunk))
        while self.prefilling and chunk > 0:
            job, attempt_id, left = self.prefilling.popleft()
            if left > chunk:
                self.prefilling.appendleft((job, attempt_id, left - chunk))
                self.context += chunk
                break
            chunk -= left
            self.context += left + 1
            job.first_at = self.at
            heapq.heappush(self.running, (self.steps + job.output_tokens - 1, attempt_id, job))
            if job.output_tokens > 1:
                happened.append((job, attempt_id, False))
        return happened + self._ended()

    def _decode_steps(self, count: int) -> list[tuple[Job, str, bool]]:
        return self._pass_steps(count, self._step_s(0)) if count > 0 else []

    def _pass_steps(self, count: int, step_s: float) -> list[tuple[Job, str, bool]]:
        self.steps += count
        self.at += count * step_s
        self.busy_s += count * step_s
        self.context += count * len(self.running)
        return self._ended()

    def _ended(self) -> list[tuple[Job, str, bool]]:
        ended = []
        while self.running and self.running[0][0] <= self.steps:
            _, attempt_id, job = heapq.heappop(self.running)
            job.done_at = self.at
            held = job.prompt_tokens + job.output_tokens
            self.reserved -= held
            self.context -= held
            ended.append((job, attempt_id, True))
        return ended
