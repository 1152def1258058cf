"""`Plant` is a model and its replicas as the autoscaler sees them each second: arrivals by chance, batches that follow them, no queue."""

import math
import random
from dataclasses import dataclass, field

from serve_app.autoscaling.capacity import Slo, StepTimes
from serve_app.autoscaling.decision import Decision, Observation, ScalingRules
from serve_app.autoscaling.model_autoscaler import ModelAutoscaler
from serve_app.autoscaling.signals import ModelLoad

TIMES = StepTimes(step_s=0.03, output_token_s=0.0004, prompt_token_s=0.0001)
PROMPT, ANSWER = 400.0, 100.0
WORK_S = ANSWER * TIMES.output_token_s + PROMPT * TIMES.prompt_token_s
RULES = ScalingRules(slo=Slo(ttft_s=5.0, itl_s=0.1), headroom=0.0)
"""Without room for steps, so that the other rules decide."""


@dataclass
class Plant:
    """Runs one autoscaler. New replicas serve ``cold_start_s`` after the order; superfluous ones stop at once."""

    rules: ScalingRules = RULES
    running: int = 1
    minimum: int = 1
    maximum: int = 100
    cold_start_s: float = 30.0
    at: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    seed: int = 1
    _starting: list[float] = field(default_factory=list)
    _served: float = 0.0
    """Requests per second that end; they follow the arrivals with 5 s of inertia."""

    def __post_init__(self) -> None:
        self.autoscaler = ModelAutoscaler(self.rules)
        self._rng = random.Random(self.seed)

    @property
    def target(self) -> int:
        return self.running + len(self._starting)

    def load(self, rate: float) -> ModelLoad:
        """Return one second of about ``rate`` requests. Overloaded replicas are busy all the time."""
        arrived = max(0.0, self._rng.gauss(rate, math.sqrt(rate)))
        n = max(1, self.running)
        most = 0.9 * n / WORK_S if self.running else 0.0
        self._served = min(most, self._served + (arrived - self._served) / 5)
        prefilled, made = min(most, arrived) * PROMPT, self._served * ANSWER
        work_s = prefilled * TIMES.prompt_token_s + made * TIMES.output_token_s
        steps = max(0.0, n - work_s) / TIMES.step_s if made > 1 else 0.0
        return ModelLoad(
            interval_s=1.0,
            requests=arrived,
            prompt_tokens=arrived * PROMPT,
            prefilled_tokens=prefilled,
            output_tokens=made,
            finished=self._served,
            finished_tokens=made,
            first_tokens=self._served,
            steps=steps,
            busy_s=steps * TIMES.step_s + work_s,
            running=made * n / steps if steps else 0.0,
            kv_usage=0.1,
            max_num_seqs=256,
            cold_start_s=(self.cold_start_s,),
        )

    def see(self, load: ModelLoad) -> Observation:
        """Pass a second."""
        self.at += 1.0
        self.running += sum(ready <= self.at for ready in self._starting)
        self._starting = [ready for ready in self._starting if ready > self.at]
        return Observation(running=self.running, target=self.target, minimum=self.minimum, maximum=self.maximum, load=load)

    def obey(self, decision: Decision) -> None:
        """Start or stop replicas."""
        self._starting += [self.at + self.cold_start_s] * (decision.desired - self.target)
        while self.target > decision.desired:
            if self._starting:
                self._starting.pop()
            else:
                self.running -= 1
        self.decisions.append(decision)

    def tick(self, load: ModelLoad) -> Decision:
        """Pass a second, and carry out the autoscaler's decision."""
        decision = self.autoscaler.observe(self.see(load), at=self.at)
        self.obey(decision)
        return decision

    def run(self, rate: float, seconds: int) -> list[int]:
        """Pass ``seconds`` at a steady rate; return the replicas wanted in each."""
        return [self.tick(self.load(rate)).desired for _ in range(seconds)]
