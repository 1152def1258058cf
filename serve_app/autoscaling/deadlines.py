"""Replicas for lines of batches, which have a deadline in place of an SLO. Pure."""

import math
from dataclasses import dataclass, field

from serve_app.autoscaling.capacity import Capacity, Mix, Slo, StepTimes
from serve_app.autoscaling.history import Mean
from serve_app.autoscaling.signals import Load

_MANY = 1e6
"""Requests at once of a replica that has not told its limit."""
_ANYTIME = Slo(ttft_s=math.inf, itl_s=math.inf)


@dataclass(slots=True)
class Lines:
    """What one model's lines cost, learnt from those that were answered."""

    _prompt_tokens: Mean = field(default_factory=Mean)
    _output_tokens: Mean = field(default_factory=Mean)

    def learn(self, load: Load) -> None:
        self._prompt_tokens.add(load.line_prompt_tokens, load.lines, load.interval_s)
        self._output_tokens.add(load.line_output_tokens, load.lines_finished, load.interval_s)

    def weigh(self, weight: float) -> None:
        """Let what was learnt so far count ``weight`` times as much, 0..1."""
        self._prompt_tokens.weigh(weight)
        self._output_tokens.weigh(weight)

    def replicas(self, load: Load, times: StepTimes | None, *, demand: float) -> int:
        """Return how many replicas do the demand of everybody else and, beside it, the lines at the pace of their deadlines.

        Until the cost of a line is known it is one replica, which finds that out.

        Args:
            demand: Of everybody else, in replicas that are busy all the time.
        """
        if not load.lines_per_s:
            return 0
        prompt, output = self._prompt_tokens.value, self._output_tokens.value
        if times is None or prompt is None or output is None:
            return 1
        mix = Mix(prompt_tokens=prompt, output_tokens=output)
        capacity = Capacity(times=times, mix=mix, max_batch=load.max_num_seqs or _MANY, slo=_ANYTIME)
        return math.ceil((demand + load.lines_per_s * capacity.work_s) / capacity.saturation())
