"""`QueuePlant` adds a queue to the plant: requests that full batches leave wait, and new replicas work the queue off."""

from dataclasses import dataclass, replace

from serve_app.autoscaling.signals import ModelLoad
from serve_app.core.step_costs import MeasuredCosts
from tests.autoscaling.plant import ANSWER, PROMPT, TIMES, WORK_S, Plant

MAX_BATCH = 100.0
IDLE_REQUESTS = TIMES.step_s / (WORK_S / ANSWER) + 1
SATURATION = MAX_BATCH / (MAX_BATCH + IDLE_REQUESTS)
"""Seconds of work that a replica with a full batch does in a second, by the stationary law of `capacity.py`: 0.72."""


@dataclass
class QueuePlant(Plant):
    """Replicas serve ``cold_start_s`` after their order, and report ``reported_s`` as their start."""

    reported_s: float | None = None
    queue: float = 0.0
    """Requests that wait."""
    late: float = 0.0
    """Requests since the last `run` that waited for longer than `TTFT_S`."""
    came: float = 0.0
    measured: MeasuredCosts | None = None
    """The start measurements that replicas report."""
    prompt_factor: float = 1.0
    """Factor on the length of prompts, `PROMPT`."""

    def load(self, rate: float) -> ModelLoad:
        """Return one second of about ``rate`` requests."""
        arrived = super().load(rate).requests
        prompt = PROMPT * self.prompt_factor
        work_s = ANSWER * TIMES.output_token_s + prompt * TIMES.prompt_token_s
        most = SATURATION * self.running / work_s
        served = min(most, self.queue + arrived)
        self.queue += arrived - served
        self.came += arrived
        self.late += arrived if self.queue > self.rules.slo.ttft_s * most else 0.0
        busy = served * work_s / max(1, self.running)
        batch = min(MAX_BATCH, IDLE_REQUESTS * busy / (1 - busy))
        step_s = TIMES.step_s + batch * work_s / ANSWER
        steps = self.running * min(1.0, max(busy, 1 - (1 - busy) ** IDLE_REQUESTS)) / step_s
        # Only the tokens' part of a step's time is work, so that the counts agree with the step times.
        steps = max(0.0, (steps * step_s - served * work_s) / TIMES.step_s)
        return ModelLoad(
            interval_s=1.0,
            requests=arrived,
            prompt_tokens=arrived * prompt,
            prefilled_tokens=served * prompt,
            output_tokens=served * ANSWER,
            finished=served,
            finished_tokens=served * ANSWER,
            first_tokens=served,
            steps=steps,
            busy_s=steps * TIMES.step_s + served * work_s,
            queued=self.queue,
            running=batch * self.running,
            kv_usage=0.9 * batch / MAX_BATCH,
            max_num_seqs=MAX_BATCH,
            cold_start_s=(self.cold_start_s if self.reported_s is None else self.reported_s,) * min(self.running, 50),
            measured=self.measured,
        )

    def run(self, rate: float, seconds: int) -> list[int]:
        """Pass ``seconds`` at a steady rate; return the replicas wanted in each."""
        self.late = self.came = 0.0
        return super().run(rate, seconds)


def rate_of(replicas: float) -> float:
    """Return the requests per second that keep this many replicas at 0.55, about the policy's aim for a few replicas."""
    return 0.55 * replicas / WORK_S


def with_headroom(plant: QueuePlant, headroom: float) -> QueuePlant:
    """Return a plant whose policy has room for steps."""
    return replace(plant, rules=replace(plant.rules, headroom=headroom))
