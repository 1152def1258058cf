"""This module computes the replicas for lines of batches, which have a deadline in place of an SLO. Pure."""

import math
from dataclasses import dataclass, field

from serve_app.autoscaling.capacity import Capacity, Mix, Slo, StepTimes
from serve_app.autoscaling.history import Mean
from serve_app.autoscaling.signals import ModelLoad

NEARLY = 0.8
"""If no number of replicas reaches the pace, because too few lines run at once, replicas are asked for that reach this share of the fastest
possible pace. Twice as many replicas as for 0.8 reach 0.89."""
_FORGOTTEN_S = 60.0
"""Time constant with which the number of lines at once decays: a single look may find the number low, while new lines take the places of
lines that ended."""
_ANYTIME = Slo(ttft_s=math.inf, itl_s=math.inf)


@dataclass(slots=True)
class Lines:
    """The cost of one model's lines, learnt from the lines that were answered."""

    _prompt_tokens: Mean = field(default_factory=Mean)
    """Tokens of a line's prompt that engines computed; the prefix cache had the others."""
    _output_tokens: Mean = field(default_factory=Mean)
    _at_once: float = 0.0
    """The most lines that replicas had lately, decaying with `_FORGOTTEN_S`."""

    def learn(self, load: ModelLoad) -> None:
        self._prompt_tokens.add(load.line_prompt_tokens, load.lines, load.interval_s)
        self._output_tokens.add(load.line_finished_tokens, load.lines_finished, load.interval_s)
        self._at_once = max(load.lines_held, self._at_once * math.exp(-load.interval_s / _FORGOTTEN_S))

    def weigh(self, weight: float) -> None:
        """Let what was learnt so far count ``weight`` times as much, 0..1."""
        self._prompt_tokens.weigh(weight)
        self._output_tokens.weigh(weight)

    def replicas(self, load: ModelLoad, times: StepTimes | None, max_batch: float, *, demand: float) -> int:
        """Return how many replicas serve all other requests and, beside them, the lines at the pace of their deadlines.

        While no line has been answered, the result is 1: one replica, which measures what a line costs.

        Args:
            max_batch: Requests that a replica can run at once.
            demand: Demand of all other requests, in replicas that are busy all the time.
        """
        if not load.lines_per_s:
            return 0
        prompt, output = self._prompt_tokens.value, self._output_tokens.value
        if times is None or prompt is None or output is None:
            return 1
        mix = Mix(prompt_tokens=prompt, output_tokens=output)
        capacity = Capacity(times=times, mix=mix, max_batch=max_batch, slo=_ANYTIME)
        return math.ceil(demand / capacity.saturation() + _needed(load.lines_per_s, self._at_once, capacity))


def _needed(lines_per_s: float, at_once: float, capacity: Capacity) -> float:
    """Return how many replicas, not rounded, answer ``lines_per_s``.

    L lines run at once, L / n on each of n replicas. A line of O output tokens takes O steps. In them, the replica does the work w of this
    line and of each line beside it, so the line takes O x step_s + w x L / n. So n replicas answer L / (O x step_s + w x L / n) lines a
    second, and no number of replicas answers more than L / (O x step_s).
    """
    full = lines_per_s * capacity.work_s / capacity.saturation()
    if at_once < 1:
        return min(1.0, full)  # how many lines run at once is known only once some run
    steps_s, work_s = capacity.mix.output_tokens * capacity.times.step_s, at_once * capacity.work_s
    most = work_s / (steps_s * (1 / NEARLY - 1)) if steps_s else math.inf
    spare_s = at_once / lines_per_s - steps_s
    return min(most, max(full, work_s / spare_s)) if spare_s > 0 else most
